"""Real trained weights: SmolLM2-135M-Instruct as a Qwen2 checkpoint (see scripts/make_smollm2.py)."""

import json
import os

import pytest
import torch

import qwen_scratch
from qwen_scratch import SamplingParams, parity
from qwen_scratch.reference import Reference


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
    yield
    torch.set_num_threads(before)


CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
"""
LONG = "The old lighthouse keeper wrote one line in his book every evening. " * 48
CHAT = [
    "What is the capital of France? Answer in one sentence.",
    "Write a haiku about rain.",
    "Why is the sky blue?",
    "List three uses of copper.",
    "Translate to French: the book is on the table.",
    "What is 17 + 25?",
    "Tell me a story about a fox 🦊 and an owl 🦉.",
    "法国的首都是哪里？",
    "请用一句话解释什么是重力。",
    f"What does this code do?\n\n```python\n{CODE}```",
]
RAW = [
    "Once upon a time",
    "The three primary colours are",
    CODE,
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    "从前有一座山，山上有一座庙，",
    "北京是",
    "🎉🎉🎉 Happy birthday! 🎂",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: Who wrote Hamlet?\nA:",
    LONG,
]


NEW_TOKENS = int(os.environ.get("QWEN_SCRATCH_NEW_TOKENS", "16"))


def test_the_command_answers_and_stops(smollm2, generate):
    question = "What is the capital of France? Answer in one sentence."
    done = generate(question, "--model", smollm2, "--greedy")
    assert done.returncode == 0
    assert done.stdout.decode() == "The capital of France is Paris.\n"
    assert "stopped by eos" in done.stderr.decode()
    out = json.loads(generate(question, "--model", smollm2, "--greedy", "--json", "--quiet").stdout)
    assert out["generated_text"] == "The capital of France is Paris."
    assert out["stop_reason"] == "eos"
    assert out["eos_token_ids"] == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_ids_equal_the_reference(smollm2, dtype):
    """By the reference's own loop on the very same input ids: 20 prompts of every kind in float32, by the fast path too; and
    ten of the short ones in bfloat16, which many CPUs emulate slowly."""
    model, tokenizer = qwen_scratch.load(smollm2, device="cpu", exact=True, dtype=dtype)
    fast = qwen_scratch.load_model(smollm2, device="cpu", dtype=dtype) if dtype == torch.float32 else None
    reference = Reference(smollm2, dtype)
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
    lengths = []
    for prompt in CHAT + RAW if dtype == torch.float32 else CHAT[::2] + RAW[::2]:
        result = qwen_scratch.complete(model, tokenizer, prompt, params, raw=prompt in RAW)
        assert result.token_ids == reference.generate(result.prompt_ids, NEW_TOKENS), prompt
        assert result.text == tokenizer.decode(result.token_ids)
        if fast is not None:
            theirs = qwen_scratch.complete(fast, tokenizer, prompt, params, raw=prompt in RAW)
            assert theirs.token_ids == result.token_ids, prompt
        lengths.append(len(result.prompt_ids))
    assert dtype != torch.float32 or (len(lengths) == 20 and max(lengths) >= 600)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_equal_the_reference(smollm2, dtype):
    model, tokenizer = qwen_scratch.load(smollm2, device="cpu", exact=True, dtype=dtype)
    ids = torch.tensor([tokenizer.encode(LONG)[:200]])
    assert torch.equal(model(ids), Reference(smollm2, dtype).logits(ids))


def test_streamed_events_join_to_the_result(smollm2):
    model, tokenizer = qwen_scratch.load(smollm2, device="cpu", exact=True)
    running = qwen_scratch.stream(model, tokenizer, CHAT[6], SamplingParams(temperature=0, max_new_tokens=40))
    events = list(running)
    assert "".join(event.text for event in events) == running.result.text
    assert [event.token_id for event in events] == running.result.token_ids
    assert {event.kind for event in events} == {"answer"}


def test_template_renders_as_the_reference_does(smollm2):
    from transformers import AutoTokenizer

    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "é"},
    ]
    tokenizer = qwen_scratch.Tokenizer(smollm2)
    theirs = AutoTokenizer.from_pretrained(smollm2)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(messages) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_op_of_every_layer_equals_the_reference(smollm2, dtype):
    model = qwen_scratch.load_model(smollm2, device="cpu", exact=True, dtype=dtype)
    ids = parity.prompt_ids(str(smollm2), None, model.config.vocab_size)
    report = parity.check(model, Reference(smollm2, dtype), ids, steps=4)
    assert report["ok"], parity.table(report)
    assert all(way["equal"] for name, way in report["ways"].items() if name != "ragged batch")


def test_batch_of_prompts_in_float32(smollm2):
    """Rows of 40 to 600 tokens side by side, each with the ids that it gives alone."""
    model, tokenizer = qwen_scratch.load(smollm2, device="cpu", exact=True, dtype="float32")
    params = SamplingParams(temperature=0, max_new_tokens=16)
    prompts = [CHAT[0], LONG, CHAT[8]]
    for prompt, result in zip(prompts, qwen_scratch.complete_batch(model, tokenizer, prompts, params), strict=True):
        assert result.token_ids == qwen_scratch.complete(model, tokenizer, prompt, params).token_ids
