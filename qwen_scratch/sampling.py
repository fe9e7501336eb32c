"""Logits → one token id. The filters run in the reference's order:

penalties → temperature → top-k → top-p → min-p → softmax → draw.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from qwen_scratch.errors import InputError

BUILT_IN_MAX_NEW_TOKENS = 512
BUILT_IN_TOP_K = 50  # the reference samples with this where nothing says otherwise


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. None = as the checkpoint's generation_config.json says, else greedy, 512 new tokens.

    Any of temperature > 0, top_k, top_p and min_p turns sampling on; temperature 0 is greedy whatever else is set.
    Sampling takes the 50 likeliest tokens where neither the request nor the file names a top_k, as the reference does.

    Raises:
        InputError: a value outside its range.
    """

    max_new_tokens: int | None = None  # ≥ 1
    temperature: float | None = None  # ≥ 0; divides the logits: below 1 sharper, above 1 flatter
    top_k: int | None = None  # keep the k most likely tokens (and ties with the last); 0 = off
    top_p: float | None = None  # keep the smallest set of tokens that holds this much probability, 0 < p ≤ 1
    min_p: float | None = None  # drop tokens less likely than this share of the best one's probability, 0 ≤ p ≤ 1
    repetition_penalty: float | None = None  # > 0; 1 = off; weakens tokens that occur in prompt or answer
    presence_penalty: float | None = (
        None  # subtracted from the logit of each token that the answer already has; 0 = off
    )
    seed: int | None = None  # None: a fresh one, reported with the result
    stop: tuple[str, ...] = ()  # stop where one of these texts appears in the answer, and show none of it
    stop_token_ids: tuple[int, ...] = ()  # stop at these too
    ignore_eos: bool = False  # run on past the model's own stop ids
    logprobs: int | None = (
        None  # report each token's log probability, and this many of the likeliest, before any filter
    )

    def __post_init__(self) -> None:
        whole = {"max_new_tokens": 1, "top_k": 0, "seed": 0, "logprobs": 0}
        for name, least in whole.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.seed is not None and self.seed >= 2**64:
            raise InputError(f"seed must be below 2**64, not {self.seed}")
        ids = self.stop_token_ids
        if not isinstance(ids, tuple | list) or any(
            not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids
        ):
            raise InputError(f"stop_token_ids must be a list of token ids, not {ids!r}")
        if not isinstance(self.stop, tuple | list) or any(not isinstance(text, str) or not text for text in self.stop):
            raise InputError(f"stop must be a list of texts that are not empty, not {self.stop!r}")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        ranges: dict[str, tuple[Callable[[float], bool], str]] = {
            "temperature": (lambda x: x >= 0, "at least 0"),
            "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
            "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1"),
            "repetition_penalty": (lambda x: x > 0, "above 0"),
            "presence_penalty": (lambda x: True, "that is finite"),
        }
        for name, (good, text) in ranges.items():
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
            if not number or not good(value):
                raise InputError(f"{name} must be a number {text}, not {value!r}")


