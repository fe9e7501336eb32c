"""Any kind of prompt → token ids."""

from typing import Any, NamedTuple

from qwen_scratch.errors import InputError
from qwen_scratch.template import Message, prepared
from qwen_scratch.text import Tokenizer

Prompt = str | list[Message] | list[int]


class Encoded(NamedTuple):
    """A prompt, ready for the model."""

    text: str | None  # after the template; None where it came as ids
    ids: list[int]
    turn_end: int | None  # what the template closes turns with; None where no template was used


def encode_prompt(
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    raw: bool = False,
    system: str | None = None,
    thinking: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
    literal_specials: bool = False,
) -> Encoded:
    """Any kind of prompt → its ids, and what else is known of it. The options are `stream`'s."""
    template_wanted = system is not None or thinking is not None or tools is not None
    if isinstance(prompt, list) and all(isinstance(i, int) for i in prompt):
        if template_wanted:
            raise InputError("system text, thinking switch and tools need a prompt of text or messages, not of ids")
        return Encoded(None, list(prompt), None)  # type: ignore[arg-type]  # checked one by one above
    if tokenizer is None:
        raise InputError("without a tokenizer the prompt must be a list of token ids")
    if isinstance(prompt, str):
        if raw or (tokenizer.template is None and not template_wanted):
            if template_wanted:
                raise InputError("system text, thinking switch and tools need the chat template, which raw leaves out")
            return Encoded(prompt, tokenizer.encode(prompt, literal_specials), None)
        prompt = [{"role": "user", "content": prompt}]
    elif raw:
        raise InputError("messages need the chat template, which raw leaves out")
    messages: list[Message] = prepared(prompt)
    if system is not None:
        if messages[0]["role"] == "system":
            raise InputError("the messages already begin with a system turn; give only one")
        messages = [{"role": "system", "content": system}, *messages]
    if literal_specials:
        text, ids = tokenizer.render_literally(messages, thinking, tools)
    else:
        text = tokenizer.render(messages, thinking, tools)
        ids = tokenizer.encode(text)
    return Encoded(text, ids, tokenizer.turn_end)
