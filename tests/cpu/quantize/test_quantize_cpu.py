"""quantize_fp8 without a GPU: what it means, what it refuses."""
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tkq
from tests.helpers.gemm.fp8_cases import E4M3, E5M2
from tkq.quantize import ops, workspace
from tkq.quantize.catalog import cooperative_tiles, has_workspace, shipped, way
from tkq.quantize.spec import TileSpec
from tkq.reference.fp8 import LARGEST, dequantise
from tkq.runtime.call import counters

GRANULARITIES = ("tensor", "row", "1x128", "128x128")


def shares(x, granularity):
    """amax of all that share a scale with an element, element by element."""
    (m, n), out = x.shape, torch.empty(x.shape)
    down, right = {"tensor": (m, n), "row": (1, n), "1x128": (1, 128), "128x128": (128, 128)}[granularity]
    for i in range(0, m, down):
        for j in range(0, n, right):
            out[i:i + down, j:j + right] = x[i:i + down, j:j + right].abs().max()
    return out


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", (E4M3, E5M2))
def test_means_what_it_says(granularity, dtype):
    x = torch.randn(133, 261)
    q, scale = tkq.quantize_fp8(x, granularity, dtype)
    want = (shares(x, granularity) / LARGEST[dtype]).clamp_min(2**-126)
    torch.testing.assert_close(dequantise(torch.ones_like(x), scale), want, rtol=1e-6, atol=0)
    assert q.dtype == dtype and q.is_contiguous() and scale.dtype == torch.float32
    step = torch.finfo(dtype).eps / 2  # relative, above the smallest normal number
    error = (dequantise(q, scale) - x).abs()
    assert (error <= x.abs() * step * 1.01 + want * torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_transpose_is_that_of_x(granularity):
    x = torch.randn(133, 261)
    q, scale, qt, scale_t = tkq.quantize_fp8(x, granularity, transpose=True)
    one, other = tkq.quantize_fp8(x, granularity), tkq.quantize_fp8(x.t().contiguous(), granularity)
    for got, want in ((q, one[0]), (scale, one[1]), (qt, other[0]), (scale_t, other[1])):
        assert got.shape == want.shape and torch.equal(got.float(), want.float())
    assert qt.is_contiguous()


def test_shapes_are_what_the_gemm_takes():
    x, w = torch.randn(37, 272), torch.randn(136, 272)
    for kind_x, kind_w in (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128")):
        (a, sa), (b, sb) = tkq.quantize_fp8(x, kind_x), tkq.quantize_fp8(w, kind_w)
        got = tkq.fp8_gemm(a, b.t(), sa, sb.t() if sb.dim() == 2 else sb, out_dtype=torch.float32)
        assert (got - x @ w.t()).norm() < 0.05 * (x @ w.t()).norm()


def test_block_scales_lie_down_the_rows():
    _, scale = tkq.quantize_fp8(torch.randn(37, 272), "1x128")
    assert scale.shape == (37, 3) and scale.stride() == (1, 40)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_nan_and_infinity(granularity):
    x = torch.zeros(130, 260)
    q, scale = tkq.quantize_fp8(x, granularity)
    assert (scale == 2**-126).all() and not q.float().any()
    x = torch.randn(130, 260)
    x[3, 7] = math.nan
    q, scale = tkq.quantize_fp8(x, granularity)
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[{"tensor": slice(None), "row": 3, "1x128": 3, "128x128": slice(128)}[granularity],
        slice(128) if granularity in ("1x128", "128x128") else slice(None)] = True
    hit |= torch.tensor(granularity == "tensor")
    assert torch.equal(q.float().isnan(), hit) and torch.equal(dequantise(q, scale).isnan(), hit)
    x[3, 7] = math.inf
    q, scale = tkq.quantize_fp8(x, granularity)
    assert q.float().isnan().sum() == 1 and q[3, 7].isnan() and torch.equal(dequantise(q, scale).isnan(), hit)


@pytest.mark.parametrize("shape", ((0, 16), (16, 0), (0, 0)))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty(shape, granularity):
    q, scale = tkq.quantize_fp8(torch.zeros(shape), granularity)
    assert q.shape == shape and (scale == 2**-126).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_column_of_any_stride(granularity, monkeypatch):
    """A dimension of one element has no stride that says anything: on the way to a kernel neither."""
    x = torch.randn(1, 300).t()
    assert x.stride() == (1, 300)
    found, wanted = tkq.quantize_fp8(x, granularity), tkq.quantize_fp8(x.clone(), granularity)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, wanted))
    monkeypatch.setattr(ops.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(ops.arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(ops, "function", lambda recipe: recipe)
    for strides in ((1, 300), (300, 1)):
        for transpose in (False, True):
            assert ops._runs.__wrapped__(granularity, x.dtype, 300, 1, strides, 0, E4M3, transpose, 0)[0] is not None
    with pytest.raises(ValueError):
        ops._runs.__wrapped__(granularity, x.dtype, 300, 2, (1, 300), 0, E4M3, False, 0)


BAD = (
    (lambda x: ((x.int(),), {}), TypeError, ("x", "int32")),
    (lambda x: (([1],), {}), TypeError, ("x", "list")),
    (lambda x: ((x[0],), {}), ValueError, ("x", "1 dimensions")),
    (lambda x: ((x.t(),), {}), ValueError, ("x", "contiguous")),
    (lambda x: ((x, "column"), {}), ValueError, ("granularity", "column", "128x128")),
    (lambda x: ((x, "row", torch.bfloat16), {}), TypeError, ("dtype", "bfloat16", "float8_e5m2")),
    (lambda x: ((x, ["row"]), {}), TypeError, ("granularity", "['row']", "128x128")),
    *((lambda x, bad=bad: ((x,), dict(transpose=bad)), TypeError, (f"transpose: got {bad!r}", "True and False"))
      for bad in ("yes", None, 1)),
    (lambda x: ((x,), dict(transpose=torch.tensor(True))), TypeError, ("transpose: got a Tensor", "True and False")),
    (lambda x: ((x.requires_grad_(),), {}), NotImplementedError, ("x", "grad")),
)


@pytest.mark.parametrize("make, error, words", BAD)
def test_bad_input_is_named(make, error, words):
    args, kw = make(torch.randn(16, 32))
    with pytest.raises(error) as caught:
        tkq.quantize_fp8(*args, **kw)
    assert all(w in str(caught.value) for w in words), str(caught.value)


@pytest.mark.parametrize("granularity", ("row", "1x128"))
def test_traces(granularity):
    x = torch.randn(37, 272)

    def quantised(x):
        return tkq.quantize_fp8(x, granularity, transpose=True)

    f = torch.compile(quantised, fullgraph=True, backend="eager")
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(f(x), quantised(x)))


def test_which_kernels(monkeypatch):
    """By rows one launch that reads x once, but where columns have scales too, or a row is too long for it."""
    monkeypatch.setattr(ops.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(ops.arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(ops, "function", lambda recipe: (recipe.builder.rpartition(":")[2], *recipe.args[1:]))

    def asked(granularity, n, transpose):
        return ops._runs.__wrapped__(granularity, torch.bfloat16, 64, n, (n, 1), 0, E4M3, transpose, 0)

    assert asked("row", 262144, False)[0][0] == "RowQuantizer" and asked("row", 262144, False)[1:] == (None, False)
    assert asked("row", 262152, False) == (("SeparateLaunches",), 128, False)
    cooperative, ticketed = ("SingleLaunch", True), ("SingleLaunch", False)
    for n, found in ((1, cooperative), (264 * 128, cooperative), (264 * 128 + 1, ticketed), (1 << 20, ticketed)):
        amax = 128 + -(-n // 128) * 128
        assert asked("row", n, True) == (found, amax, True) and asked("tensor", n, True) == (found, 1, True)
    assert asked("1x128", 256, True) == asked("128x128", 256, True) == (("Tilewise",), 0, False)
    assert asked("128x128", 256, False) == (("Tilewise",), 0, False)
    assert asked("1x128", 256, False) == (("Group128",), 0, False)


def test_tiles_of_a_cooperative_launch_are_on_the_gpu_at_once():
    """Twice as many blocks as are launched, by the registers that the tests of machine code allow them."""
    found = [(kernel.recipe.args[0], kernel.expectation.registers) for kernel in shipped()
             if kernel.recipe.args[1:] == (True,)]
    assert {cooperative_tiles(spec) for spec, _ in found} == {1, 2}
    for spec, registers in found:
        assert 2 * cooperative_tiles(spec) * 256 * registers <= 65536, spec


def test_cooperative_tiles_of_narrow_rows_and_of_32_bits():
    """Where a thread needs more than 64 registers there are half as many."""
    for given, most in ((dict(), 2), (dict(x="fp16"), 2), (dict(x="fp32"), 1), (dict(wide=False), 1),
                        (dict(wide_t=False), 1)):
        spec = TileSpec("row", transpose=True, **given)
        assert [way(spec, tiles, 132) for tiles in (132 * most, 132 * most + 1)] == ["cooperative", "ticketed"]


def test_the_workspace_of_a_size(monkeypatch):
    """There is one of each power of two, device and stream; scratch memory of the same size is another."""
    made = []

    def zeros(size, index):
        made.append((size, index))
        return torch.zeros(size)

    monkeypatch.setattr(counters, "_scratch", {})
    monkeypatch.setattr(counters, "_workspaces", {})
    monkeypatch.setattr(counters, "_persistent_zeros", zeros)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    first = counters.workspace(0, 5)
    assert counters.workspace(0, 8) is first
    assert counters.with_scratch(0, 8) is not first and counters.workspace(1, 8) is not first
    assert counters.workspace(0, 9) is not first and made == [(8, 0), (8, 0), (8, 1), (16, 0)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transpose", (False, True, 0, 1, None))
def test_calls_whose_kernels_count_are_remembered_by_stream(granularity, transpose):
    """All that may take a workspace, and no others: a graph's call takes the long way then."""
    ways = {way(TileSpec(granularity, transpose=bool(transpose)), tiles, 132) for tiles in (1, 264, 265, 1 << 20)}
    in_one = {"cooperative", "ticketed"}
    assert ways == in_one if has_workspace(granularity, transpose) else not ways & in_one


@pytest.mark.parametrize("largest", (1, 256, 1280, 40960))
def test_halves_of_a_workspace(largest):
    """As the kernel finds them in a workspace of the host's: in it, behind the tickets, apart, each with space for all
    maxima behind its count, at whole vectors."""
    size = 1 << (workspace.workspace_size(largest) - 1).bit_length()
    first, second = (workspace.first_of(size, number) for number in (0, 1))
    assert first >= 1 and second + workspace.half_of(size) <= size
    for begin, end in ((first, second), (second, size)):
        assert begin + workspace.LINE + largest <= end and (begin + workspace.LINE) % 4 == 0


def test_how_many_maxima_are_found():
    assert [ops._largest_of("row", 130, 40, transpose) for transpose in (False, True)] == [256, 384]
    assert ops._largest_of("tensor", 130, 40, True) == 1


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [37, 48])
def test_rows_that_are_padded_for_the_transpose_alone(granularity, rows):
    """q and scale are of x's rows, qt of a multiple of 16; in the op as beside it, and as tracers are told."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = ops.quantize_padded(x, granularity, torch.float8_e4m3fn, 16)
    wanted = tkq.quantize_fp8(torch.nn.functional.pad(x, (0, 0, 0, -rows % 16)), granularity, transpose=True)
    assert torch.equal(found[0].float(), wanted[0][:rows].float()) and torch.equal(found[2].float(), wanted[2].float())
    of_op = ops._op(x, granularity, torch.float8_e4m3fn, True, 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        told = ops._fake(x, granularity, torch.float8_e4m3fn, True, 16)
    for got, fake in zip(of_op, told, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (fake.shape, fake.stride(), fake.dtype)
    for got, other in zip(of_op[:2], found[:2], strict=True):
        assert torch.equal(got.float(), other.float()) and got.stride() == other.stride()
