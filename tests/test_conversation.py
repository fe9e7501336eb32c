"""Several turns on one cache, each held against a run that starts from nothing."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
import torch
from builders import TEMPLATE_WITH_DEFAULT_SYSTEM, save_scripted, save_tiny, save_tokenizer

import qwen_scratch
from qwen_scratch import Conversation, InputError, KVCache, SamplingParams

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(family, tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("chat") / family, family, vocab_size=320, max_position_embeddings=4096)
    save_tokenizer(folder)
    return qwen_scratch.load(folder, device="cpu")


def finish(running):
    for _ in running:
        pass
    return running.result


def common_beginning(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_cache(conversation):
    """What the cache holds is what a cold run of the same ids would hold."""
    cache, result = conversation._cache, conversation._running.result
    n = int(cache.lengths[0])
    ids = (result.prompt_ids + result.token_ids)[:n]
    cold = KVCache(conversation.model.config, 1, n)
    with torch.inference_mode():
        conversation.model(torch.tensor([ids]), cache=cold)
    for ours, expected in ((cache.k, cold.k), (cache.v, cold.v)):
        torch.testing.assert_close(ours[:, :, :, :n], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_every_turn_equals_a_cold_run(loaded, seed):
    """Any order of asking, retrying, breaking off, switching thinking and system turn: same prompt, same ids."""
    model, tokenizer = loaded
    chance = random.Random(seed)
    conversation = Conversation(model, tokenizer, GREEDY)
    fed = []
    for _ in range(12):
        act = chance.randrange(6)
        if act == 0:
            conversation.system = chance.choice([None, "", "Be brief."])
        if act == 1:
            conversation.thinking = chance.choice([None, True, False])
        running = (
            conversation.retry()
            if act == 2 and conversation.messages[-1:] and conversation.messages[-1]["role"] == "assistant"
            else conversation.ask(chance.choice(["the cat", "漢字 😀?", "12345 " * 5]))
        )
        asked = conversation.messages
        if act == 3:
            for _ in range(chance.randrange(4)):
                next(running)
            running.interrupt()
            result = running.result
        else:
            result = finish(running)
        assert result.rendered_prompt == tokenizer.render(asked, conversation.thinking)
        assert result.prompt_ids == tokenizer.encode(result.rendered_prompt)
        assert result.reused_tokens == min(common_beginning(fed, result.prompt_ids), len(result.prompt_ids) - 1)
        cold = qwen_scratch.complete(model, None, result.prompt_ids, GREEDY)
        assert result.token_ids == cold.token_ids[: len(result.token_ids)]
        if result.token_ids:
            fed = result.prompt_ids + result.token_ids[:-1]
            check_cache(conversation)
        else:
            fed = fed[: result.reused_tokens]


def test_past_answers_are_rendered_not_appended(loaded):
    """With thinking off the prompt ends in an empty think block, which the same turn as history has not."""
    model, tokenizer = loaded
    conversation = Conversation(model, tokenizer, GREEDY, thinking=False)
    first = finish(conversation.ask("the cat"))
    assert first.rendered_prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    second = finish(conversation.ask("the mat"))
    history = f"<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n{first.text}<|im_end|>\n"
    assert second.rendered_prompt.startswith(history + "<|im_start|>user\n")
    header = tokenizer.encode("<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n")
    assert second.reused_tokens == len(header)


def test_only_new_tokens_are_computed(loaded):
    model, tokenizer = loaded
    conversation = Conversation(model, tokenizer, GREEDY)
    seen = []
    hook = model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    finish(conversation.ask("the cat"))
    result = finish(conversation.retry())
    hook.remove()
    n = len(result.prompt_ids)
    assert result.reused_tokens == n - 1
    assert seen == [n, *[1] * 11, 1, *[1] * 11]


def test_thinking_of_past_turns(tmp_path):
    """It is part of the messages, for templates that want it; this one drops it."""
    words = ["Ċ", "<think>", "c", "</think>", "a", "<|im_end|>"]
    model, tokenizer = qwen_scratch.load(save_scripted(tmp_path / "m", words), device="cpu")
    conversation = Conversation(model, tokenizer)
    assert finish(conversation.ask("hi")).thinking == "c"
    assert conversation.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a", "reasoning_content": "c"},
    ]
    second = finish(conversation.ask("ho"))
    assert second.rendered_prompt == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nho<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_what_was_broken_off_is_kept(loaded):
    model, tokenizer = loaded
    conversation = Conversation(model, tokenizer, GREEDY)
    running = conversation.ask("the cat")
    for _ in range(5):
        next(running)
    running.interrupt()
    assert conversation.messages[-1] == {"role": "assistant", "content": running.result.text}
    unread = conversation.ask("the mat")
    finish(conversation.ask("the dog"))  # the one before was never read: a question without an answer
    assert [turn["role"] for turn in conversation.messages] == ["user", "assistant", "user", "user", "assistant"]
    assert (list(unread), unread.result.stop_reason) == ([], "interrupted")
    check_cache(conversation)


def test_a_conversation_goes_on_from_messages(loaded):
    model, tokenizer = loaded
    first = Conversation(model, tokenizer, GREEDY, system="Be brief.")
    for text in ("the cat", "the mat"):
        finish(first.ask(text))
    second = Conversation(model, tokenizer, GREEDY)
    second.start(first.messages)
    assert second.messages == first.messages
    assert second.system == "Be brief."
    ours, theirs = (finish(conversation.ask("the dog")) for conversation in (first, second))
    assert (ours.prompt_ids, ours.token_ids) == (theirs.prompt_ids, theirs.token_ids)
    second.start([])
    assert second.messages == [{"role": "system", "content": "Be brief."}]
    second.start([{"role": "user", "content": "the owl"}])
    assert second.system is None
    assert finish(second.retry()).rendered_prompt.count("the owl") == 1
    with pytest.raises(InputError, match="message 0"):
        second.start([{"role": "user", "content": 5}])
    assert len(second.messages) == 2


def test_a_second_system_turn(loaded):
    conversation = Conversation(*loaded, GREEDY)
    conversation.start([{"role": "system", "content": "a"}, {"role": "system", "content": "b"}])
    assert finish(conversation.ask("hi")).rendered_prompt.count("<|im_start|>system") == 2


def test_an_ask_or_retry_can_be_taken_back(loaded):
    conversation = Conversation(*loaded, GREEDY)
    conversation.withdraw()
    finish(conversation.ask("the cat"))
    before = conversation.messages
    for again in (lambda: conversation.ask("the mat"), conversation.retry):
        running = again()
        next(running)
        conversation.withdraw()
        assert conversation.messages == before
        assert list(running) == []
    finish(conversation.ask("the dog"))
    check_cache(conversation)


def test_nothing_to_retry(loaded):
    with pytest.raises(InputError, match="nothing has been asked"):
        Conversation(*loaded).retry()


def test_the_oldest_exchanges_give_way_to_the_context(loaded):
    model, tokenizer = loaded
    conversation = Conversation(model, tokenizer, GREEDY, system="Be brief.", max_context=200)
    notices = []
    for n in range(12):
        result = finish(conversation.ask(f"the cat sat {n}"))
        assert len(result.prompt_ids) + 12 <= 200
        assert len(result.token_ids) == 12
        notices += result.notices
        assert result.rendered_prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert result.rendered_prompt.endswith(f"the cat sat {n}<|im_end|>\n<|im_start|>assistant\n")
    assert notices
    assert all("outgrown the context of 200 tokens" in notice for notice in notices)
    assert "oldest 2 messages" in notices[0]
    assert len(conversation.messages) == 25  # nothing is lost: what no longer fits is still there to be saved

    with pytest.raises(InputError, match="leaves no room"):
        conversation.ask("1" * 300)
    assert len(conversation.messages) == 25
    long = finish(conversation.ask("1" * 150))  # alone, and with less room for its answer than asked
    assert long.rendered_prompt.count("<|im_start|>user") == 1


def test_a_context_that_ends_within_the_answer(loaded):
    conversation = Conversation(*loaded, GREEDY, max_context=40)
    result = finish(conversation.ask("1" * 18))
    assert result.stop_reason == "length"
    assert len(result.prompt_ids) + len(result.token_ids) == 40
    assert "instead of 12" in result.notices[0]


def test_the_cache_grows_and_keeps_what_it_has(loaded):
    conversation = Conversation(*loaded, GREEDY)
    sizes = []
    for _ in range(20):
        result = finish(conversation.ask("the cat"))
        sizes.append(conversation._cache.max_seq_len)
        assert result.kv_cache_bytes == conversation._cache.nbytes
    check_cache(conversation)
    assert len(set(sizes)) < 8  # not at every turn


def test_a_seed_counts_up(loaded):
    def answers():
        conversation = Conversation(*loaded, SamplingParams(temperature=2.0, seed=7, max_new_tokens=8, top_k=0))
        first = finish(conversation.ask("the cat"))
        again = finish(conversation.retry())
        assert (first.sampling["seed"], again.sampling["seed"]) == (7, 8)
        return first.token_ids, again.token_ids

    assert answers() == answers()
    assert answers()[0] != answers()[1]
    conversation = Conversation(*loaded, SamplingParams(temperature=2.0))  # a fresh one, that can be asked for again
    seed = conversation.sampling["seed"]
    assert [finish(conversation.ask("the cat")).sampling["seed"] for _ in range(2)] == [seed, seed + 1]
    conversation.params = GREEDY
    assert (conversation.sampling["temperature"], conversation.sampling["seed"]) == (0, None)


def test_bad_values_show_before_the_first_turn(loaded, tmp_path):
    model, tokenizer = loaded
    with pytest.raises(InputError, match="context"):
        Conversation(model, tokenizer, max_context=0)
    save_tokenizer(tmp_path, template=None)
    with pytest.raises(InputError, match="chat template"):
        Conversation(model, qwen_scratch.Tokenizer(tmp_path))


def test_requests_in_threads_do_not_see_each_other(loaded):
    """Streams, conversations and batches at the same time on one model: each as it is alone."""
    model, tokenizer = loaded

    def single(n):
        params = SamplingParams(temperature=1.5, seed=n, max_new_tokens=40)
        return qwen_scratch.complete(model, tokenizer, f"the cat {n}", params).token_ids

    def talk(n):
        conversation = Conversation(model, tokenizer, GREEDY)
        return [finish(conversation.ask(f"{n} {word}")).token_ids for word in ("cat", "dog", "mat")]

    def batch(n):
        results = qwen_scratch.complete_batch(model, tokenizer, ["the", f"the cat sat {n}"], GREEDY)
        return [result.token_ids for result in results]

    jobs = [(kind, n) for n in range(5) for kind in (single, talk, batch)]
    alone = [kind(n) for kind, n in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda job: job[0](job[1]), jobs))
    assert together == alone


def test_streams_read_in_turn_do_not_see_each_other(loaded):
    model, tokenizer = loaded
    texts = ["the cat", "a much longer question about the dog", "12345"]
    alone = [qwen_scratch.complete(model, tokenizer, text, GREEDY).token_ids for text in texts]
    running = [qwen_scratch.stream(model, tokenizer, text, GREEDY) for text in texts]
    for _ in zip_longest(*running):
        pass
    assert [one.result.token_ids for one in running] == alone


def test_system_turn_has_three_states(tmp_path):
    """Not given: the template's own. Empty: an empty one. Given: it."""
    folder = save_tiny(tmp_path / "m", "qwen2", vocab_size=320)
    save_tokenizer(folder, TEMPLATE_WITH_DEFAULT_SYSTEM)
    conversation = Conversation(*qwen_scratch.load(folder, device="cpu"), GREEDY)
    rest = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for system, front in ((None, "You are helpful."), ("", ""), ("Be brief.", "Be brief.")):
        conversation.start([])
        conversation.system = system
        assert conversation.ask("hi").result.rendered_prompt == f"<|im_start|>system\n{front}<|im_end|>\n{rest}"
