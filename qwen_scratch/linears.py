"""Linear layers for a CPU that hold their weight in a form of their own: packed for quick reading, or quantised as well.

One interface for all: made of a plain weight [out, in] of any dtype, a tensor or rows in a file, and a bias in the dtype of x;
called with x [..., in] → [..., out]; `equal_rows` does the same for x [2, in] of two equal rows, as which one token goes
through the model (see fast.py).
"""

import functools
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_scratch.checkpoint import Rows
from qwen_scratch.errors import InputError

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
    """A 16-bit weight as float16, multiplied in float32: half the bytes to read, and every number is still what it was.

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


class Int8Linear(HeldLinear):
    """8-bit weights, symmetric, a scale for each output; x is rounded to 8 bits too, with a scale for each token.

    Integers are multiplied and summed exactly, so the two roundings are all that is lost.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, space: Space) -> None:
        super().__init__(weight, bias)
        whole = space.take(weight.shape, torch.int8)
        self.scale = round_to_int8(weight, whole, torch.float32, space)
        self.packed = torch.ops.onednn.qlinear_prepack(whole, [2, self.in_features])
        self.zeros = torch.zeros(self.out_features, dtype=torch.int32)  # a symmetric scale has its zero at 0
        self.held_bytes = self.out_features * (self.in_features + 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = step_size(x.abs().amax(-1, keepdim=True).float())  # [..., 1]
        y = self.product((x / scale).round_().to(torch.int8), 1.0, None, torch.float32) * scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def equal_rows(self, x: Tensor) -> Tensor:
        scale = max(float(torch.linalg.vector_norm(x[:1], torch.inf)), 1e-30) / 127
        return self.product((x * (1 / scale)).round_().to(torch.int8), scale, self.bias, x.dtype)

    def product(self, x: Tensor, scale: float, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            x, scale, 0, self.packed, self.scale, self.zeros, bias, 1.0, 0, dtype, "none", [], ""
        )


class Int8WeightLinear(HeldLinear):
    """The same weights, but x in bfloat16: for a CPU whose 8-bit products overflow in 16-bit sums (x86 without VNNI)."""

    BLOCK = 64  # inputs and outputs that the kernel takes at once, or a multiple
    MANY = 128  # rows; of more, the weight is widened for the duration of the product

    def __init__(self, weight: Weight, bias: Tensor | None, space: Space) -> None:
        super().__init__(weight, bias)
        self.more_in, more_out = -self.in_features % self.BLOCK, -self.out_features % self.BLOCK
        self.whole = own_memory((self.out_features + more_out, self.in_features + self.more_in), torch.int8)
        inner = self.whole[: self.out_features, : self.in_features]
        self.scale = round_to_int8(weight, inner, torch.bfloat16, space)
        self.scale = F.pad(self.scale, (0, more_out))
        self.held_bytes = self.whole.nbytes + self.scale.nbytes

    def forward(self, x: Tensor) -> Tensor:
        rows = self.padded(x)
        if len(rows) > self.MANY:
            y = F.linear(rows.float(), self.whole.float()).mul_(self.scale)
        else:
            y = torch.ops.aten._weight_int8pack_mm(rows.to(torch.bfloat16), self.whole, self.scale)
        return self.finished(y, x)


def round_to_int8(weight: Weight, whole: Tensor, dtype: torch.dtype, space: Space) -> Tensor:
    """Fill `whole` [out, in] int8; return the scales [out] in this dtype."""
    scale = torch.empty(len(whole), dtype=dtype)
    for part in row_blocks(weight):
        stored = weight[part]
        rows = space.take(stored.shape, torch.float32, 1).copy_(stored)
        scale[part] = step_size(torch.maximum(rows.amax(1), -rows.amin(1)))
        whole[part] = (
            rows.div_(scale[part, None]).round_().clamp_(-127, 127)
        )  # a scale that was rounded may be too small
    return scale


class Int4Linear(HeldLinear):
    """4-bit weights in groups of consecutive inputs, each group with its own scale and offset in bfloat16; so is x.

    A group's values are its least one plus n steps of a fifteenth of its range, n = 0 to 15. For many rows, the weight is
    unpacked for the duration of the product: then arithmetic is the limit, and plain matrices are quicker there.
    """

    BLOCK = 64  # outputs that the kernel keeps side by side, or a multiple
    MANY = 64  # rows

    def __init__(self, weight: Weight, bias: Tensor | None, group: int) -> None:
        super().__init__(weight, bias)
        self.group = group
        self.more_in, more_out = (
            -self.in_features % group,
            -self.out_features % self.BLOCK,
        )  # the rest up to whole groups
        outputs, groups = self.out_features + more_out, (self.in_features + self.more_in) // group
        self.packed = own_memory((outputs, groups * group // 2), torch.uint8)
        # of each group: its scale, and what n = 8 stands for
        self.scales = torch.empty(groups, outputs, 2, dtype=torch.bfloat16)
        for block in row_blocks(weight):
            rows = weight[block].to(torch.float32, copy=True)
            rows = F.pad(rows, (0, self.more_in, 0, -len(rows) % self.BLOCK)).view(-1, groups, group)
            part = slice(block.start, block.start + len(rows))  # with the padding
            low, high = rows.amin(2), rows.amax(2)  # [rows, groups]; aminmax is slower than both
            scale = ((high - low) / 15).clamp_(min=1e-30).bfloat16()
            middle = ((low + high + scale.float()) / 2).bfloat16()  # so that n = 7.5 stands between least and largest
            self.scales[:, part] = torch.stack((scale, middle), -1).transpose(0, 1)
            n = rows.sub_(middle.float()[..., None]).div_(scale.float()[..., None]).add_(8).round_().clamp_(0, 15)
            self.packed[part] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(n.int().flatten(1), 1)
        self.held_bytes = self.packed.nbytes + self.scales.nbytes

    def forward(self, x: Tensor) -> Tensor:
        rows = self.padded(x)
        if len(rows) > self.MANY and packed_half() is not None:
            dtype = x.dtype if has_kernels(x.dtype) else torch.float32
            y = rows.to(dtype) @ self.unpacked(dtype)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.bfloat16(), self.packed, self.group, self.scales)
        return self.finished(y, x)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """[in, out] with the padding."""
        scale, middle = self.scales.to(dtype)[:, None].unbind(-1)  # each [groups, 1, out]
        n = unpack(self.packed, packed_half()).to(dtype).view(len(scale), self.group, -1)
        return n.sub_(8).mul_(scale).add_(middle).flatten(0, 1)


def unpack(packed: Tensor, half: int | None) -> Tensor:
    """The kernel's order → [in, out] uint8: a byte has outputs i and i + half of a block of two halves."""
    blocks = packed.view(-1, packed.shape[1] * 2, half or 32)  # [out / block, in, half]
    return torch.cat((blocks & 15, blocks >> 4), -1).transpose(0, 1).flatten(1)


@functools.cache
def packed_half() -> int | None:
    """The order is the kernel's own and depends on the CPU; None: not one that we know, and every product takes the kernel."""
    n = torch.arange(64 * 32, dtype=torch.int32).view(64, 32) * 7 % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(n, 1)
    return next((half for half in (32, 16) if torch.equal(unpack(packed, half).t().int(), n)), None)


@functools.cache
def has_kernels(dtype: torch.dtype) -> bool:
    """Whether this CPU has kernels of its own for products of this kind of number."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_fp16_supported()


def step_size(largest: Tensor) -> Tensor:
    """Of 127 steps from 0 to the largest value; never 0, by which nothing could be divided."""
    return largest.clamp(min=1e-30) / 127


def row_blocks(weight: Weight, numbers: int = 2**18) -> Iterator[slice]:
    """A weight in parts: whole, it would take twice its memory as float32, and small parts stay in the cache meanwhile."""
    rows, width = weight.shape
    size = max(numbers // width // 64, 1) * 64
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


MakeLinear = Callable[[Weight, Tensor | None], HeldLinear]

GROUPS = {"int4": 64, "int4-128": 128}
HELD_BYTES = {"int8": 1.0} | {
    name: 0.5 + 4 / group for name, group in GROUPS.items()
}  # per weight, with the groups' scales


class Kinds(NamedTuple):
    """What makes the linear layers of a model: those inside, and the head."""

    inner: MakeLinear
    head: MakeLinear
    held_bytes: float  # that a weight inside takes
    makers: int = 1  # threads that may be at it side by side, where one layer is one thread's work


def choose_linears(quantize: str | None, device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> Kinds | None:
    """The linear layers to use, or None where this torch has no quick ones for this kind of number.

    The head is never held in 4 bits: that would cost a third of what quality is lost, and save little time, as the kernel for 4
    bits is limited by its arithmetic.

    Args:
        quantize: what --quantize says.
        device, dtype: to run on and in.
        stored: dtype of the weights in the file.

    Raises:
        InputError: `quantize` is unknown, or cannot be done on this device and in this dtype.
    """
    if quantize not in (None, *HELD_BYTES):
        raise InputError(f"quantize {quantize!r} is not known; choose one of {', '.join(HELD_BYTES)}")
    reason = f"it works on a CPU, not on {device}"
    if device.type == "cpu":
        space = Space()
        packed = functools.partial(PackedLinear, dtype=dtype, space=space)
        plain = functools.partial(PlainLinear, dtype=dtype)
        half, int8, int8_weight = (
            functools.partial(kind, space=space) for kind in (HalfLinear, Int8Linear, Int8WeightLinear)
        )
        if quantize:
            kinds: list[MakeLinear] = [int8, int8_weight] if has_kernels(dtype) else [int8_weight]
        elif dtype == torch.float32:
            kinds = [half, packed] if stored.itemsize == 2 else [packed]
        else:
            kinds = [packed] if has_kernels(dtype) else [plain]
        head = first_that_works(kinds, dtype)
        inner = head
        if quantize in GROUPS:
            inner = first_that_works([functools.partial(Int4Linear, group=GROUPS[quantize])], dtype)
        if inner is not None and head is not None:
            if quantize:
                return Kinds(inner, head, HELD_BYTES[quantize])
            if head is half:
                return Kinds(inner, head, 2, min(torch.get_num_threads(), 4))  # each takes memory for what it works on
            return Kinds(inner, head, dtype.itemsize)
        reason = f"this torch has no kernel for it in {str(dtype).removeprefix('torch.')}"
    if quantize is not None:
        raise InputError(f"--quantize {quantize} is not possible here: {reason}")
    return None


def first_that_works(kinds: list[MakeLinear], dtype: torch.dtype) -> MakeLinear | None:
    """The operations are torch's own, may go one day, and overflow on some CPUs, so each is tried."""
    for make in kinds:
        try:
            layer = make(torch.ones(64, 128, dtype=dtype), None)
            x = torch.ones(2, 128, dtype=dtype)
            if all(torch.allclose(y, x.new_full((2, 64), 128), rtol=0.01) for y in (layer(x), layer.equal_rows(x))):
                return make
        except (RuntimeError, AttributeError, NotImplementedError):
            continue
    return None
