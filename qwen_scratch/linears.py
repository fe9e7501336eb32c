"""Linear layers for a CPU that hold their weight in a form of their own; those that quantise it are in quantized.py.

One interface for all: made of a plain weight [out, in] of any dtype, a tensor or rows in a file, and a bias in the dtype of x;
called with x [..., in] → [..., out]; `equal_rows` does the same for x [2, in] of two equal rows, as which one token goes
through the model (see fast.py).
"""

import functools
import math
import mmap
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_scratch.checkpoint import Rows

Weight = Tensor | Rows  # [out, in]


class Space(threading.local):
    """Memory that is used again and again: fresh pieces between the ones that stay would leave holes in the heap.

    Each thread has its own. Large pieces are fresh all the same, because the system gets those back whole.
    """

    LARGE = 2**25  # bytes; malloc's own border is nowhere higher

    def __init__(self) -> None:
        self.bytes = [torch.empty(0, dtype=torch.uint8)] * 2

    def take(self, shape: Sequence[int], dtype: torch.dtype, place: int = 0) -> Tensor:
        """A tensor of any content, good until the next call for the same place, 0 or 1."""
        size = math.prod(shape) * dtype.itemsize
        if size > self.LARGE:
            return torch.empty(shape, dtype=dtype)
        if size > len(self.bytes[place]):
            self.bytes[place] = torch.empty(size, dtype=torch.uint8)
        return self.bytes[place][:size].view(dtype).view(shape)

    def cast(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """The whole weight, copied only where its dtype is another one; good until the next call too."""
        whole: Tensor = weight[:]
        return whole if whole.dtype == dtype else self.take(whole.shape, dtype).copy_(whole)


def own_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that lie beside the heap: among what comes and goes there, pieces that stay would leave holes."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class HeldLinear(nn.Linear):
    """What all have in common. Nothing here is trained, so nothing is a Parameter."""

    held_bytes: int  # memory that the weight takes in its form
    more_in: int = 0  # inputs of 0 that a kernel needs to have whole blocks

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.bias = bias  # type: ignore[assignment]

    def equal_rows(self, x: Tensor) -> Tensor:
        y: Tensor = self(x[:1])
        return y.expand(2, -1)

    def padded(self, x: Tensor) -> Tensor:
        """[..., in] → [n, in + more_in]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        return F.pad(rows, (0, self.more_in)) if self.more_in else rows

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        """Outputs [n, out or more] → [..., out] in the dtype of x, with the bias."""
        y = y[:, : self.out_features].to(x.dtype).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class PackedLinear(HeldLinear):
    """The weight as it is, in the order in which oneDNN's kernel for two rows reads it best."""

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, space: Space) -> None:
        super().__init__(weight, bias)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(space.cast(weight, dtype), 2)
        self.held_bytes = self.out_features * self.in_features * dtype.itemsize

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def equal_rows(self, x: Tensor) -> Tensor:
        y: Tensor = self(x)  # both: quicker than one
        return y


class HalfLinear(HeldLinear):
    """A 16-bit weight as float16, multiplied in float32: half the bytes to read, and no rounding that could be seen.

    A weight is held times a power of two, for which its largest number is just within float16. Of bfloat16 all bits are kept
    then, but of numbers below 2**-32 of the largest; those are off by 2**-40 of it at most. A large weight is packed in pieces,
    each with its own power, so that only one at a time takes the memory of float32.
    """

    PIECE = 2**24  # numbers

    def __init__(self, weight: Weight, bias: Tensor | None, space: Space) -> None:
        super().__init__(weight, bias)
        self.pieces = []
        for part in row_blocks(weight, self.PIECE):
            stored = weight[part]
            wide = space.take(stored.shape, torch.float32).copy_(stored)
            largest = float(torch.maximum(wide.amax(), -wide.amin()))
            # What is not finite has to show in what comes out, and not become the largest number that there is.
            scale = 2.0 ** (math.frexp(largest)[1] - 16) if math.isfinite(largest) else largest
            self.pieces.append((scale, torch.ops.quantized.linear_prepack_fp16(wide.div_(scale), None)))
        self.held_bytes = self.out_features * self.in_features * 2

    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.ops.quantized.linear_dynamic_fp16(x * scale, packed) for scale, packed in self.pieces]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias

    def equal_rows(self, x: Tensor) -> Tensor:
        y: Tensor = self(x)  # both: quicker than one
        return y


class PlainLinear(HeldLinear):
    """The weight as it is, for 16-bit numbers that this CPU has no kernel for: more than a few rows are quicker in float32."""

    MANY = 20  # rows

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias)
        self.plain = own_memory(weight.shape, dtype).copy_(weight[:])
        self.held_bytes = self.plain.nbytes

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > self.MANY * self.in_features:
            wide = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.plain.float(), wide).to(x.dtype)
        return F.linear(x, self.plain, self.bias)


@functools.cache
def has_kernels(dtype: torch.dtype) -> bool:
    """Whether this CPU has kernels of its own for products of this kind of number."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_fp16_supported()


def row_blocks(weight: Weight, numbers: int = 2**18) -> Iterator[slice]:
    """A weight in parts: whole, it would take twice its memory as float32, and small parts stay in the cache meanwhile."""
    rows, width = weight.shape
    size = max(numbers // width // 64, 1) * 64
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
