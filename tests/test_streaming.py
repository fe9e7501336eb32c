"""Whole answers as they stream, for any tokens and any stop texts, against the plain way: decode all, then cut."""

import pytest
from builders import save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_scratch import Completion, Tokenizer
from qwen_scratch.completion import Writer
from qwen_scratch.engine import Request

TEXTS = ["the cat ", "naïve 😀👩‍👩‍👧", "漢字", "\n", "\n\n", " ", "ไทย", "END", "EN", "D", "�", "cafe\u0301"]


class Counting(Tokenizer):
    """Counts how many ids are looked up."""

    lookups = 0

    def token_bytes(self, token_id):
        self.lookups += 1
        return super().token_bytes(token_id)

    def decode(self, ids):
        raise AssertionError("a stream must not decode what it has decoded before")


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    save_tokenizer(folder := tmp_path_factory.mktemp("tokenizer"))
    return Counting(folder)


@pytest.fixture(scope="module")
def tokenizer(counting):
    return Tokenizer(counting.folder)


def stream(tokenizer, prompt, ids, reason, stops):
    """The events of an answer of these ids, as the loop would have them written."""
    result = Completion(None, [], {}, 0, tuple(stops), Request(prompt, None, len(ids)))
    writer, events = Writer(tokenizer, result), []
    for n, token_id in enumerate(ids):
        result.request.token_ids.append(token_id)
        result.request.stop_reason = reason if n == len(ids) - 1 else None
        events += writer.push(token_id)
        if result.stop_reason is not None:
            break
    return events, result


def plainly(tokenizer, ids, opened, stops):
    """Thinking, answer, and whether a stop text ended it: by decoding each stretch between the tags as a whole."""
    tags = {"answer": tokenizer.token_id("<think>"), "thinking": tokenizer.token_id("</think>")}
    kind = "thinking" if opened else "answer"
    stretches = [(kind, opened, [])]
    for token_id in ids:
        if token_id == tags[kind]:
            kind = "answer" if kind == "thinking" else "thinking"
            stretches.append((kind, True, []))
        else:
            stretches[-1][2].append(token_id)
    whole = {"thinking": "", "answer": ""}
    stopped = False
    for kind, behind_tag, stretch in stretches:
        text = tokenizer.decode(stretch)
        text = text.lstrip("\n") if behind_tag else text
        if kind == "thinking":
            whole[kind] += text.rstrip("\n")
        elif not stopped:  # no stop text spans a think block
            text, stopped = until(text, stops)
            whole[kind] += text
    return whole["thinking"], whole["answer"], stopped


def until(text, stops):
    """Up to the stop text that is complete first, of several the longest; and whether there was one."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def cut(tokenizer, token_id):
    """A token as the tokens of its single bytes, the finest way to cut a text; added tokens stay whole."""
    if token_id in tokenizer.added_tokens:
        return [token_id]
    return [tokenizer.token_id(character) for character in tokenizer._tokenizer.id_to_token(token_id)]


@st.composite
def answers(draw, tokenizer):
    """Ids of texts in coarse and fine cuts, tags, special tokens, any ids at all, also one that no token has."""
    known = [tokenizer.encode(text) for text in [*TEXTS, "<think>", "</think>", "<|im_end|>"]]
    fine = [[i for token_id in ids for i in cut(tokenizer, token_id)] for ids in known]
    size = tokenizer._tokenizer.get_vocab_size()
    pieces = draw(st.lists(st.sampled_from(known + fine) | st.integers(0, size).map(lambda i: [i]), max_size=25))
    return [token_id for ids in pieces for token_id in ids]


@pytest.mark.parametrize("reason", ["eos", "length"])
def test_any_answer(tokenizer, counting, reason):
    """Pieces join to the whole up to the stop text, which also says that no piece ends in half a character."""
    tried = {"stop": 0, reason: 0, None: 0}

    @settings(max_examples=500, deadline=None)
    @given(
        answers(tokenizer),
        st.booleans(),
        st.lists(st.sampled_from(TEXTS) | st.sampled_from("abc") | st.text(min_size=1), max_size=3),
    )
    def check(ids, opened, stops):
        prompt = tokenizer.encode("<think>\n") if opened else []
        made = [*ids, tokenizer.token_id("a")] if reason == "eos" else ids  # any token may be a stop id
        counting.lookups = 0
        events, result = stream(counting, prompt, made, reason, stops)
        assert counting.lookups <= len(result.token_ids)  # constant work a token: none is looked up twice

        _, answer, stopped = plainly(tokenizer, ids, opened, stops)
        thinking, _, _ = plainly(tokenizer, ids[: len(result.token_ids)], opened, stops)  # of what was made at all
        assert (result.thinking, result.text) == (thinking, answer)
        for kind, whole in (("thinking", thinking), ("answer", answer)):
            assert "".join(event.text for event in events if event.kind == kind) == whole
        if stopped and result.stop_reason != "stop":  # met only in what the model's own end let out; that end wins
            assert (result.stop_reason, len(result.token_ids)) == ("eos", len(made))
        elif not stopped:
            assert result.stop_reason == (reason if made else None)
        tried[result.stop_reason] += 1

    check()
    assert tried["stop"] >= 5
    assert tried[reason] >= 5


def test_long_answers_cost_the_same_per_token(counting, tokenizer):
    """5,000 tokens, with leading, double and final blanks: one look-up each, from the first to the last."""
    ids = (tokenizer.encode("  the cat  sat \n\n on 漢字 😀 ") * 400)[:5000]
    counting.lookups = 0
    writer_events, result = stream(counting, [], ids, "length", ["never said"])
    assert counting.lookups == len(ids) == len(result.token_ids) == 5000
    assert result.text == "".join(event.text for event in writer_events) == tokenizer.decode(ids)
