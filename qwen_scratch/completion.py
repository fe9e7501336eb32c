"""A prompt → text, streamed or whole. What most programs that use this package need."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from qwen_scratch.cache import KVCache
from qwen_scratch.engine import Request, TokenLogprobs, check_ids, run
from qwen_scratch.errors import InputError
from qwen_scratch.model import Qwen
from qwen_scratch.prompt import Encoded, Prompt, encode_prompt
from qwen_scratch.sampling import Sampler, SamplingParams
from qwen_scratch.streaming import StopText, ThinkingSplitter
from qwen_scratch.text import Tokenizer


class Event(NamedTuple):
    """What one new token adds; `text` is empty while the bytes of a character are not complete."""

    kind: str  # "thinking" | "answer"
    text: str
    token_id: int


@dataclass
class Completion:
    """The result, which grows while its stream is read."""

    rendered_prompt: str | None  # the prompt as text, after the chat template; None where it was given as ids
    eos_token_ids: list[int]
    sampling: dict[str, Any]  # the values in use, the seed included
    kv_cache_bytes: int
    stop: tuple[str, ...]  # texts that end the answer
    request: Request
    text: str = ""  # the answer, without thinking and special tokens
    thinking: str = ""
    reused_tokens: int = 0  # of the prompt: their keys and values were in the cache already, from an earlier turn
    notices: list[str] = field(default_factory=list)  # what was done otherwise than asked, for people to read

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt_ids

    @property
    def token_ids(self) -> list[int]:
        """New token ids, with the stop id where there was one."""
        return self.request.token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One per new token where `params.logprobs` asked for them, else empty."""
        return self.request.token_logprobs

    @property
    def stop_reason(self) -> str | None:
        """ "eos", "stop", "length" or "interrupted"; None while running."""
        return self.request.stop_reason

    @property
    def ttft_s(self) -> float:
        """Seconds from the start of prefill until the first token is known."""
        return self.request.prefill_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Speed of all tokens after the first, which belongs to prefill; None where there is only one."""
        later = len(self.token_ids) - 1
        return later / self.request.decode_s if later > 0 and self.request.decode_s > 0 else None


class Writer:
    """Turns one request's tokens into events, and keeps their text in the result."""

    def __init__(self, tokenizer: Tokenizer | None, result: Completion) -> None:
        self.result = result
        self._splitter = ThinkingSplitter(tokenizer, result.prompt_ids) if tokenizer else None
        self._stop = StopText(result.stop)

    def push(self, token_id: int) -> list[Event]:
        """The events of a token that was just added to the request; at least one."""
        if self._splitter is None:
            return [Event("answer", "", token_id)]
        reason = self.result.stop_reason
        # A stop id is part of the ids, not of the text.
        pieces = [] if reason in ("eos", "stop") else self._splitter.push(token_id)
        if reason is not None:
            pieces = pieces + self._splitter.finish()
        shown = self._until_stop(pieces)
        if reason is not None:
            shown.append(("answer", self._stop.finish()))
        shown = [piece for piece in shown if piece[1]]
        return self._record(shown or [(self._splitter.kind, "")], token_id)

    def _until_stop(self, pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The pieces up to a stop string in the answer; meeting one ends the request, unless the model ended it itself."""
        shown = []
        for kind, text in pieces:
            if kind == "thinking":  # what was held back of the answer before it is not going on
                shown += [("answer", self._stop.finish()), (kind, text)]
                continue
            allowed, met = self._stop.push(text)
            shown.append((kind, allowed))
            if met:
                if self.result.stop_reason != "eos":
                    self.result.request.stop_reason = "stop"
                break
        return shown

    def cut(self) -> list[Event]:
        """The events of text that is still held back where a run is broken off."""
        ids = self.result.token_ids
        if self._splitter is None or not ids:
            return []
        shown = [*self._until_stop(self._splitter.finish()), ("answer", self._stop.finish())]
        return self._record([piece for piece in shown if piece[1]], ids[-1])

    def _record(self, pieces: list[tuple[str, str]], token_id: int) -> list[Event]:
        for kind, text in pieces:
            if kind == "thinking":
                self.result.thinking += text
            else:
                self.result.text += text
        return [Event(kind, text, token_id) for kind, text in pieces]


class Stream:
    """Iterate for events; `result` is complete once the iteration has ended."""

    def __init__(
        self, model: Qwen, tokenizer: Tokenizer | None, result: Completion, cache: KVCache | None = None
    ) -> None:
        self.result = result
        self._writer = Writer(tokenizer, result)
        self.progress = False  # show a bar on stderr where reading the prompt takes more than two seconds
        self._events = self._run(model, cache)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def interrupt(self) -> list[Event]:
        """End here and keep what there is: the events of text that was still held back. For the thread that reads."""
        self._events.close()
        if self.result.stop_reason is not None:
            return []
        self.result.request.stop_reason = "interrupted"
        return self._writer.cut()

    def _run(self, model: Qwen, cache: KVCache | None) -> Generator[Event, None, None]:
        for _, token_id in run(model, [self.result.request], cache, self.progress):
            yield from self._writer.push(token_id)


def stream(
    model: Qwen,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    raw: bool = False,
    system: str | None = None,
    thinking: bool | None = None,
    tools: list[dict[str, Any]] | None = None,
    literal_specials: bool = False,
    max_context: int | None = None,
    truncate: bool = False,
) -> Stream:
    """Generate, and yield each token's text as soon as it is known.

    Args:
        tokenizer: None is enough where the prompt is ids; the result then has no text.
        prompt: text (a user turn where the checkpoint has a chat template), messages, or token ids as they are.
        raw: take text as it is, template or not.
        system: a system turn in front; None: whatever the template does without one; "": an empty one.
        thinking: the template's switch; None: its default.
        tools: JSON schemas of functions, for the template; calls in the answer: `parse_tool_calls(result.text)`.
        literal_specials: what the prompt spells like a control token (`<|im_end|>`) is plain text; by default, as in the
            reference, it is that token.
        max_context: fewer positions than the model has, to bound the cache.
        truncate: of a prompt that is too long keep the end, and leave a quarter of the context for the answer.

    Raises:
        InputError: nothing to generate from, or more than the context holds. Before any work is done.
    """
    encoded = encode_prompt(tokenizer, prompt, raw, system, thinking, tools, literal_specials)
    return Stream(model, tokenizer, prepare(model, encoded, params or SamplingParams(), max_context, truncate))


def prepare(
    model: Qwen, encoded: Encoded, params: SamplingParams, max_context: int | None, truncate: bool = False
) -> Completion:
    """The request with all its values settled, and the result that it will fill."""
    sampler = Sampler(params, model.generation_config)
    ids = encoded.ids
    check_ids(ids, model.config.vocab_size)
    context = context_limit(model, max_context)
    notices = []
    if truncate and len(ids) >= context > 1:
        kept = context - max(1, context // 4)
        cut = len(ids) - kept
        notices.append(
            f"the prompt has {len(ids)} tokens, too many for a context of {context}: its first {cut} are cut"
        )
        ids = ids[-kept:]
    if len(ids) >= context:
        raise InputError(
            f"the prompt has {len(ids)} tokens, which leaves no room for an answer in a context of {context} "
            f"({len(ids)} {'>' if len(ids) > context else '='} {context}); shorten it"
        )
    new = min(sampler.max_new_tokens, context - len(ids))
    eos = eos_ids(model)
    if encoded.turn_end is not None and encoded.turn_end not in eos:
        eos = [*eos, encoded.turn_end]  # a chat fine-tune of a base model often still names only the base's stop id
    request = Request(
        prompt_ids=ids,
        sampler=sampler,
        max_new_tokens=new,
        eos_ids=frozenset() if params.ignore_eos else frozenset(eos),
        stop_ids=frozenset(params.stop_token_ids),
        logprobs=params.logprobs,
    )
    result = Completion(
        rendered_prompt=encoded.text,
        eos_token_ids=eos,
        sampling=sampler.values(),
        kv_cache_bytes=(len(ids) + new) * model.config.kv_bytes_per_token(model.dtype),
        stop=tuple(params.stop),
        request=request,
        notices=notices,
    )
    if new < sampler.max_new_tokens:
        result.notices.append(
            f"at most {new} new tokens instead of {sampler.max_new_tokens}: "
            f"the prompt takes {len(ids)} of the context's {context}"
        )
    if model.dtype == torch.float16 and model.device.type == "cpu":
        result.notices.append("float16 is slow on a CPU, above all for long prompts; try bfloat16 or float32")
    return result


def complete(
    model: Qwen, tokenizer: Tokenizer | None, prompt: Prompt, params: SamplingParams | None = None, **options: Any
) -> Completion:
    """As `stream`, with the same options, but return only the finished result."""
    running = stream(model, tokenizer, prompt, params, **options)
    for _ in running:
        pass
    return running.result


def complete_batch(
    model: Qwen,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    **options: Any,
) -> list[Completion]:
    """Answer several prompts side by side, in their order; the options are `stream`'s and hold for all of them.

    Rows keep their own positions, generators and ends. In float32 each gives the ids that it gives alone; in half precision
    a row's numbers may differ in the last bits from the same row alone, as other shapes take other kernels.
    """
    results = [
        stream(model, tokenizer, prompt, params, **options).result for prompt in prompts
    ]  # prepared, not yet run
    writers = {id(result.request): Writer(tokenizer, result) for result in results}
    for request, token_id in run(model, [result.request for result in results]) if results else ():
        writers[id(request)].push(token_id)
    return results


def context_limit(model: Qwen, max_context: int | None) -> int:
    limit = model.config.context_length
    if max_context is None:
        return limit
    if not isinstance(max_context, int) or not 1 <= max_context <= limit:
        raise InputError(f"the context can be limited to 1 to {limit} tokens for this model, not {max_context}")
    return max_context


def eos_ids(model: Qwen) -> list[int]:
    """The ids that end an answer: generation_config.json's, one or several, or else config.json's."""
    ids = model.generation_config.get("eos_token_id")
    if ids is None:
        ids = list(model.config.eos_token_ids)
    ids = [ids] if isinstance(ids, int) else ids
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise InputError(
            f"eos_token_id of generation_config.json or config.json must be an id or a list of ids, not {ids!r}"
        )
    return ids
