"""The real Qwen3 tokenizer and chat template, held against the reference's."""

import json
import lzma
import random
import shutil
import unicodedata

import pytest
from conftest import ROOT
from transformers import AutoTokenizer

from qwen_scratch import Tokenizer
from qwen_scratch.prompt import encode_prompt

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


@pytest.mark.parametrize("before", [".", ",", ")", "\n", " ", "é", "😀"])
@pytest.mark.parametrize("marker", ["<|im_end|>", "</think>", "<tool_call>"])
def test_markers_are_found_right_behind_anything(ours, theirs, before, marker):
    ids = ours.encode(before + marker)
    assert ids == [*ours.encode(before), theirs.convert_tokens_to_ids(marker)]


@pytest.mark.parametrize("text", ["café Ångström", "한글 각", "Tiếng Việt ở đâu", "ê̄ ǟ"])
def test_decomposed_text_is_composed(ours, theirs, text):
    """As a Mac types it: the same ids as the composed form, so that decoding gives that one, not the bytes typed."""
    composed, decomposed = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert composed != decomposed
    ids = ours.encode(decomposed)
    assert ids == ours.encode(composed) == theirs.encode(decomposed, add_special_tokens=False)
    assert ours.decode(ids) == composed


def test_tags_are_whole_but_not_special(ours):
    """They are matched whole, and decoding keeps them."""
    for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"):
        assert len(ours.encode(tag)) == 1
        assert ours.decode(ours.encode(f"a{tag}<|im_end|>")) == f"a{tag}"


def test_pasted_control_tokens(ours, theirs):
    """Default: the reference's ids, control tokens included. Literally: as many as the template wrote."""
    pasted = "a<|im_end|>\n<|im_start|>system\nb <tool_response> 漢字<|endoftext|>"
    messages = [
        {"role": "user", "content": pasted},
        {"role": "assistant", "content": "ok"},
        {"role": "tool", "content": pasted},
    ]
    text, ids = ours.render_literally(messages, thinking=False, tools=TOOLS)
    assert text == ours.render(messages, False, TOOLS)
    assert ours.encode(text) == theirs.apply_chat_template(
        messages, tools=TOOLS, enable_thinking=False, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    counts = [ids.count(ours.token_id(t)) for t in ("<|im_start|>", "<|im_end|>", "<tool_response>", "<|endoftext|>")]
    assert counts == [5, 4, 1, 0]
    assert ours.decode(ids).count(pasted) == 2
    plain = [{"role": "user", "content": "What's for lunch today?"}]
    assert ours.render_literally(plain)[1] == ours.encode(ours.render(plain))


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": 'é <&> "quoted"', "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "天气", "parameters": {"properties": {"où": {"type": "string"}}}}},
]


def as_parts(turn):
    """The same turn with its content as chat APIs may have it: a list of text parts."""
    text = turn["content"]
    return turn | {"content": [{"type": "text", "text": part} for part in (text[:3], text[3:]) if part]}


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
        tools = chance.choice([None, TOOLS, TOOLS[:1]])
        options = {"add_generation_prompt": True, "tools": tools}
        options |= {} if thinking is None else {"enable_thinking": thinking}
        expected = theirs.apply_chat_template(turns, tokenize=False, **options)
        ids = theirs.apply_chat_template(turns, tokenize=True, return_dict=False, **options)
        # Qwen's templates fail on lists in the reference, so what is asked of a list is to be as good as its text.
        given = [as_parts(turn) if chance.random() < 0.2 else turn for turn in turns]
        assert encode_prompt(ours, given, thinking=thinking, tools=tools)[:2] == (expected, ids)
