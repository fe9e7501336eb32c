"""Conversations → prompt texts, by the template that a checkpoint carries, and tool calls out of answers."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen_scratch.errors import InputError
from qwen_scratch.files import present

Message = dict[str, Any]


def read_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja comes before tokenizer_config.json, whose older form is a list of named templates."""
    file = folder / "chat_template.jinja"
    if present(file):
        try:
            return file.read_text(encoding="utf-8") or None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise InputError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text, not {template!r:.60}")
    return template or None


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


def prepared(messages: Any) -> list[Message]:
    """Messages as a template can rely on them, all with a text as their content.

    As in the reference, keys without a value are dropped and past thinking goes under every known name.

    Raises:
        InputError: no turns, a turn without a role, or content that is not text. Names the turn.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError("messages must be a list of at least one turn")
    turns = []
    for n, given in enumerate(messages):
        if not isinstance(given, dict) or not isinstance(given.get("role"), str):
            raise InputError(f"message {n} must be an object with a role and a content, not {given!r:.80}")
        turn = {key: value for key, value in given.items() if value is not None}
        thought = next((turn[name] for name in ("reasoning_content", "thinking", "reasoning") if name in turn), None)
        if thought is not None:
            turn = {"thinking": thought, **turn, "reasoning_content": thought}
        may_be_silent = turn["role"] == "assistant" and (turn.get("tool_calls") or thought is not None)
        turn["content"] = content_text(
            turn.get("content", "" if may_be_silent else None), f"message {n} ({turn['role']})"
        )
        turns.append(turn)
    return turns


def content_text(content: Any, whose: str) -> str:
    """Content as one text: it may come as a list of text parts, as chat APIs have it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{whose} must have a text as its content, not {content!r:.80}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InputError(f"{whose} has a part that is not text, {kind!r:.80}; these models read text only")
    return "".join(part["text"] for part in content)


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
