"""swiglu and geglu on the GPU: numerics by the 2x rule, forward and backward, every memory layout."""
import math

import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers.process.streams import on_a_side_stream
from tkq.pointwise import gated_ops
from tkq.reference import pointwise as reference
from tkq.testing import assert_2x

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}
HARD = [0.0, -0.0, 1e-30, -1e-4, 1e4, -1e4, 3e38, -3e38, 88.0, -88.0, -104.0, 20.0, -20.0, math.inf, -math.inf,
        math.nan]
CALLS = {"swiglu": tkq.swiglu, "geglu": tkq.geglu,
         "geglu_tanh": lambda gate, up: tkq.geglu(gate, up, approximate="tanh")}


def torch_gated(kind, gate, up):
    return ACTIVATIONS[kind](gate) * up


def torch_gradients(kind, dy, gate, up):
    gate, up = (t.detach().requires_grad_() for t in (gate, up))
    return torch.autograd.grad(torch_gated(kind, gate, up), (gate, up), dy)


def same_precision(f, *tensors):
    """PyTorch with float32 inside and one rounding: what a good kernel at this precision gives."""
    found = f(*(t.float() for t in tensors))
    found = found if isinstance(found, tuple) else (found,)
    return [t.to(tensors[0].dtype) for t in found]


def ulps(x):
    """In float32 the hardware's exp2 and reciprocal show: they are good to 2^-22 and 2^-23."""
    return 2 if x.dtype == torch.float32 else 1


