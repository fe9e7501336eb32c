"""Text ↔ token ids, and conversations → prompts."""

import json
import re
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen_scratch.checkpoint import read_json
from qwen_scratch.errors import InputError

Message = dict[str, Any]


class Tokenizer:
    """A checkpoint's tokenizer.json and chat template. Nothing is ever added in front: Qwen has no start token."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        file = self.folder / "tokenizer.json"
        if not file.exists():
            raise InputError(
                f"{self.folder} has no tokenizer.json; without one only token ids can be used (load_model)"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            decoder = json.loads(self._tokenizer.to_str())["decoder"]
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(f"{file} cannot be read: {error}") from None
        if (decoder or {}).get("type") != "ByteLevel":
            raise InputError(f"{file} is not a byte-level tokenizer, as every Qwen has one; its decoder is {decoder}")
        self._tokenizer.no_truncation()  # some files carry training-time limits
        self._tokenizer.no_padding()
        settings = self.folder / "tokenizer_config.json"
        self.settings = read_json(settings) if settings.exists() else {}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.template = read_template(self.folder, self.settings)

    def encode(self, text: str) -> list[int]:
        """Text → ids. Every added token in it (`<|im_end|>`, `<think>`) is matched whole, wherever the text comes from."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, or a byte of the command line that is no UTF-8
            raise InputError(
                f"the text is not valid Unicode at character {error.start}: {text[error.start]!r}"
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids

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
        return self.decode([token_id]) or self._tokenizer.id_to_token(token_id) or ""

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
        check_messages(messages)
        tokens = {name: text_of(value) for name, value in self.settings.items() if name.endswith("_token") and value}
        tokens = {name: text for name, text in tokens.items() if text is not None}
        options = {} if thinking is None else {"enable_thinking": thinking}
        turns = [prepared(turn) for turn in messages]
        try:
            return self._compiled.render(
                messages=turns, tools=tools, documents=None, add_generation_prompt=True, **tokens, **options
            )
        except Exception as error:  # a template is the checkpoint's program, and may fail in any way
            raise InputError(f"the chat template refuses these messages: {error}") from None

    @cached_property
    def turn_end(self) -> int | None:
        """The special token with which the template closes an assistant's turn, `<|im_end|>` in a Qwen; None: cannot tell."""
        answer = "an answer that no template contains"
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        try:
            text = self._compiled.render(messages=turns, tools=None, documents=None, add_generation_prompt=False)
        except Exception:  # a template that wants other turns
            return None
        behind = self.encode(text.rpartition(answer)[2])
        return behind[0] if behind and behind[0] in self.special_ids else None

    def require_template(self) -> None:
        if self.template is None:
            raise InputError(
                f"{self.folder} has no chat template (looked at chat_template.jinja and tokenizer_config.json); "
                "use --raw to continue the text as it is"
            )

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


def read_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja comes before tokenizer_config.json, whose older form is a list of named templates."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise InputError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text, not {template!r:.60}")
    return template


def template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` sets it up for chat templates: sandboxed, with its whitespace rules and helpers."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own escapes HTML characters

    extensions = [loopcontrols, GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what training should learn from; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def prepared(turn: Message) -> Message:
    """As the reference hands a turn to a template: no keys without a value, and past thinking under every known name."""
    turn = {key: value for key, value in turn.items() if value is not None}
    thought = next((turn[name] for name in ("reasoning_content", "thinking", "reasoning") if name in turn), None)
    return turn if thought is None else {"thinking": thought, **turn, "reasoning_content": thought}


def text_of(token: Any) -> str | None:
    """tokenizer_config.json writes a token as a string or as an object around one."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


def check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a list of at least one turn")
    for n, turn in enumerate(messages):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise InputError(f"message {n} must be an object with a role and a content, not {turn!r:.80}")


def parse_tool_calls(answer: str) -> list[dict[str, Any]]:
    """The calls that an answer makes as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; broken ones are left out."""
    calls = []
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", answer, re.DOTALL):
        try:
            call = json.loads(body)
        except ValueError:
            continue
        if isinstance(call, dict):
            calls.append(call)
    return calls
