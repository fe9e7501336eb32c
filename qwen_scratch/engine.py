"""The loop that makes tokens: ids in, ids out. It knows no text.

prefill: the whole prompt, in one forward or in chunks; its last position predicts the first new token
decode:  that token in, the next one out, one forward each, until a stop id or the limit
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from qwen_scratch.cache import KVCache
from qwen_scratch.errors import InputError, is_out_of_memory
from qwen_scratch.model import Qwen
from qwen_scratch.sampling import Sampler


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under the model's own distribution, before penalties, temperature and filters."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest ids, best first


@dataclass
class Request:
    """One prompt, and what comes of it; `run` fills the lower part while it goes."""

    prompt_ids: list[int]
    sampler: Sampler
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # how many of the likeliest ids to record with each token; None: record nothing

    token_ids: list[int] = field(default_factory=list)  # new tokens, the stop id included
    stop_reason: str | None = None  # "eos", "stop" or "length"; None while running
    first_top: list[tuple[int, float, float]] = field(
        default_factory=list
    )  # best five at first: id, logit, probability
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per new token, where asked for
    prefill_s: float = 0.0  # until the first token is known, so the time to first token
    decode_s: float = 0.0  # all later tokens together


def run(
    model: Qwen, requests: list[Request], cache: KVCache | None = None, progress: bool = False
) -> Iterator[tuple[Request, int]]:
    """Generate for all requests side by side; yield each new token with its request as soon as it is known.

    Args:
        cache: what it holds must be the beginning of each prompt (at least one token of which is new); None: a fresh
            one of just the needed size, dropped at the end.

    Raises:
        InputError: an empty prompt, an id the model has no embedding for, a cache that is too short. Before any token.
        RuntimeError: the logits are not finite, or the memory does not suffice.
    """
    for request in requests:
        check_ids(request.prompt_ids, model.config.vocab_size)
    room = max(len(r.prompt_ids) for r in requests) + max(r.max_new_tokens for r in requests)
    if cache is not None and room > cache.max_seq_len:
        raise InputError(f"prompt and new tokens need {room} positions, but the cache has {cache.max_seq_len}")
    try:
        if cache is None:
            cache = KVCache(model.config, len(requests), room, device=model.device, dtype=model.dtype)
        yield from steps(model, requests, cache, progress)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        weights = model.config.num_parameters * model.dtype.itemsize
        keys = len(requests) * room * model.config.kv_bytes_per_token(model.dtype)
        raise RuntimeError(
            f"out of memory on {model.device}: the weights take {weights / 2**20:,.0f} MiB and the KV cache {keys / 2**20:,.0f} "
            f"MiB for {room} positions; fewer new tokens, a shorter prompt or a smaller --dtype need less"
        ) from None


def steps(
    model: Qwen, requests: list[Request], cache: KVCache, progress: bool = False
) -> Iterator[tuple[Request, int]]:
    """Prefill, then one token after the other."""
    for request in requests:
        request.sampler.begin(request.prompt_ids, model.config.vocab_size, model.device)

    start = perf_counter()
    known = cache.lengths.tolist()
    logits = prefill(model, [r.prompt_ids[n:] for r, n in zip(requests, known, strict=True)], cache, progress)
    for b, request in enumerate(requests):
        request.first_top = best(logits[b, 0])
    first = 0.0
    while True:
        picks = choose(requests, logits)
        now = perf_counter()  # the copy inside `choose` has waited for the device
        first = first or now
        for row, request, (token_id, largest) in zip(logits[:, 0], requests, picks, strict=True):
            if request.stop_reason is not None:
                continue  # a row that is done keeps its place in the batch; what it makes is dropped
            if not math.isfinite(largest):
                raise RuntimeError(
                    f"the model produced non-finite logits after {len(request.token_ids)} tokens"
                    + ("; float16 overflows easily, try bfloat16 or float32" if model.dtype == torch.float16 else "")
                )
            request.token_ids.append(token_id)
            if request.logprobs is not None:
                request.token_logprobs.append(log_probabilities(row, token_id, request.logprobs))
            request.stop_reason = why_stop(request, token_id)
            request.prefill_s, request.decode_s = first - start, now - first
            yield request, token_id
        if all(r.stop_reason for r in requests):
            return
        logits = forward(model, [[r.token_ids[-1]] for r in requests], cache)


def check_ids(ids: list[int], vocab_size: int) -> None:
    """Refuse what the embedding could not look up; on a GPU that would end in an assertion inside a kernel."""
    if not ids:
        raise InputError("the prompt is empty: it has no tokens, and Qwen has no start token to put in their place")
    bad = [i for i in ids if not 0 <= i < vocab_size]
    if bad:
        raise InputError(f"token id {bad[0]} is outside the model's vocabulary of {vocab_size}")


def prefill(model: Qwen, rows: list[list[int]], cache: KVCache, progress: bool) -> Tensor:
    """The prompts' new ids → logits [B, 1, V] of each row's last position.

    A model with a `prefill_chunk` reads that many tokens at a time: what its layers hold meanwhile then no longer grows with
    the prompt. The exact one reads it whole, as the reference does, because other shapes round otherwise.
    """
    chunk: int | None = getattr(model, "prefill_chunk", None)
    done = 0
    with tqdm(desc="reading the prompt", total=max(map(len, rows)), unit="token", leave=False, delay=2,
              disable=not progress) as bar:  # fmt: skip
        while chunk and min(map(len, rows)) - done > chunk:  # every row keeps a token for the last forward
            forward(model, [row[done : done + chunk] for row in rows], cache)
            done += chunk
            bar.update(chunk)
        return forward(model, [row[done:] for row in rows], cache)


@torch.inference_mode()
def forward(model: Qwen, rows: list[list[int]], cache: KVCache) -> Tensor:
    """Each row's new ids behind what the cache has → logits [B, 1, V] of each row's last position."""
    lengths = [len(row) for row in rows]
    padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
    input_ids = torch.tensor(padded, device=model.device)  # [B, T]
    return model(input_ids, cache=cache, lengths=lengths, last_only=True)


@torch.inference_mode()
def choose(requests: list[Request], logits: Tensor) -> list[tuple[int, float]]:
    """Each row's chosen id and largest logit, with a single copy from the device."""
    picks = torch.stack([r.sampler.pick(logits[b, 0]) for b, r in enumerate(requests)])  # [B, 2]
    return [(int(token_id), largest) for token_id, largest in picks.tolist()]


@torch.inference_mode()
def best(logits: Tensor, n: int = 5) -> list[tuple[int, float, float]]:
    """The n most likely ids: (id, logit, probability), before any filter."""
    scores = logits.float()
    top = scores.topk(min(n, len(scores)))
    probs = scores.softmax(-1)[top.indices]
    return list(zip(top.indices.tolist(), top.values.tolist(), probs.tolist(), strict=True))


@torch.inference_mode()
def log_probabilities(logits: Tensor, token_id: int, n: int) -> TokenLogprobs:
    """Of the chosen id and of the n likeliest; logits [V]."""
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(n, len(logprobs)))
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), pairs)


def why_stop(request: Request, token_id: int) -> str | None:
    if token_id in request.eos_ids:
        return "eos"
    if token_id in request.stop_ids:
        return "stop"
    return "length" if len(request.token_ids) >= request.max_new_tokens else None