class Sampler:
    """The choice of tokens for one request, with its own random generator: no request disturbs another."""

    def __init__(self, params: SamplingParams, generation_config: dict[str, Any] | None = None) -> None:
        file = read_defaults(generation_config or {})

        def choose(name: str, built_in: Any) -> Any:
            asked, default = getattr(params, name), getattr(file, name)
            return asked if asked is not None else default if default is not None else built_in

        self.max_new_tokens: int = choose("max_new_tokens", BUILT_IN_MAX_NEW_TOKENS)
        asked = [params.temperature, params.top_k, params.top_p, params.min_p]
        sample = (generation_config or {}).get("do_sample")
        if sample not in (None, True, False):
            raise InputError(f"generation_config.json: do_sample must be true or false, not {sample!r}")
        sample = sample or any(value is not None for value in asked)
        self.temperature: float = choose("temperature", 1.0) if sample else 0.0
        self.top_k: int = choose("top_k", BUILT_IN_TOP_K)
        self.top_p: float = choose("top_p", 1.0)
        self.min_p: float = choose("min_p", 0.0)
        self.repetition_penalty: float = choose("repetition_penalty", 1.0)
        self.presence_penalty: float = choose("presence_penalty", 0.0)
        self.greedy = self.temperature == 0
        self.seed = params.seed
        if self.seed is None and not self.greedy:
            self.seed = secrets.randbits(32)
        self.generator: torch.Generator | None = None
        self.in_text: Tensor | None = None  # [V] bool: tokens of prompt and answer
        self.in_answer: Tensor | None = None  # [V] bool: tokens of the answer

    def values(self) -> dict[str, Any]:
        """The values in use, for people to read and to repeat the run with."""
        common = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "seed": None if self.greedy else self.seed,
        }
        if self.greedy:
            return common
        return common | {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    def begin(self, prompt_ids: list[int], vocab_size: int, device: torch.device) -> None:
        """Call once before the first `pick`: one generator per request, seeded once."""
        if not self.greedy:
            assert self.seed is not None
            self.generator = torch.Generator(device=device).manual_seed(self.seed)
        self.in_answer = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_text = self.in_answer.clone()
        self.in_text[torch.tensor(prompt_ids, device=device)] = True

    def pick(self, logits: Tensor) -> Tensor:
        """Choose the next token.

        Args:
            logits: [V] of the last position, any float dtype.

        Returns:
            [2] float64 on the logits' device: the id, and the largest logit, which is finite if all is well. Both
            in one tensor, so that one copy to the host tells the loop all it needs.
        """
        assert self.in_text is not None and self.in_answer is not None
        scores = logits.float()
        largest = scores.max()  # NaN and +inf show here; -inf on some tokens is legal
        if self.repetition_penalty != 1:
            scores = penalize_repetition(scores, self.in_text, self.repetition_penalty)
        if self.presence_penalty != 0:
            scores = torch.where(self.in_answer, scores - self.presence_penalty, scores)
        if self.greedy:
            chosen = scores.argmax()  # the lowest id where several are equal
        else:
            if self.temperature < 1e-6:  # dividing would overflow; from the best one down it can only underflow
                scores = scores - scores.max()
            scores = scores / max(self.temperature, 1e-30)
            scores = keep_top_k(scores, self.top_k)
            scores = keep_top_p(scores, self.top_p)
            scores = keep_min_p(scores, self.min_p)
            chosen = draw(scores, self.generator)
        for seen in (self.in_text, self.in_answer):
            seen.index_fill_(0, chosen.view(1), True)  # seen[chosen] would fetch the number from the device first
        return torch.stack((chosen.double(), largest.double()))


def read_defaults(generation_config: dict[str, Any]) -> SamplingParams:
    """The fields of generation_config.json that this package knows; others (beams, caches, ...) do not concern it."""
    known = {field.name for field in fields(SamplingParams)} - {
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
    }
    try:
        return SamplingParams(**{name: value for name, value in generation_config.items() if name in known})
    except InputError as error:
        raise InputError(f"generation_config.json: {error}") from None


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Weaken seen tokens (https://arxiv.org/abs/1909.05858): divide what is positive, multiply what is negative."""
    weakened = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, weakened, scores)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """[V] → [V] with all but the k largest (and ties with the last of them) at -inf; k = 0 keeps all."""
    if k == 0 or k >= len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[-1], -math.inf)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Nucleus (https://arxiv.org/abs/1904.09751): the most likely tokens up to and including the one that crosses p.

    From the small end, as the reference does it: a token goes if it and all smaller ones hold at most 1 - p.
    """
    if p == 1:
        return scores
    ordered, index = scores.sort()  # ascending
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - p
    drop[-1] = False  # the best token always stays
    return scores.masked_fill(drop.scatter(0, index, drop), -math.inf)


def keep_min_p(scores: Tensor, p: float) -> Tensor:
    """Drop tokens whose probability is below p times that of the best one."""
    if p == 0:
        return scores
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < p * probs.max(), -math.inf)


def draw(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one id, each with its softmax probability; only among those that are kept, so no other can come out.

    Race of exponential clocks: with E exponential, argmax p / E is i with probability p_i.
    """
    if scores.device.type != "cpu":  # there counting them would make the CPU wait, and drawing for all costs nothing
        clocks = torch.empty_like(scores).exponential_(generator=generator)
        return (scores.softmax(-1) / clocks).argmax()
    kept = (scores != -math.inf).nonzero().squeeze(1)  # [n]
    if len(kept) == 0:  # every logit was -inf: the caller sees that the largest one is not finite
        return scores.argmax()
    probs = scores[kept].softmax(-1)  # float32
    clocks = torch.empty_like(probs).exponential_(generator=generator)
    return kept[(probs / clocks).argmax()]
