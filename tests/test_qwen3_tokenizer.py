"""The real Qwen3 tokenizer and chat template, held against the reference's."""

import json
import lzma
import random
import shutil

import pytest
from conftest import ROOT
from transformers import AutoTokenizer

from qwen_scratch import Tokenizer

DATA = ROOT / "tests" / "data" / "qwen3_tokenizer"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "tokenizer.json").write_bytes(lzma.decompress((DATA / "tokenizer.json.xz").read_bytes()))
    shutil.copy(DATA / "tokenizer_config.json", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # AutoTokenizer wants one
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_published_ids(ours):
    """A published walk through Qwen3-8B shows these; a closed think block ends the prompt where thinking is off."""
    text = ours.render([{"role": "user", "content": "请用一句话解释注意力机制。"}], thinking=False)
    assert ours.encode(text) == [
        151644, 872, 198, 14880, 11622, 105321, 104136, 108260, 100674, 1773, 151645, 198, 151644, 77091, 198,
        151667, 271, 151668, 271,
    ]  # fmt: skip
    assert ours.encode("What's for lunch today?") == [3838, 594, 369, 15786, 3351, 30]


def test_what_closes_a_turn(ours):
    assert ours.turn_end == 151645


TEXTS = [
    "Hello, world!", "1234567", "->(x):\n    return x\r\n", "\ttabs  and   blanks\n\n\n", "naïve café", "cafe\u0301", "😀👩‍👩‍👧",
    "漢字かな交じり文", "ภาษาไทย", "עברית العربية", "x" * 300, "", " ", "<|im_end|>.<|im_end|>", "a<think>b</think>c", "Ünïcödé",
    "\u1112\u1161\u11ab", "price: $12.50 (20% off!)", "def f(a, *b, **c): ...", "I'll they've it's WE'RE",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_ids_and_text_equal_the_reference(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def conversation(chance):
    """A random conversation: system turn or none, thinking in its history, tool calls and results, any text."""

    def text():
        return " ".join(chance.choice(TEXTS[:18]) for _ in range(chance.randrange(4)))

    turns = [{"role": "system", "content": text()}] if chance.random() < 0.5 else []
    for _ in range(chance.randrange(1, 4)):
        turns.append({"role": "user", "content": text()})
        answer = {"role": "assistant", "content": text()}
        kind = chance.randrange(5)
        if kind == 1:
            answer["content"] = f"<think>\n{text()}\n</think>\n\n{text()}"
        elif kind == 2:
            answer[chance.choice(["reasoning_content", "reasoning", "thinking"])] = text()
        elif kind == 3:
            call = {"name": "add", "arguments": chance.choice([{"a": 1, "b": "é <&>"}, '{"a": 1}'])}
            answer["tool_calls"] = [chance.choice([call, {"type": "function", "function": call}])] * chance.randrange(
                1, 3
            )
            turns.append(answer)
            turns.extend({"role": "tool", "content": text()} for _ in range(chance.randrange(1, 3)))
            continue
        turns.append(answer)
    if chance.random() < 0.7:
        turns.append({"role": "user", "content": text()})
    return turns


@pytest.mark.parametrize("seed", range(3))
def test_conversations_render_as_the_reference_does(ours, theirs, seed):
    chance = random.Random(seed)
    for _ in range(100):
        turns = conversation(chance)
        thinking = chance.choice([None, True, False])
        options = {} if thinking is None else {"enable_thinking": thinking}
        expected = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
        assert ours.render(turns, thinking) == expected
        ids = theirs.apply_chat_template(turns, tokenize=True, return_dict=False, add_generation_prompt=True, **options)
        assert ours.encode(expected) == ids
