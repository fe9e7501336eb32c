"""A conversation of several turns, with a cache that lives from one answer to the next."""

import secrets
from dataclasses import replace
from itertools import takewhile
from typing import Any

from qwen_scratch.cache import KVCache
from qwen_scratch.completion import Completion, Stream, context_limit, prepare
from qwen_scratch.errors import InputError
from qwen_scratch.model import Qwen
from qwen_scratch.prompt import Encoded, encode_prompt
from qwen_scratch.sampling import Sampler, SamplingParams
from qwen_scratch.template import Message, prepared
from qwen_scratch.text import Tokenizer


class Conversation:
    """Turns with one model. Ask, read the stream that comes back to its end (or interrupt it), ask again.

    Each turn renders and encodes all turns anew: a template may write a past answer otherwise than it stood when it was
    made (Qwen3's drops its thinking), and a text need not encode to the ids that spelled it. Of the cache the longest
    common beginning is kept; appending blindly would have the model see what no template ever wrote.

    `params`, `system`, `thinking` and `literal_specials` are `stream`'s, and may be changed between turns. The seed, one's
    own or a fresh one, counts up with every answer, so that a retry differs and yet the whole conversation can be repeated.
    """

    def __init__(
        self,
        model: Qwen,
        tokenizer: Tokenizer,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        thinking: bool | None = None,
        literal_specials: bool = False,
        max_context: int | None = None,
    ) -> None:
        tokenizer.require_template()
        self.model = model
        self.tokenizer = tokenizer
        self.params = params or SamplingParams()
        self.system = system
        self.thinking = thinking
        self.literal_specials = literal_specials
        self.context = context_limit(model, max_context)
        self._seed = secrets.randbits(32)  # where params has none
        self._turns: list[Message | Completion] = []  # an answer grows while its stream is read
        self._left_out = 0  # so many of the oldest messages no longer fit into the context
        self._answers = 0
        self._before = self._turns
        self._running: Stream | None = None
        self._cache = KVCache(model.config, 1, 0, device=model.device, dtype=model.dtype)

    @property
    def sampling(self) -> dict[str, Any]:
        """The values that the next answer is sampled with, its seed included."""
        return Sampler(self._next_params(), self.model.generation_config).values()

    @property
    def messages(self) -> list[Message]:
        """All turns so far, also those that no longer fit: what `stream` takes as a prompt."""
        return self._system_turn() + messages_of(self._turns)

    def start(self, messages: list[Message]) -> None:
        """Begin anew with these turns behind it; a system turn in front becomes `system`, [] keeps the one there is."""
        turns = prepared(messages) if messages else []
        if turns:
            self.system = turns.pop(0)["content"] if turns[0]["role"] == "system" else None
        self._turns = self._before = [*turns]
        self._left_out = 0

    def ask(self, text: str) -> Stream:
        """A user turn → the stream of its answer, `stream.result.reused_tokens` of whose prompt were in the cache.

        Raises:
            InputError: the turn alone is more than the context holds. The turns are as they were then.
        """
        return self._answer([*self._turns, {"role": "user", "content": text}])

    def retry(self) -> Stream:
        """Answer the last user turn again, and forget what was answered before."""
        asked = [n for n, turn in enumerate(self._turns) if isinstance(turn, dict) and turn["role"] == "user"]
        if not asked:
            raise InputError("nothing has been asked yet")
        return self._answer(self._turns[: asked[-1] + 1])

    def withdraw(self) -> None:
        """Take back the last `ask` or `retry`: all turns are as they were before."""
        if self._running is not None:
            self._running.interrupt()
        self._turns = self._before

    def _system_turn(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _next_params(self) -> SamplingParams:
        seed = self._seed if self.params.seed is None else self.params.seed
        return replace(self.params, seed=(seed + self._answers) % 2**64)

    def _answer(self, turns: list[Message | Completion]) -> Stream:
        if self._running is not None:
            self._running.interrupt()  # no two streams may write into one cache
        left_out, encoded = self._fit(messages_of(turns))
        result = prepare(self.model, encoded, self._next_params(), self.context)
        self._recall(encoded.ids, len(encoded.ids) + result.request.max_new_tokens)
        result.reused_tokens = int(self._cache.lengths[0])
        result.kv_cache_bytes = self._cache.nbytes
        if left_out > self._left_out:
            result.notices.append(
                f"the conversation has outgrown the context of {self.context} tokens: "
                f"from now on its oldest {left_out} messages are left out"
            )
        self._before, self._turns, self._left_out = self._turns, [*turns, result], left_out
        self._answers += 1
        self._running = Stream(self.model, self.tokenizer, result, self._cache)
        return self._running

    def _fit(self, messages: list[Message]) -> tuple[int, Encoded]:
        """How many of the oldest messages to leave out so that an answer has room too, and the prompt of the others."""
        wanted = Sampler(self.params, self.model.generation_config).max_new_tokens
        room = self.context - min(wanted, self.context // 4)
        starts = [n for n, turn in enumerate(messages) if turn["role"] == "user" and n > self._left_out]
        for start in [self._left_out, *starts]:  # whole exchanges go, so that a question comes first
            encoded = encode_prompt(
                self.tokenizer,
                self._system_turn() + messages[start:],
                thinking=self.thinking,
                literal_specials=self.literal_specials,
            )
            if len(encoded.ids) <= room:
                break
        return start, encoded

    def _recall(self, ids: list[int], room: int) -> None:
        """Cut the cache to what it has in common with the new prompt, and give it room for so many positions."""
        fed = self._running.result.prompt_ids + self._running.result.token_ids if self._running else []
        known = fed[: int(self._cache.lengths[0])]
        pairs = zip(known, ids[:-1], strict=False)  # at least the last token goes in again: its logits are wanted
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        self._cache.truncate(common)
        if room > self._cache.max_seq_len:
            size = max(room, min(2 * self._cache.max_seq_len, self.context))  # rarely, then: each time all is copied
            roomier = KVCache(self.model.config, 1, size, device=self.model.device, dtype=self.model.dtype)
            roomier.k[:, :, :, :common] = self._cache.k[:, :, :, :common]
            roomier.v[:, :, :, :common] = self._cache.v[:, :, :, :common]
            roomier.lengths += common
            self._cache = roomier


def messages_of(turns: list[Message | Completion]) -> list[Message]:
    """Answers as the turns that they are; one that was broken off before its first token is none."""
    messages = []
    for turn in turns:
        if isinstance(turn, dict):
            messages.append(turn)
        elif turn.token_ids:
            thought = {"reasoning_content": turn.thinking} if turn.thinking else {}
            messages.append({"role": "assistant", "content": turn.text, **thought})
    return messages
