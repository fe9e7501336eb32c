"""The linear layers in their own forms, each against a plain product of what it says it holds."""

import platform

import pytest
import torch
import torch.nn.functional as F

from qwen_scratch import kinds, linears, quantized
from qwen_scratch.errors import InputError
from qwen_scratch.kinds import choose_linears
from qwen_scratch.linears import HalfLinear, PackedLinear, PlainLinear, Space
from qwen_scratch.quantized import Int4Linear, Int8Linear, Int8WeightLinear

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def near(ours, expected, bound):
    assert expected.dtype in (ours.dtype, torch.float32)
    assert (ours.float() - expected).abs().max() <= bound * expected.abs().max()


def rounding(dtype):
    return 1e-5 if dtype == torch.float32 else 2e-2


@pytest.fixture(params=[(48, 64), (70, 100), (5, 320)], ids=str)
def shape(request):
    return request.param


def check(layer, weight, bias, dtype, bound):
    """All that a layer is called with, against the weight that it holds."""
    for rows in ((1,), (2,), (3,), (2, 5), (80,), (3, 30)):
        x = torch.randn(*rows, weight.shape[1]).to(dtype)
        y = layer(x)
        assert y.shape == (*rows, len(weight))
        near(y, F.linear(x.float(), weight, bias.float()), bound)
    x = torch.randn(1, weight.shape[1]).to(dtype).expand(2, -1)
    two = layer.equal_rows(x)
    assert torch.equal(two[0], two[1])
    near(two, F.linear(x.float(), weight, bias.float()), bound)


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86")


