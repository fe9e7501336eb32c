"""The token loop on real tiny checkpoints, scripted ones where the sequence must be known."""

import json
from dataclasses import replace
from itertools import count

import pytest
import torch
from builders import save_scripted, save_tiny
from torch.utils._python_dispatch import TorchDispatchMode

import qwen_scratch
from qwen_scratch import InputError, KVCache, SamplingParams, engine, load_model
from qwen_scratch.reference import Reference
from qwen_scratch.sampling import Sampler

IDS = [3, 141, 59, 26, 53, 58, 97, 93]
GREEDY = SamplingParams(temperature=0, max_new_tokens=20)


def test_greedy_ids_equal_the_reference(tiny):
    result = qwen_scratch.complete(load_model(tiny, device="cpu"), None, IDS, GREEDY)
    assert result.token_ids == Reference(tiny).generate(IDS, 20)
    assert result.stop_reason == "length"
    assert result.text == ""  # no tokenizer was given


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Says a, b, c, d, e, ... after its prompt's line break."""
    letters = list("abcdefghijklmnopqrstuvwxyz")
    return save_scripted(tmp_path_factory.mktemp("script"), ["Ċ", *letters])


def ids_of(folder, *pieces):
    tokenizer = qwen_scratch.Tokenizer(folder)
    return [tokenizer.token_id(piece) for piece in pieces]


@pytest.mark.parametrize("kind", ["int", "list", "one", "config.json", "none"])
def test_any_of_the_stop_ids_ends_the_answer(script, tmp_path, kind):
    model = load_model(script, device="cpu")
    newline, a, b, c, d = ids_of(script, "Ċ", "a", "b", "c", "d")
    model.generation_config = {
        "int": {"eos_token_id": c},
        "list": {"eos_token_id": [d, c]},
        "one": {"eos_token_id": [c]},
    }.get(kind, {})
    if kind == "config.json":
        model.config = type(model.config)(**{**vars(model.config), "eos_token_ids": (c,)})
    result = qwen_scratch.complete(model, None, [newline], SamplingParams(temperature=0, max_new_tokens=5))
    if kind == "none":
        assert (len(result.token_ids), result.stop_reason) == (5, "length")
    else:
        assert (result.token_ids, result.stop_reason) == ([a, b, c], "eos")  # with the stop id


def test_generation_config_comes_before_config_json(script):
    model = load_model(script, device="cpu")
    newline, b, d = ids_of(script, "Ċ", "b", "d")
    model.config = type(model.config)(**{**vars(model.config), "eos_token_ids": (b,)})
    model.generation_config = {"eos_token_id": [d]}
    result = qwen_scratch.complete(model, None, [newline], GREEDY)
    assert result.token_ids[-1] == d
    model.generation_config = {"eos_token_id": "d"}
    with pytest.raises(InputError, match="eos_token_id"):
        qwen_scratch.complete(model, None, [newline], GREEDY)


def test_extra_stop_ids_and_ignored_eos(script):
    model = load_model(script, device="cpu")
    newline, b, d = ids_of(script, "Ċ", "b", "d")
    model.generation_config = {"eos_token_id": b}

    def run(**options):
        result = qwen_scratch.complete(
            model, None, [newline], SamplingParams(temperature=0, max_new_tokens=8, **options)
        )
        return len(result.token_ids), result.stop_reason

    assert run() == (2, "eos")
    assert run(stop_token_ids=(b,)) == (2, "eos")  # eos wins
    assert run(stop_token_ids=(d,)) == (2, "eos")  # added, not instead
    assert run(ignore_eos=True) == (8, "length")
    assert run(ignore_eos=True, stop_token_ids=(d,)) == (4, "stop")


def test_the_last_id_may_be_the_stop_id(script):
    model = load_model(script, device="cpu")
    newline, b = ids_of(script, "Ċ", "b")
    model.generation_config = {"eos_token_id": b}
    result = qwen_scratch.complete(model, None, [newline], SamplingParams(temperature=0, max_new_tokens=2))
    assert result.stop_reason == "eos"


@pytest.mark.parametrize("ids", [[], [-1], [3, 320], [10**9]])
def test_ids_that_cannot_be_looked_up(tiny, ids):
    with pytest.raises(InputError, match=r"empty|outside"):
        qwen_scratch.complete(load_model(tiny, device="cpu"), None, ids, GREEDY)


