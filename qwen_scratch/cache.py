"""The key/value cache: what attention remembers of every token so far.

Without it each new token would recompute the keys and values of all tokens before it. It is one buffer,
allocated once for the whole request and written in place: nothing grows or moves while tokens are made.
"""

import torch
from torch import Tensor

from qwen_scratch.config import QwenConfig


class KVCache:
    """Keys (normed and rotated) and values of every layer: `k`, `v` [L, B, K, max_seq_len, hd].

    `lengths` [B], on the CPU, says how many positions of each row are filled. Rows fill independently, so
    prompts of different length can share a batch.
    """

    def __init__(
        self,
        config: QwenConfig,
        batch_size: int,
        max_seq_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, max_seq_len, config.head_dim)
        # Zeros, not empty memory: a masked position still meets a weight of 0, and 0 * NaN is NaN.
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device="cpu")

    @property
    def max_seq_len(self) -> int:
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, layer: int, k: Tensor, v: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Put the first new[b] of T tokens behind what row b has, and return all that a query may look at.

        Args:
            layer: which layer's part of the buffer.
            k, v: [B, K, T, hd].
            new: [B] real tokens per row, at most T; what lies behind them is padding and is dropped.

        Returns:
            Views of the buffer [B, K, S, hd], S = the longest row after this write. Shorter rows hold leftovers
            behind their end, which the mask hides. `lengths` is not moved: that is the model's last act, so that
            a forward which fails half-way leaves the cache as it was.

        Raises:
            IndexError: a row would outgrow the buffer; nothing has been written then.
        """
        start, end = self.lengths.tolist(), (self.lengths + new).tolist()
        if max(end) > self.max_seq_len:
            raise IndexError(f"the KV cache holds {self.max_seq_len} tokens per row, but {max(end)} would be needed")
        for b, (i, j) in enumerate(zip(start, end, strict=True)):
            self.k[layer, b, :, i:j] = k[b, :, : j - i]
            self.v[layer, b, :, i:j] = v[b, :, : j - i]
        return self.k[layer, :, :, : max(end)], self.v[layer, :, :, : max(end)]

    def truncate(self, n: int) -> None:
        """Forget everything from position n on, in every row; rows that are shorter stay as they are."""
        if n < 0:
            raise ValueError(f"cannot truncate a cache to {n} tokens")
        self.lengths = self.lengths.clamp(max=n)
