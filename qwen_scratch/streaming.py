"""Token ids → readable pieces as they arrive: whole characters, thinking told from answer, stop texts held back."""

import codecs
from collections.abc import Sequence
from itertools import takewhile

from qwen_scratch.text import Tokenizer


class Utf8Stream:
    """Bytes of token after token → text, holding back only the bytes of a character that is not complete yet."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What a cut left incomplete, as one U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopText:
    """Watches a text for stop strings as it streams, and holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """More text → what can be shown of it, and whether a stop string has been met; then nothing more may follow."""
        text = self._held + text
        found = ((text.find(stop), stop) for stop in self._stops)
        # The one that is complete first, and of several the longest: so it is all the same how the text was cut.
        met = [(at + len(stop), at) for at, stop in found if at >= 0]
        if met:
            self._held = ""
            return text[: min(met)[1]], True
        hold = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def finish(self) -> str:
        """What was held back and became no stop string after all."""
        rest, self._held = self._held, ""
        return rest


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class ThinkingSplitter:
    """Tells thinking from answer by the ids of `<think>` and `</think>`, and decodes both as they stream.

    The tags are dropped, and so are the line breaks that set the thinking off from them and from the answer.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._open = tokenizer.token_id("<think>")
        self._close = tokenizer.token_id("</think>")
        # Some templates end the prompt with an opened think block; a raw prompt may be in the middle of one.
        turn = takewhile(lambda i: i not in tokenizer.special_ids, reversed(prompt_ids))
        opened = next((i == self._open for i in turn if i in (self._open, self._close)), False)
        self._enter("thinking" if opened else "answer", trim=opened)

    def push(self, token_id: int) -> list[tuple[str, str]]:
        """A token → pieces of (kind, text), kind "thinking" or "answer"; [] where nothing can be shown yet."""
        if token_id == self._open and self.kind == "answer":
            return self._switch("thinking")
        if token_id == self._close and self.kind == "thinking":
            return self._switch("answer")
        return self._emit(self._utf8.push(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> list[tuple[str, str]]:
        """Call once behind the last token."""
        return self._emit(self._utf8.finish())

    def _switch(self, kind: str) -> list[tuple[str, str]]:
        rest = self.finish()
        self._enter(kind, trim=True)
        return rest

    def _enter(self, kind: str, trim: bool) -> None:
        self.kind = kind
        self._trim = trim  # still at the start of a part whose leading line breaks go
        self._held = ""  # line breaks that are shown only if more thinking follows
        self._utf8 = Utf8Stream()

    def _emit(self, text: str) -> list[tuple[str, str]]:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        if self.kind == "thinking":
            text = self._held + text
            shown = text.rstrip("\n")
            self._held, text = text[len(shown) :], shown
        return [(self.kind, text)] if text else []