def test_options_that_ids_cannot_take(tiny):
    model, tokenizer = qwen_scratch.load(tiny, device="cpu")
    for options in ({"system": "x"}, {"thinking": False}, {"tools": [{}]}):
        with pytest.raises(InputError, match="ids"):
            qwen_scratch.complete(model, tokenizer, IDS, GREEDY, **options)
    with pytest.raises(InputError, match="messages"):
        qwen_scratch.complete(model, tokenizer, {"messages": []}, GREEDY, system="x")
    with pytest.raises(InputError, match="already begin"):
        qwen_scratch.complete(model, tokenizer, [{"role": "system", "content": "y"}], GREEDY, system="x")
    with pytest.raises(InputError, match="without a tokenizer"):
        qwen_scratch.complete(model, None, "text", GREEDY)
    for bad in ("5", 100.5):
        with pytest.raises(InputError, match="context"):
            qwen_scratch.complete(model, tokenizer, IDS, GREEDY, max_context=bad)


def test_the_head_sees_one_position(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    shapes = []
    model.lm_head.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    ids = [i * 7 % 320 for i in range(200)]
    result = qwen_scratch.complete(model, None, ids, SamplingParams(temperature=0, max_new_tokens=3))
    assert shapes == [(1, 1, 48)] * 3
    cache = KVCache(model.config, 1, 200)
    last = model(torch.tensor([ids]), cache=cache, last_only=True)[0, 0]
    full = model(torch.tensor([ids]))[0, -1]
    assert (last - full).abs().max() <= 1e-5 * full.abs().max()
    assert result.token_ids[0] == int(full.argmax())


def test_inference_mode_does_not_leak_to_the_caller(tiny):
    running = qwen_scratch.stream(load_model(tiny, device="cpu"), None, IDS, GREEDY)
    next(running)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_memory_does_not_grow_with_tokens(tiny):
    """No graph, no list of logits: after 200 steps as many tensors are alive as after 20."""
    import gc

    model = load_model(tiny, device="cpu")
    running = qwen_scratch.stream(model, None, IDS, SamplingParams(temperature=0, max_new_tokens=220))

    def alive(steps):
        for _ in range(steps):
            next(running)
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    assert alive(20) == alive(180)


def test_each_request_starts_afresh(tiny):
    model = load_model(tiny, device="cpu")
    long = [i * 11 % 320 for i in range(60)]
    runs = [qwen_scratch.complete(model, None, ids, GREEDY).token_ids for ids in (long, IDS, long)]
    assert runs[0] == runs[2]
    abandoned = qwen_scratch.stream(model, None, long, GREEDY)
    next(abandoned)
    assert qwen_scratch.complete(model, None, IDS, GREEDY).token_ids == runs[1]


def test_a_warm_cache_is_continued_not_repeated(tiny):
    model = load_model(tiny, device="cpu", exact=True)
    fresh = qwen_scratch.complete(model, None, IDS, GREEDY).token_ids
    cache = KVCache(model.config, 1, 40)
    with torch.inference_mode():
        model(torch.tensor([IDS[:5]]), cache=cache)
    seen = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    request = engine.Request(IDS, Sampler(GREEDY), max_new_tokens=20)
    assert [token for _, token in engine.run(model, [request], cache)] == fresh
    assert seen == [3] + [1] * 19


def test_non_finite_logits_stop_the_run(tmp_path):
    model = load_model(save_tiny(tmp_path / "model", "qwen2"), device="cpu")
    for poison in (float("nan"), float("inf"), -float("inf")):
        model.model.norm.weight[3] = poison
        for params in (GREEDY, SamplingParams(temperature=1.0, top_p=0.9, seed=0)):
            with pytest.raises(RuntimeError, match="non-finite"):
                qwen_scratch.complete(model, None, IDS, params)


def test_minus_infinity_on_some_tokens_is_legal():
    logits = torch.full((50,), -float("inf"))
    logits[[4, 9]] = 1.0
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=0)):
        sampler = Sampler(params)
        sampler.begin([1], 50, torch.device("cpu"))
        token, largest = sampler.pick(logits).tolist()
        assert token in (4, 9)
        assert largest == 1.0


