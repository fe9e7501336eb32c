"""Text ↔ token ids."""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from qwen_scratch.errors import InputError
from qwen_scratch.files import present, read_json
from qwen_scratch.foreign import file_looks
from qwen_scratch.template import Message, prepared, read_template, template_environment


class Tokenizer:
    """A checkpoint's tokenizer.json and chat template. Nothing is ever added in front: Qwen has no start token."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        file = self.folder / "tokenizer.json"
        if not present(file):
            raise InputError(
                f"{self.folder} has no tokenizer.json; without one only token ids can be used (load_model)"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            decoder = json.loads(self._tokenizer.to_str())["decoder"]
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(f"{file} cannot be read: {error}; it is {file_looks(file)}") from None
        if (decoder or {}).get("type") != "ByteLevel":
            raise InputError(f"{file} is not a byte-level tokenizer, as every Qwen has one; its decoder is {decoder}")
        self._tokenizer.no_truncation()  # some files carry training-time limits
        self._tokenizer.no_padding()
        settings = self.folder / "tokenizer_config.json"
        self.settings = read_json(settings) if present(settings) else {}
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.template = read_template(self.folder, self.settings)

    def encode(self, text: str, literal: bool = False) -> list[int]:
        """Text → ids.

        Every added token in it (`<|im_end|>`, `<think>`) is matched whole, wherever the text comes from, as in the
        reference; with `literal` none is, and `<|im_end|>` is just these ten characters.
        """
        return self._encoding(text, self._without_added_tokens if literal else self._tokenizer).ids

    def _encoding(self, text: str, tokenizer: tokenizers.Tokenizer) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, or a byte of the command line that is no UTF-8
            raise InputError(
                f"the text is not valid Unicode at character {error.start}: {text[error.start]!r}"
            ) from None
        return tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _without_added_tokens(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json.dumps(json.loads(self._tokenizer.to_str()) | {"added_tokens": []}))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for special tokens and for ids that no token has.

        A token need not be whole characters: most emoji and many Chinese characters take several.
        """
        piece = None if token_id in self.special_ids else self._tokenizer.id_to_token(token_id)
        if piece is None:  # embeddings are padded beyond the tokenizer's last id
            return b""
        try:
            return bytes(BYTE_OF[character] for character in piece)
        except KeyError:  # an added token is kept as it is written
            return piece.encode()

    def decode(self, ids: list[int]) -> str:
        """Ids → text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def label(self, token_id: int) -> str:
        """What to call a token when people look at it alone: its text, or its name where it is special."""
        return self.decode([token_id]) or self.piece(token_id)

    def piece(self, token_id: int) -> str:
        """A token as it is written in tokenizer.json, where each byte has a printable character of its own; "" where none is."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_id(self, piece: str) -> int | None:
        """The id of a whole token as it is written in tokenizer.json, None where there is none."""
        return self._tokenizer.token_to_id(piece)

    def render(
        self, messages: list[Message], thinking: bool | None = None, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """A conversation → the prompt text, by the checkpoint's own template.

        Args:
            messages: turns with `role` and `content`, in order; `content` may be "".
            thinking: sets the template's `enable_thinking`; None leaves it unset, which is not the same as False.
            tools: JSON schemas of functions that the model may call, for templates that know them.

        Raises:
            InputError: there is no template, the messages are malformed, or the template refuses them.
        """
        self.require_template()
        turns = prepared(messages)
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self._compiled.render(
                messages=turns, tools=tools, documents=None, add_generation_prompt=True, **self._named_tokens, **options
            )
        except Exception as error:  # a template is the checkpoint's program, and may fail in any way
            raise InputError(f"the chat template refuses these messages: {error}") from None

    def render_literally(
        self, messages: list[Message], thinking: bool | None = None, tools: list[dict[str, Any]] | None = None
    ) -> tuple[str, list[int]]:
        """As `render`, but return the ids as well, in which only the template's own control tokens are ones.

        What the messages say that looks like a control token is encoded as plain text, so that pasted text can end no turn
        and open none. In an assistant's turns this holds for special tokens; its tags (`<think>`) keep their meaning.
        """
        turns = prepared(messages)
        everything = json.dumps([turns, tools], ensure_ascii=False, default=str)
        # Longer than any run of it in the text, so that no text has this mark by itself.
        mark = NONCHARACTER * (1 + max(map(len, re.findall(f"{NONCHARACTER}+", everything)), default=0))
        every = self.added_tokens.values()
        special = [self.added_tokens[i] for i in self.special_ids]
        turns = [broken(turn, special if turn["role"] == "assistant" else every, mark) for turn in turns]
        marked = self.render(turns, thinking, broken(tools, every, mark))
        ids, done = [], 0
        found = self._encoding(marked, self._tokenizer)
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if token_id in self.added_tokens:  # one of the template's own: all between two of them is plain text
                ids += [*self.encode(marked[done:start].replace(mark, ""), literal=True), token_id]
                done = end
        ids += self.encode(marked[done:].replace(mark, ""), literal=True)
        return marked.replace(mark, ""), ids

    @cached_property
    def turn_end(self) -> int | None:
        """The special token with which the template closes an assistant's turn, `<|im_end|>` in a Qwen; None: cannot tell."""
        answer = "an answer that no template contains"
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        try:
            text = self._compiled.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=False, **self._named_tokens
            )
        except Exception:  # a template that wants other turns
            return None
        behind = self.encode(text.rpartition(answer)[2])
        return behind[0] if behind and behind[0] in self.special_ids else None

    def require_template(self) -> None:
        if self.template is None:
            raise InputError(
                f"{self.folder} has no chat template (looked at chat_template.jinja and tokenizer_config.json); "
                "only a text as it is can be continued (generate --raw)"
            )

    def check_template(self) -> None:
        """Refuse a template that does not compile; a missing one is no fault yet."""
        if self.template is not None:
            _ = self._compiled

    @cached_property
    def _named_tokens(self) -> dict[str, str]:
        """`eos_token` and the like, by which templates may name special tokens."""
        named = {name: text_of(token) for name, token in self.settings.items() if name.endswith("_token") and token}
        return {name: text for name, text in named.items() if text is not None}

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self.template is not None
        try:
            return template_environment().from_string(self.template)
        except jinja2.TemplateError as error:
            raise InputError(f"{self.folder}: the chat template does not compile: {error}") from None


def byte_alphabet() -> dict[str, int]:
    """The printable characters in which byte-level BPE writes the 256 bytes (OpenAI's GPT-2 alphabet).

    Bytes that print as themselves stand for themselves; the others follow from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = byte_alphabet()
NONCHARACTER = "\ufdd0"  # Unicode keeps it for programs' own use


def broken(value: Any, tokens: Iterable[str], mark: str) -> Any:
    """A value of JSON's kinds, with a mark in the middle of every token that a text in it spells."""
    if isinstance(value, str):
        pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        return re.sub(pattern, lambda token: token[0][0] + mark + token[0][1:], value) if pattern else value
    if isinstance(value, dict):
        return {broken(key, tokens, mark): broken(inner, tokens, mark) for key, inner in value.items()}
    return [broken(inner, tokens, mark) for inner in value] if isinstance(value, list | tuple) else value


def text_of(token: Any) -> str | None:
    """tokenizer_config.json writes a token as a string or as an object around one."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None
