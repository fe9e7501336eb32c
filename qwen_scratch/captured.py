"""Decoding on a GPU with no Python between the kernels: one step of fixed shapes, captured once as a CUDA graph, then replayed.

A token's step launches some hundred small kernels, and launching them one by one takes longer than running them. A graph launches
all at once, but it repeats exactly what it saw: the same addresses and the same shapes. So the step writes keys and values by
index, looks at a fixed number of positions, of which a mask hides those that are not there yet, and that number comes in a few
sizes, so that a short context does not pay for a long cache. Prompts go the ordinary way.
"""

import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from qwen_scratch.cache import KVCache
from qwen_scratch.config import QwenConfig
from qwen_scratch.fast import attend_in_groups
from qwen_scratch.model import Qwen, Step

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # positions that a step looks at; beyond, the whole cache


class IndexedCache(KVCache):
    """A cache as a step of fixed shapes sees it: what is written and what is seen follows from tensors on the device alone."""

    def __init__(self, whole: KVCache, positions: Tensor, size: int) -> None:
        self.k, self.v, self.lengths = whole.k, whole.v, whole.lengths
        self.rows = torch.arange(len(positions), device=positions.device)
        self.positions, self.size = positions, size

    def write(self, layer: int, k: Tensor, v: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, K, 1, hd] to each row's own position; returns the first `size` positions [B, K, size, hd]."""
        for whole, part in ((self.k[layer], k), (self.v[layer], v)):
            whole[self.rows, :, self.positions] = part[:, :, 0]
        return self.k[layer, :, :, : self.size], self.v[layer, :, :, : self.size]


def fixed_step(model: Qwen, ids: Tensor, positions: Tensor, cache: KVCache, size: int) -> Tensor:
    """One token for each row, at its position: ids [B, 1], positions [B] → logits [B, 1, V]; then positions are one further.

    Nothing here depends on a value that the CPU would have to know, except `size`, which must exceed every position.
    """
    cos, sin = model.rope(positions[:, None], model.dtype)
    mask = (torch.arange(size, device=ids.device) <= positions[:, None])[:, None, None]  # [B, 1, 1, size]
    step = Step(cos, sin, mask, IndexedCache(cache, positions, size), cache.lengths)
    x = model.model.embed_tokens(ids)  # [B, 1, D]
    for block in model.model.layers:
        x = block(x, step)
    logits: Tensor = model.lm_head(model.model.norm(x))
    positions += 1
    return logits


class Decoder:
    """The captured steps of one cache, so of one request or batch; its buffers are nobody else's.

    They are made outside of inference mode, so that they serve callers inside and outside of it.
    """

    @torch.inference_mode(False)
    def __init__(self, model: Qwen, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.ids = torch.zeros(len(cache.lengths), 1, dtype=torch.int64, device=model.device)
        self.positions = cache.lengths.clone().to(model.device)
        self.expected = cache.lengths.clone()  # what `positions` hold
        self.steps: dict[int, Callable[[], Tensor]] = {}

    def __call__(self, ids: Tensor) -> Tensor:
        """The next token of each row; the cache must have room for it."""
        lengths = self.cache.lengths
        if not torch.equal(lengths, self.expected):  # truncated, or written by another
            self.positions.copy_(lengths)
        self.ids.copy_(ids)
        longest = int(lengths.max())
        size = next((size for size in SIZES if longest < size <= self.cache.max_seq_len), self.cache.max_seq_len)
        if size not in self.steps:
            self.steps[size] = self.capture(size)
        logits = self.steps[size]()
        self.cache.lengths = self.expected = lengths + 1
        return logits

    def capture(self, size: int) -> Callable[[], Tensor]:
        def step() -> Tensor:
            return fixed_step(self.model, self.ids, self.positions, self.cache, size)

        if self.ids.device.type != "cuda":
            return step
        try:
            return captured(step, self.positions)
        except RuntimeError as error:
            warnings.warn(f"decoding goes on without a CUDA graph, which could not be captured: {error}", stacklevel=2)
            return step


def captured(step: Callable[[], Tensor], positions: Tensor) -> Callable[[], Tensor]:
    """The same step as one launch; `positions` are left as they were."""
    before = positions.clone()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # once for real, because libraries set themselves up at their first call; the replay writes the same again
    torch.cuda.current_stream().wait_stream(stream)
    positions.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, without running
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits.clone()  # the next replay overwrites it

    return replay


class CapturedQwen(Qwen):
    """Made and loaded as a `Qwen`, with the same parameters; only how one token is decoded differs."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__(config)
        for block in self.model.layers:
            attention: Any = block.self_attn
            attention.attend = MethodType(attend_in_groups, attention)

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None = None,
        lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        if (
            cache is None
            or input_ids.shape != (len(cache.lengths), 1)
            or cache.k.dtype != self.dtype
            or cache.lengths.min() == 0
            or cache.lengths.max() >= cache.max_seq_len
        ):
            return super().forward(input_ids, cache, lengths, last_only)
        decoder = getattr(cache, "decoder", None)
        if decoder is None:
            decoder = Decoder(self, cache)
            cache.decoder = decoder  # type: ignore[attr-defined]  # it lives and dies with its cache
        return decoder(input_ids)