def poisoned(*shape, dtype):
    return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def make(shape, dtype, scale=1.0, seed=0, count=3):
    """gate of the scale; up and dy of 1, or of less where fp16 would overflow."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    gate, *more = (torch.randn(shape, device=DEVICE, generator=g) for _ in range(count))
    small = 0.1 if scale > 1 and dtype == "fp16" else 1.0
    return [(gate * scale).to(DTYPES[dtype]), *((t * small).to(DTYPES[dtype]) for t in more)]


def check_forward(kind, gate, up, packing="apart", what="", config=None):
    """Into an output that is NaN before."""
    inputs = (gate, up) if packing == "apart" else (reference.packed(gate, up, packing), None)
    out = poisoned(*gate.shape, dtype=gate.dtype)
    y = gated_ops._value(*inputs, kind, packing, out, config)
    assert y is out
    assert_2x(y, torch_gated(kind, gate.double(), up.double()),
              *same_precision(lambda g, u: torch_gated(kind, g, u), gate, up), ulps=ulps(gate),
              what=f"{what} forward")
    return y


def check_backward(kind, dy, gate, up, packing="apart", what="", config=None):
    inputs, shape = (gate, up), gate.shape
    out = poisoned(*shape, dtype=gate.dtype), poisoned(*shape, dtype=gate.dtype)
    if packing != "apart":
        inputs = reference.packed(gate, up, packing), None
        out = poisoned(*shape[:-1], 2 * shape[-1], dtype=gate.dtype), None
    found = gated_ops._gradients_on_gpu(dy, *inputs, kind, packing, True, True, out, config)
    assert found[0] is out[0] and found[1] is out[1]
    found = found if packing == "apart" else reference.pair(found[0], None, packing)
    truth = torch_gradients(kind, dy.double(), gate.double(), up.double())
    peer = same_precision(lambda d, g, u: torch_gradients(kind, d, g, u), dy, gate, up)
    for name, mine, true, theirs in zip(("dgate", "dup"), found, truth, peer):
        assert_2x(mine, true, theirs, ulps=ulps(gate), what=f"{what} {name}")
    return found


def check(kind, shape, dtype, scale=1.0, packing="apart", seed=0, what="", config=None):
    gate, up, dy = make(shape, dtype, scale, seed)
    what = f"{what} {kind} {dtype} {shape} scale {scale} {packing}"
    check_forward(kind, gate, up, packing, what, config)
    check_backward(kind, dy, gate, up, packing, what, config)


@pytest.mark.parametrize("kind, dtype", [("swiglu", "bf16"), ("swiglu", "fp32"), ("geglu", "bf16"), ("geglu", "fp32"),
                                         ("geglu_tanh", "fp32")])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4, 8.0])
def test_numerics(kind, dtype, scale):
    for shape in ((64, 1024), (3, 136)):
        check(kind, shape, dtype, scale)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_numerics_of_fp16(scale):
    check("swiglu", (64, 1024), "fp16", scale)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_one_huge_element_a_row(kind):
    gate, up, dy = make((64, 1024), "fp32")
    columns = torch.arange(64, device=DEVICE)
    gate[columns, columns * 16 + 5] = 1e4
    up[columns, columns * 16 + 7] = -1e4
    check_forward(kind, gate, up)
    check_backward(kind, dy, gate, up)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_infinities_and_nan_come_out_as_from_torch(kind):
    """The truth in float64; not where gelu's tanh form is NaN for its x^2, at 3e38, nor where a gate so small that it
    counts as 0 meets an infinite up."""
    gate = torch.tensor([[*HARD, *HARD, 0.0, 1.0, -1.0, 20.0] * 2], device=DEVICE)
    up = torch.tensor([[1.0] * 16 + [-0.5] * 16 + [math.inf] * 4 + [0.0] * 16 + [1e4] * 16 + [math.nan] * 4],
                      device=DEVICE)
    wide = gate.double(), up.double()
    y, want = CALLS[kind](gate, up), torch_gated(kind, *wide).float()
    assert torch.equal(torch.isnan(y), torch.isnan(want))
    assert torch.equal(y[torch.isinf(want)], want[torch.isinf(want)])
    found = gated_ops._gradients_on_gpu(torch.ones_like(up), gate, up, kind, "apart", True, True)
    looked_at = (gate.abs() != 3e38) if kind == "geglu_tanh" else torch.ones_like(gate, dtype=torch.bool)
    for mine, theirs in zip(found, torch_gradients(kind, torch.ones_like(wide[0]), *wide)):
        assert torch.equal(torch.isnan(mine)[looked_at], torch.isnan(theirs)[looked_at])


def test_a_nan_stays_where_it_is():
    gate, up, dy = make((40, 1000), "bf16")
    clean, clean_dy = tkq.swiglu(gate, up), check_backward("swiglu", dy, gate, up)
    gate[3, 500], up[7, 999] = math.nan, math.nan
    y = tkq.swiglu(gate, up)
    found = gated_ops._gradients_on_gpu(dy, gate, up, "swiglu", "apart", True, True)
    for mine, before in ((y, clean), *zip(found, clean_dy)):
        numbers = ~torch.isnan(mine)
        assert int((~numbers).sum()) in (1, 2) and torch.equal(mine[numbers], before[numbers])


@pytest.mark.parametrize("N", [1, 2, 3, 4, 7, 8, 12, 63, 64, 65, 1000, 1023, 1025, 4098, 11008])
def test_any_number_of_columns(N):
    for M in (1, 5, 37):
        check("swiglu", (M, N), "bf16", what=f"M {M}")


@pytest.mark.parametrize("packing", ["split", "interleaved"])
@pytest.mark.parametrize("N", [1, 33, 64, 1000, 5632])
@pytest.mark.sampled(each_value=True)
def test_one_tensor(packing, N):
    check("swiglu", (19, N), "bf16", packing=packing)


def test_one_tensor_of_fp32():
    check("swiglu", (19, 516), "fp32", packing="interleaved")


@pytest.mark.parametrize("N, room, first", [
    (1024, 1032, 0), (1024, 1032, 8), (1024, 1026, 1), (1000, 1010, 4), (7, 16, 1)])
def test_rows_with_a_stride_are_read_in_place(N, room, first):
    """Around the views there is NaN: a read too far shows."""
    gate, up, dy = make((21, N), "bf16")
    views = []
    for t in (gate, up, dy):
        wide = poisoned(21, room, dtype=torch.bfloat16)
        views.append(wide[:, first:first + N].copy_(t))
    y = check_forward("swiglu", *views[:2])
    check_backward("swiglu", views[2], *views[:2])
    assert torch.equal(tkq.swiglu(*views[:2]), y)
    packed = poisoned(21, 2 * room, dtype=torch.bfloat16)[:, 2 * first:2 * first + 2 * N]
    packed.copy_(torch.cat((gate, up), 1))
    assert torch.equal(tkq.swiglu(packed), y)
    assert torch.equal(tkq.swiglu(packed[:, :N], packed[:, N:]), y)


def test_pairs_that_begin_in_the_middle():
    gate, up, _ = make((21, 64), "bf16")
    wide = poisoned(21, 129 + 2, dtype=torch.bfloat16)
    view = wide[:, 1:129].copy_(reference.packed(gate, up, "interleaved"))
    assert torch.equal(tkq.swiglu(view, layout="interleaved"), tkq.swiglu(gate, up))


def test_leading_dimensions():
    gate, up, dy = make((4, 6, 5, 64), "bf16")
    want = tkq.swiglu(gate.reshape(-1, 64), up.reshape(-1, 64)).view(gate.shape)
    assert torch.equal(tkq.swiglu(gate, up), want)
    assert torch.equal(tkq.swiglu(gate[0], up[0]), want[0])
    assert torch.equal(tkq.swiglu(gate[0, 0, 0], up[0, 0, 0]), want[0, 0, 0])
    permuted = [t.permute(2, 0, 1, 3) for t in (gate, up)]
    y = tkq.swiglu(*permuted)
    assert torch.equal(y, want.permute(2, 0, 1, 3)) and y.is_contiguous()
    swapped = [t[0].transpose(0, 1) for t in (gate, up)]  # three dimensions: without a copy
    y = tkq.swiglu(*swapped)
    assert torch.equal(y, want[0].transpose(0, 1)) and y.is_contiguous()
    assert torch.equal(tkq.swiglu(gate[0, :1].expand(6, 5, 64), up[0]),
                       tkq.swiglu(gate[0, :1].expand(6, 5, 64).contiguous(), up[0]))
    check_backward("swiglu", dy[0].transpose(0, 1), *swapped)


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128), (0, 5, 7), (3, 0)])
def test_no_elements(shape):
    gate = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = tkq.swiglu(gate, gate)
    assert y.shape == gate.shape and y.dtype == gate.dtype
    y.sum().backward()
    assert gate.grad.shape == gate.shape


def test_nothing_is_written_outside_the_output():
    for M, N in ((5, 4096), (130, 104), (9, 8)):
        gate, up, dy = make((M, N), "bf16")
        whole = [poisoned(M + 6, N, dtype=torch.bfloat16) for _ in range(3)]
        y, dgate, dup = (t[3:M + 3] for t in whole)
        gated_ops._value(gate, up, "swiglu", "apart", y)
        gated_ops._gradients_on_gpu(dy, gate, up, "swiglu", "apart", True, True, (dgate, dup))
        for t in whole:
            assert torch.isfinite(t[3:M + 3]).all()
            assert torch.isnan(t[:3]).all() and torch.isnan(t[M + 3:]).all()


def test_the_variants_that_tuning_may_choose():
    from tkq.pointwise.plan import GatedConfig

    check("swiglu", (37, 1000), "bf16", config=GatedConfig(256, 8))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_autograd(needs):
    gate, up, dy = make((3, 40, 256), "bf16")
    want = gated_ops._gradients_on_gpu(dy, gate, up, "swiglu", "apart", True, True)
    gate, up = (t.requires_grad_(need) for t, need in zip((gate, up), needs))
    y = tkq.swiglu(gate, up)
    y.backward(dy)
    for t, need, true in zip((gate, up), needs, want):
        assert (t.grad is not None) == need
        assert not need or torch.equal(t.grad, true)


def test_gradients_of_any_strides():
    gate, up, _ = (t.requires_grad_() for t in make((32, 48), "bf16"))
    y = tkq.swiglu(gate, up)
    for dy in (torch.ones((), device=DEVICE, dtype=torch.bfloat16).expand(32, 48),
               torch.randn(48, 32, device=DEVICE).bfloat16().t(),
               torch.randn(32, 50, device=DEVICE).bfloat16()[:, 1:49]):
        got = torch.autograd.grad(y, (gate, up), dy, retain_graph=True)
        want = gated_ops._gradients_on_gpu(dy.contiguous(), gate, up, "swiglu", "apart", True, True)
        assert all(map(torch.equal, got, want))


@pytest.mark.slow  # test_every_op.py compiles each function every day
@pytest.mark.parametrize("packing", ["apart", "split"])
def test_compiled(packing):
    gate, up, dy = make((64, 256), "bf16")
    inputs = (gate, up) if packing == "apart" else (torch.cat((gate, up), 1),)
    inputs = [t.detach().requires_grad_() for t in inputs]
    call = torch.compile(lambda *t: tkq.swiglu(*[x * 2 for x in t]), fullgraph=True)
    got = call(*inputs)
    want = tkq.swiglu(*[x * 2 for x in inputs])
    assert torch.equal(got, want)
    mine, theirs = (torch.autograd.grad(y, inputs, dy) for y in (got, want))
    for a, b in zip(mine, theirs):
        assert_2x(a, b.double(), b, ulps=2)


def test_the_torch_op():
    gate, up, dy = make((9, 256), "bf16")
    torch.library.opcheck(torch.ops.tkq.gated, (gate.requires_grad_(), up.requires_grad_(), "swiglu", "apart"),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch.library.opcheck(torch.ops.tkq.gated_backward, (dy, gate.detach(), up.detach(), "swiglu", "apart", True, True),
                          test_utils=("test_schema", "test_faketensor"))


def test_bad_input_launches_nothing():
    gate, up, _ = make((4, 64), "bf16")
    tkq.swiglu(gate, up)
    cases = [(ValueError, "up: is on cpu", (gate, up.cpu())), (TypeError, "gate: dtype is", (gate.double(), up)),
             (TypeError, "up is torch.float32", (gate, up.float())), (ValueError, "up: shape is", (gate, up[:, :32])),
             (ValueError, "up: shape is", (gate, up[:2])), (ValueError, "gate: strides are", (gate.t(), up.t())),
             (ValueError, "up: shape is", (gate, up.view(2, 2, 64))), (TypeError, "gate: got list", ([1.0], up))]
    for error, says, args in cases:
        for _ in range(2):  # a refused call leaves nothing behind that would let the next one through
            with pytest.raises(error, match=says):
                tkq.swiglu(*args)


def test_on_a_side_stream_and_in_a_graph():
    gate, up, _ = make((512, 4096), "bf16")
    want = tkq.swiglu(gate, up)
    assert torch.equal(on_a_side_stream(lambda late: tkq.swiglu(late, up), gate), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tkq.swiglu(gate, up)
    gate.copy_(gate.flip(0))
    y.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, tkq.swiglu(gate, up))


def test_an_eager_call_is_one_launch():
    from torch.profiler import ProfilerActivity, profile

    gate, up, dy = (t.requires_grad_() for t in make((256, 1024), "bf16"))
    y = tkq.swiglu(gate, up)
    torch.autograd.grad(y, (gate, up), dy, retain_graph=True)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        y = tkq.swiglu(gate, up)
        torch.autograd.grad(y, (gate, up), dy)
        torch.cuda.synchronize()
    kernels = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2, [e.name for e in kernels]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("packing", ["apart", "split"])
def test_more_than_2_31_elements(packing):
    M, N = (1 << 31) // 4096 + 5, 4096
    x = torch.empty(M, N if packing == "apart" else 2 * N, device=DEVICE, dtype=torch.bfloat16)
    x.view(torch.int16).fill_(0x3F80)  # ones everywhere, but in the rows that are looked at
    rows = torch.tensor([0, 1, (1 << 30) // N, M // 2 + 1, M - 6, M - 2, M - 1], device=DEVICE)
    sample = make((len(rows), x.shape[1]), "bf16", count=1)[0]
    x[rows] = sample
    inputs, small = ((x, x), (sample, sample)) if packing == "apart" else ((x, None), (sample, None))
    y = gated_ops._value(*inputs, "swiglu", packing, poisoned(M, N, dtype=torch.bfloat16))
    assert torch.equal(y[rows], gated_ops._value(*small, "swiglu", packing))
    assert not torch.isnan(y[:: M // 1000]).any() and not torch.isnan(y[-100:]).any()
    one = tkq.swiglu(torch.ones(1, 8, device=DEVICE).bfloat16(), torch.ones(1, 8, device=DEVICE).bfloat16())[0, 0]
    assert y[M // 3, N // 2] == one and y[M - 3, N - 1] == one


@pytest.mark.slow
def test_more_vectors_than_one_launch_counts():
    """Single elements, 2^31 of them and more: two launches."""
    M, N = (1 << 31) // 4095 + 3, 4095  # odd, and an odd number of rows: nothing can be joined
    M += 1 - M % 2
    x = torch.ones(M, N, device=DEVICE, dtype=torch.float16)
    y = gated_ops._value(x, x, "swiglu", "apart", poisoned(M, N, dtype=torch.float16))
    assert not torch.isnan(y).any() and bool((y == y[0, 0]).all())


@pytest.mark.slow
def test_the_same_bits_every_time():
    gate, up, dy = make((777, 4104), "bf16")
    once = tkq.swiglu(gate, up), *gated_ops._gradients_on_gpu(dy, gate, up, "swiglu", "apart", True, True)
    for _ in range(20):
        again = tkq.swiglu(gate, up), *gated_ops._gradients_on_gpu(dy, gate, up, "swiglu", "apart", True, True)
        assert all(map(torch.equal, once, again))
