"""Which linear layers serve here: it depends on the CPU, on the dtype, on what the file has, and on --quantize."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qwen_scratch.errors import InputError
from qwen_scratch.linears import HalfLinear, HeldLinear, PackedLinear, PlainLinear, Space, Weight, has_kernels
from qwen_scratch.quantized import GROUPS, HELD_BYTES, Int4Linear, Int8Linear, Int8WeightLinear

MakeLinear = Callable[[Weight, Tensor | None], HeldLinear]


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