def test_timings_add_up(tiny, monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(engine, "perf_counter", lambda: next(ticks))
    model = load_model(tiny, device="cpu")
    result = qwen_scratch.complete(model, None, IDS, SamplingParams(temperature=0, max_new_tokens=4))
    assert (result.ttft_s, result.request.decode_s, result.decode_tokens_per_s) == (1, 3, 1.0)
    one = qwen_scratch.complete(model, None, IDS, SamplingParams(temperature=0, max_new_tokens=1))
    assert one.decode_tokens_per_s is None


def test_one_copy_from_the_device_per_token(tiny, monkeypatch):
    """On a GPU each is a wait. Seen here as reads of floating tensors, and as operations that must know a value or a count."""
    reads: list[str] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            waits = func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
            if waits and (args[0].is_floating_point() or args[0].numel() > 1):  # not the lengths, which stay on the CPU
                reads.append(str(func))
            return func(*args, **(kwargs or {}))

    def tolist(tensor, plain=torch.Tensor.tolist):
        reads.extend(["tolist"] * tensor.is_floating_point())
        return plain(tensor)

    model = load_model(tiny, device="cpu", exact=True)
    for params in (GREEDY, SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.5)):
        running = qwen_scratch.stream(model, None, IDS, replace(params, max_new_tokens=8, ignore_eos=True))
        next(running)
        with monkeypatch.context() as patch, Spy():
            patch.setattr(torch.Tensor, "tolist", tolist)
            for _ in range(3):
                reads.clear()
                next(running)
                assert reads == ["tolist"]


def test_choosing_a_token_reads_nothing_from_the_device():
    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket is not torch.ops.aten._local_scalar_dense
            return func(*args, **(kwargs or {}))

    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.5))
    sampler.begin([1, 2], 50, torch.device("cpu"))
    with Spy():
        picked = sampler.pick(torch.randn(50))
    assert sampler.in_answer.nonzero().tolist() == [[int(picked[0])]]


def test_long_prompts_are_read_in_chunks(family, tmp_path, monkeypatch, capsys):
    """The quick path reads some tokens at a time, ragged rows too; the result is the same, and a bar tells how far it is."""
    long = torch.randint(0, 150, (1300,), generator=torch.Generator().manual_seed(0)).tolist()
    folder = save_tiny(tmp_path / "m", family, max_position_embeddings=2000)
    fast, exact = (load_model(folder, device="cpu", exact=exact) for exact in (False, True))
    sizes = []
    forward = engine.forward

    def spy(model, rows, cache):
        sizes.append([len(row) for row in rows])
        return forward(model, rows, cache)

    monkeypatch.setattr(engine, "forward", spy)
    params = replace(GREEDY, max_new_tokens=3, ignore_eos=True)
    expected = [qwen_scratch.complete(exact, None, ids, params).token_ids for ids in (long, long[:1025], long[:1024])]
    assert [size for size in sizes if size != [1]] == [[1300], [1025], [1024]]
    sizes.clear()
    ours = [qwen_scratch.complete(fast, None, ids, params).token_ids for ids in (long, long[:1025], long[:1024])]
    assert [size for size in sizes if size != [1]] == [[512], [512], [276], [512], [512], [512], [512]]
    assert sizes.count([1]) == 7  # the last of 1025, and two new tokens each
    assert ours == expected
    sizes.clear()
    together = qwen_scratch.complete_batch(fast, None, [long, long[:600]], params)
    assert sizes[:2] == [[512, 512], [788, 88]]
    assert together[0].token_ids == expected[0]
    assert capsys.readouterr().err == ""

    monkeypatch.setattr("tqdm.std.time", count(0, 1.5).__next__)  # each look at the clock, one and a half seconds later
    running = qwen_scratch.stream(fast, None, long, params)
    running.progress = True
    next(running)
    assert "reading the prompt" in capsys.readouterr().err


