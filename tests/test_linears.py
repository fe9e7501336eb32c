"""The linear layers in their own forms, each against a plain product of what it says it holds."""

import pytest
import torch
import torch.nn.functional as F

from qwen_scratch import linears
from qwen_scratch.errors import InputError
from qwen_scratch.linears import Int4Linear, Int8Linear, PackedLinear, Space, choose_linears

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


@DTYPES
def test_packed(shape, dtype):
    if choose_linears(None, CPU, dtype) is None:
        assert dtype == torch.float16  # which not every CPU has a kernel for
        return
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    layer = PackedLinear(weight, bias)
    check(layer, weight.float(), bias, dtype, rounding(dtype))
    assert layer.held_bytes == weight.nbytes


@DTYPES
def test_int8(shape, dtype):
    """127 steps on each side of 0 for each output, and for each token: what is rounded is half a step at most."""
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    weight[3] = 0  # no step can be taken from it, and nothing may become NaN
    layer = Int8Linear(weight, bias, Space())
    step = weight.float().abs().amax(1) / 127
    held = (weight.float() / step.clamp(min=1e-30)[:, None]).round() * step[:, None]
    assert ((held - weight.float()).abs() <= step[:, None] * 0.501).all()
    assert torch.allclose(layer.scale, step, atol=1e-29)
    check(layer, held, bias, dtype, 0.04)
    x = torch.randn(7, shape[1]).to(dtype)
    size = x.float().abs().amax(1, keepdim=True) / 127
    if dtype == torch.float32:  # integers are summed exactly, so with the same rounding of x little is left to differ
        near(layer(x), F.linear((x / size).round() * size, held, bias), 1e-5)
    assert torch.equal(layer(x * 0), bias.expand(7, -1))


@DTYPES
@pytest.mark.parametrize("group", [64, 128])
def test_int4(shape, dtype, group, monkeypatch):
    """16 values for each group; the kernel and the unpacked weight say the same, and shapes that fill no group are padded."""
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    weight[3] = 0
    layer = Int4Linear(weight, bias, group)
    assert linears.unpacking_is_known() or torch.backends.cpu.get_cpu_capability() != "AVX512"
    padded = F.pad(weight.float(), (0, -shape[1] % group)).view(shape[0], -1, group)
    step = (padded.amax(2) - padded.amin(2)) / 15  # [out, groups]
    if linears.unpacking_is_known():
        held = layer.unpacked().t()[: shape[0]].float()
        error = (held.view(padded.shape) - padded).abs().amax(2)
        assert (error <= 0.6 * step + 1e-6).all()  # half a step, and what 16-bit scales round
        for extreme in (torch.amin, torch.amax):  # both ends of a group are values that it has
            assert ((extreme(held.view(padded.shape), 2) - extreme(padded, 2)).abs() <= 0.15 * step + 1e-6).all()
        held = held[:, : shape[1]]
        check(layer, held, bias, dtype, rounding(dtype))
        monkeypatch.setattr(linears, "unpacking_is_known", lambda: False)
        check(layer, held, bias, dtype, rounding(dtype))
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
    near(Int8Linear(weight, None, Space())(x), F.linear(x, weight), 0.02)
    near(Int4Linear(weight, None, 64)(x), F.linear(x, weight), 0.2)
    assert torch.equal(weight, before)


def test_a_space_is_used_again_unless_it_is_large(monkeypatch):
    space = Space()
    a, b = space.take((4, 8), torch.float32), space.take((2, 3), torch.int8)
    assert (a.shape, b.shape, b.dtype) == ((4, 8), (2, 3), torch.int8)
    assert a.data_ptr() == b.data_ptr()
    monkeypatch.setattr(Space, "LARGE", 100)
    assert space.take((101,), torch.int8).data_ptr() != a.data_ptr()
    assert len(space.bytes) == 128


def test_what_cannot_be_done_is_refused_by_name(monkeypatch):
    assert choose_linears(None, torch.device("cuda"), torch.bfloat16) is None
    assert choose_linears(None, CPU, torch.float64) is None
    with pytest.raises(InputError, match="'int3' is not known; choose one of int8, int4, int4-128"):
        choose_linears("int3", CPU, torch.bfloat16)
    with pytest.raises(InputError, match="--quantize int8 is not possible here: it works on a CPU, not on cuda"):
        choose_linears("int8", torch.device("cuda"), torch.bfloat16)

    def missing(*_, **__):
        raise AttributeError("no such operation")

    monkeypatch.setattr(linears, "Int4Linear", missing)
    with pytest.raises(
        InputError, match="--quantize int4 is not possible here: this torch has no kernel for it in float32"
    ):
        choose_linears("int4", CPU, torch.float32)
    monkeypatch.setattr(Int8Linear, "forward", lambda self, x: F.linear(x, torch.ones(64, 128)) * 2)
    with pytest.raises(InputError, match="not possible here: this torch"):
        choose_linears("int8", CPU, torch.float32)