def test_every_cpu_has_quick_layers():
    """Those without kernels for 16-bit numbers, or with 8-bit products that overflow, get others."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        quick = linears.has_kernels(dtype)
        for stored in (torch.float32, torch.bfloat16):
            chosen = choose_linears(None, CPU, dtype, stored)
            assert chosen.head is chosen.inner
            assert chosen.held_bytes == min(dtype.itemsize, stored.itemsize) or chosen.head.func is PackedLinear
            if dtype != torch.float32:
                assert chosen.head.func is (PackedLinear if quick else PlainLinear)
            elif stored == torch.float32 or platform.machine() != "x86_64":
                assert chosen.head.func is PackedLinear
            else:
                assert chosen.head.func is HalfLinear
        for quantize in quantized.HELD_BYTES:
            chosen = choose_linears(quantize, CPU, dtype, dtype)
            assert chosen.head.func in ((Int8Linear, Int8WeightLinear) if quick else (Int8WeightLinear,))
            assert chosen.inner.func is (chosen.head.func if quantize == "int8" else Int4Linear)
            assert chosen.held_bytes == quantized.HELD_BYTES[quantize]


@DTYPES
@pytest.mark.parametrize("kind", [PackedLinear, PlainLinear])
def test_weights_as_they_are(shape, dtype, kind):
    if kind is PackedLinear and not linears.has_kernels(dtype):
        return  # then it is not used
    more = (dtype, Space()) if kind is PackedLinear else (dtype,)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    kept = weight.clone()
    layer = kind(weight, bias, *more)
    assert layer.held_bytes == weight.nbytes
    weight.zero_()  # its memory is used again
    check(layer, kept.float(), bias, dtype, rounding(dtype))
    check(kind(kept, None, *more), kept.float(), bias * 0, dtype, rounding(dtype))


@X86
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("piece", [2**24, 4096])
def test_16_bits_in_float32(stored, piece, monkeypatch):
    monkeypatch.setattr(HalfLinear, "PIECE", piece)
    for shape in ((48, 64), (70, 100), (5, 320), (200, 64)):
        weight, bias = torch.randn(shape).to(stored), torch.randn(shape[0])
        kept = weight.clone()
        layer = HalfLinear(weight, bias, Space())
        assert layer.held_bytes == weight.nbytes
        weight.zero_()
        check(layer, kept.float(), bias, torch.float32, 2e-6)
        check(HalfLinear(kept, None, Space()), kept.float(), bias * 0, torch.float32, 2e-6)
    assert len(layer.pieces) == (1 if piece > 4096 else 4)


@X86
@pytest.mark.parametrize("largest", [1e-20, 0.03, 1.0, 7.7, 3e5, 1e30])
def test_float16_holds_all_bits_of_bfloat16(largest):
    """In a range of 2**32, with powers of two on either side; what is smaller is nothing beside the largest."""
    weight = (torch.randn(64, 50) * 2.0 ** -torch.arange(50) * largest).bfloat16().float()
    largest = float(weight.abs().max())
    held = HalfLinear(weight.bfloat16(), None, Space())(torch.eye(50)).t()
    lost = held != weight
    assert not lost[weight.abs() > largest * 2**-32].any()
    assert ((held - weight).abs() <= largest * 2**-40).all()
    assert lost.any()
    assert torch.equal(HalfLinear(weight.bfloat16() * 0, None, Space())(torch.eye(50)), torch.zeros(50, 64))


@X86
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_shows(wrong):
    weight = torch.randn(64, 32).bfloat16()
    weight[5, 7] = wrong
    assert not HalfLinear(weight, None, Space())(torch.randn(3, 32)).isfinite().any()


@DTYPES
@pytest.mark.parametrize("kind", [Int8Linear, Int8WeightLinear])
def test_int8(shape, dtype, kind):
    """127 steps on each side of 0 for each output, and for each token: what is rounded is half a step at most."""
    if kind is Int8Linear and choose_linears("int8", CPU, torch.float32, dtype).head.func is not Int8Linear:
        return  # this CPU's 8-bit products overflow, and so it is not used
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    weight[3] = 0  # no step can be taken from it, and nothing may become NaN
    layer = kind(weight, bias, Space())
    step = weight.float().abs().amax(1) / 127
    if kind is Int8WeightLinear:
        step = step.bfloat16().float()
    held = (weight.float() / step.clamp(min=1e-30)[:, None]).round().clamp(-127, 127) * step[:, None]
    assert ((held - weight.float()).abs() <= step[:, None] * (0.501 if kind is Int8Linear else 0.8)).all()
    assert torch.allclose(layer.scale[: shape[0]].float(), step, atol=1e-29)
    check(layer, held, bias, dtype, 0.04 if kind is Int8Linear else 2e-2)
    x = torch.randn(7, shape[1]).to(dtype)
    size = x.float().abs().amax(1, keepdim=True) / 127
    if kind is Int8WeightLinear:  # many rows are multiplied in float32
        many = torch.randn(200, shape[1]).to(dtype)
        near(layer(many), F.linear(many.float(), held, bias.float()), 1e-5 if dtype == torch.float32 else 2e-2)
    elif dtype == torch.float32:  # integers are summed exactly, so with the same rounding of x little is left to differ
        near(layer(x), F.linear((x / size).round() * size, held, bias), 1e-5)
    assert torch.equal(layer(x * 0), bias.expand(7, -1))


@DTYPES
@pytest.mark.parametrize("group", [64, 128])
def test_int4(shape, dtype, group, monkeypatch):
    """16 values for each group; the kernel and the unpacked weight say the same, and shapes that fill no group are padded."""
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    weight[3] = 0
    layer = Int4Linear(weight, bias, group)
    blocks = -(-shape[0] // 64) * 64 * -(-shape[1] // group)  # of one group each, with those that fill up
    assert layer.held_bytes == blocks * (group // 2 + 4)
    assert quantized.HELD_BYTES["int4" if group == 64 else "int4-128"] == (group // 2 + 4) / group
    assert quantized.packed_half() or torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AVX2")
    padded = F.pad(weight.float(), (0, -shape[1] % group)).view(shape[0], -1, group)
    step = (padded.amax(2) - padded.amin(2)) / 15  # [out, groups]
    if quantized.packed_half():
        held = layer.unpacked(torch.float32).t()[: shape[0]]
        error = (held.view(padded.shape) - padded).abs().amax(2)
        assert (error <= 0.6 * step + 1e-6).all()  # half a step, and what 16-bit scales round
        for extreme in (torch.amin, torch.amax):  # both ends of a group are values that it has
            assert ((extreme(held.view(padded.shape), 2) - extreme(padded, 2)).abs() <= 0.15 * step + 1e-6).all()
        held = held[:, : shape[1]]
        check(layer, held, bias, dtype, 2e-2)
        many = torch.randn(100, shape[1]).to(dtype)  # multiplied in its own dtype, not in the kernel's
        near(layer(many), F.linear(many.float(), held, bias.float()), rounding(dtype))
        monkeypatch.setattr(quantized, "packed_half", lambda: None)
        check(layer, held, bias, dtype, 2e-2)
    else:
        check(layer, weight.float(), bias, dtype, 0.2)
    assert torch.equal(layer(torch.zeros(2, shape[1], dtype=dtype)), bias.expand(2, -1))


def test_large_weights_are_taken_in_parts(monkeypatch):
    """Any number of rows, not only whole blocks of them."""
    weight = torch.randn(64 * 5 + 7, 4096)
    before = weight.clone()
    assert [(part.start, part.stop) for part in linears.row_blocks(weight)] == [
        (n, min(n + 64, 327)) for n in range(0, 327, 64)
    ]
    x = torch.randn(3, 4096)
    near(choose_linears("int8", CPU, torch.float32, torch.float32).head(weight, None)(x), F.linear(x, weight), 0.02)
    near(Int4Linear(weight, None, 64)(x), F.linear(x, weight), 0.2)
    assert torch.equal(weight, before)


def test_a_space_is_used_again_unless_it_is_large(monkeypatch):
    space = Space()
    a, b = space.take((4, 8), torch.float32), space.take((2, 3), torch.int8)
    assert (a.shape, b.shape, b.dtype) == ((4, 8), (2, 3), torch.int8)
    assert a.data_ptr() == b.data_ptr()
    monkeypatch.setattr(Space, "LARGE", 100)
    assert space.take((101,), torch.int8).data_ptr() != a.data_ptr()
    assert len(space.bytes[0]) == 128
    assert space.take((4, 8), torch.float32, 1).data_ptr() != space.take((4, 8), torch.float32).data_ptr()


def test_what_cannot_be_done_is_refused_by_name(monkeypatch):
    assert choose_linears(None, torch.device("cuda"), torch.bfloat16, torch.bfloat16) is None
    with pytest.raises(InputError, match="'int3' is not known; choose one of int8, int4, int4-128"):
        choose_linears("int3", CPU, torch.bfloat16, torch.bfloat16)
    with pytest.raises(InputError, match="--quantize int8 is not possible here: it works on a CPU, not on cuda"):
        choose_linears("int8", torch.device("cuda"), torch.bfloat16, torch.bfloat16)

    def missing(*_, **__):
        raise AttributeError("no such operation")

    monkeypatch.setattr(kinds, "Int4Linear", missing)
    with pytest.raises(
        InputError, match="--quantize int4 is not possible here: this torch has no kernel for it in float32"
    ):
        choose_linears("int4", CPU, torch.float32, torch.float32)
    for kind in (Int8Linear, Int8WeightLinear):  # sums that overflow are found out
        monkeypatch.setattr(kind, "forward", lambda self, x: F.linear(x, torch.ones(64, 128)) * 2)
    with pytest.raises(InputError, match="not possible here: this torch"):
        choose_linears("int8", CPU, torch.float32, torch.float32)
