"""Linear layers for a CPU whose weights are quantised when they are made: 8 bits for each output, 4 bits in groups."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_scratch.linears import HeldLinear, Space, Weight, has_kernels, own_memory, row_blocks

GROUPS = {"int4": 64, "int4-128": 128}
HELD_BYTES = {"int8": 1.0} | {
    name: 0.5 + 4 / group for name, group in GROUPS.items()
}  # per weight, with the groups' scales


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


def step_size(largest: Tensor) -> Tensor:
    """Of 127 steps from 0 to the largest value; never 0, by which nothing could be divided."""
    return largest.clamp(min=1e-30) / 127