def test_first_token_top_is_the_plain_distribution(tiny):
    model = load_model(tiny, device="cpu")
    result = qwen_scratch.complete(model, None, IDS, SamplingParams(temperature=2.0, seed=0, max_new_tokens=1))
    probs = model(torch.tensor([IDS]))[0, -1].softmax(-1)
    assert [i for i, _, _ in result.request.first_top] == probs.topk(5).indices.tolist()
    assert result.request.first_top[0][2] == pytest.approx(float(probs.max()), rel=1e-4)


def test_context_bounds_the_answer_never_the_prompt(tmp_path):
    model = load_model(save_tiny(tmp_path / "model", "qwen3", max_position_embeddings=64), device="cpu")
    with pytest.raises(InputError, match="70 > 64"):
        qwen_scratch.stream(model, None, list(range(70)), GREEDY)
    with pytest.raises(InputError, match="64 = 64"):
        qwen_scratch.stream(model, None, list(range(64)), GREEDY)
    result = qwen_scratch.complete(model, None, list(range(60)), SamplingParams(temperature=0, max_new_tokens=32768))
    assert len(result.token_ids) == 4
    assert result.stop_reason == "length"
    assert result.prompt_ids == list(range(60))
    assert "4 new tokens instead of 32768" in result.notices[0]
    bounded = qwen_scratch.complete(model, None, list(range(10)), GREEDY, max_context=16)
    assert len(bounded.token_ids) == 6
    for bad in (0, 65):
        with pytest.raises(InputError, match="1 to 64"):
            qwen_scratch.stream(model, None, [1], GREEDY, max_context=bad)


def test_a_huge_context_reserves_nothing(tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3", max_position_embeddings=1_000_000)
    model = load_model(folder, device="cpu")
    result = qwen_scratch.complete(model, None, IDS, SamplingParams(temperature=0, max_new_tokens=5))
    assert result.kv_cache_bytes == KVCache(model.config, 1, 13).nbytes < 2**20
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 1_000_000


def test_float16_on_a_cpu_is_remarked_on(tiny):
    for dtype, remarks in ((torch.float16, 1), (torch.bfloat16, 0)):
        model = load_model(tiny, device="cpu", dtype=dtype)
        assert len(qwen_scratch.stream(model, None, IDS, GREEDY).result.notices) == remarks


@pytest.mark.parametrize("n", [0, 3, 1000])
def test_logprobs_are_the_models_own(tiny, n):
    """Of the plain distribution at each step, whatever penalties and temperature then made of it."""
    model = load_model(tiny, device="cpu")
    params = SamplingParams(temperature=1.7, repetition_penalty=1.3, seed=5, max_new_tokens=6, logprobs=n)
    result = qwen_scratch.complete(model, None, IDS, params)
    assert [record.token_id for record in result.logprobs] == result.token_ids
    for step, record in enumerate(result.logprobs):
        expected = model(torch.tensor([IDS + result.token_ids[:step]]))[0, -1].log_softmax(-1)
        assert record.logprob == pytest.approx(float(expected[record.token_id]), abs=1e-4)
        best = expected.topk(min(n, 320))
        assert [i for i, _ in record.top] == best.indices.tolist()
        assert [value for _, value in record.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert qwen_scratch.complete(model, None, IDS, GREEDY).logprobs == []


def test_chat_also_stops_where_the_template_ends_a_turn(tmp_path):
    """A chat fine-tune that kept the base model's stop id must not run on into an invented next turn."""
    folder = save_scripted(tmp_path / "m", ["Ċ", "a", "<|im_end|>", "b", "c", "<|endoftext|>"])
    model, tokenizer = qwen_scratch.load(folder, device="cpu")
    base, end = tokenizer.token_id("<|endoftext|>"), tokenizer.token_id("<|im_end|>")
    model.generation_config = {"eos_token_id": base}
    params = SamplingParams(temperature=0, max_new_tokens=5)
    chat = qwen_scratch.complete(model, tokenizer, "hi", params)
    assert (chat.text, chat.stop_reason, chat.eos_token_ids) == ("a", "eos", [base, end])
    raw = qwen_scratch.complete(model, tokenizer, "hi\n", params, raw=True)
    assert (raw.text, raw.stop_reason, raw.eos_token_ids) == ("abc", "eos", [base])
    on = qwen_scratch.complete(model, tokenizer, "hi", SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True))
    assert (on.text, on.stop_reason) == ("abc", "length")
