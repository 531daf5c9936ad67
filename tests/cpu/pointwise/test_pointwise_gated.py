"""swiglu and geglu where no GPU is needed: what they mean, their gradients, what they refuse, what a call launches."""
import math

import pytest
import torch
import torch.nn.functional as F

import tkq
from tkq.pointwise import gated_ops
from tkq.pointwise.spec import KINDS, WIDTH
from tkq.reference import pointwise as reference
from tkq.testing import assert_2x

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CALLS = {"swiglu": tkq.swiglu, "geglu": tkq.geglu,
         "geglu_tanh": lambda *args, **more: tkq.geglu(*args, approximate="tanh", **more)}
ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}
HARD = [0.0, -0.0, 1e-30, -1e-4, 1e4, -1e4, 3e38, -3e38, 88.0, -88.0, -104.0, 20.0, -20.0, math.inf, -math.inf,
        math.nan]


def torch_gated(kind, gate, up):
    return ACTIVATIONS[kind](gate) * up


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (5, 1), (3, 33), (2, 3, 128), (0, 16), (2, 0, 16), (3, 0)])
def test_cpu_tensors_take_the_reference(kind, dtype, shape):
    torch.manual_seed(0)
    gate, up = (torch.randn(shape).to(dtype) for _ in range(2))
    y = CALLS[kind](gate, up)
    assert y.shape == gate.shape and y.dtype == dtype and y.is_contiguous()
    assert_2x(y, torch_gated(kind, gate.double(), up.double()), torch_gated(kind, gate, up), ulps=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinities_and_nan_come_out_as_from_torch(kind, dtype):
    gate = torch.tensor(HARD, dtype=dtype)
    mine = reference.gated(kind, gate, torch.ones_like(gate))
    theirs = torch_gated(kind, gate.double(), 1.0)  # in float32 on a CPU, torch's gelu(inf) is NaN
    assert torch.equal(torch.isnan(mine), torch.isnan(theirs))
    assert torch.equal(mine[torch.isinf(theirs)], theirs[torch.isinf(theirs)].to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", ["apart", "split", "interleaved"])
def test_gradients_are_torch_s_in_float64(kind, packing):
    torch.manual_seed(1)
    gate, up, dy = (torch.randn(6, 10, dtype=torch.float64, requires_grad=True) for _ in range(3))
    gate.data[0, :5], gate.data[1, :4] = torch.tensor([0.0, 30.0, -30.0, 100.0, -100.0]), 1e-3
    want = torch.autograd.grad(torch_gated(kind, gate, up), (gate, up), dy)
    inputs = (gate, up) if packing == "apart" else (reference.packed(gate, up, packing), None)
    got = reference.gated_backward(kind, dy, *inputs, packing)
    if packing != "apart":
        assert got[1] is None
        got = reference.pair(got[0], None, packing)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_one_tensor_is_two(kind, layout):
    x = torch.randn(4, 5, 24)
    gate, up = reference.pair(x, None, layout)
    torch.testing.assert_close(CALLS[kind](x, layout=layout), CALLS[kind](gate.contiguous(), up.contiguous()))
    assert torch.equal(reference.packed(gate, up, layout), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_autograd(kind, compiled, needs):
    """Eager through autograd.Function, compiled through the custom op; a gradient strided as only autograd makes it."""
    torch.manual_seed(2)
    gate, up = (torch.randn(3, 4, 16).requires_grad_(need) for need in needs)
    call = CALLS[kind]
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    wanted = [t for t in (gate, up) if t.requires_grad]
    for loss in (lambda y: y.sum(), lambda y: (y.transpose(0, 2) * torch.arange(16.0)[:, None, None]).sum()):
        want = torch.autograd.grad(loss(torch_gated(kind, gate, up)), wanted)
        got = torch.autograd.grad(loss(call(gate, up)), wanted)
        for mine, theirs in zip(got, want):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["split", "interleaved"])
@pytest.mark.parametrize("compiled", [False, True])
def test_autograd_of_one_tensor(layout, compiled):
    x = torch.randn(3, 4, 32, requires_grad=True)

    def call(x):
        return tkq.swiglu(x, layout=layout)

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    want, = torch.autograd.grad(torch_gated("swiglu", *reference.pair(x, None, layout)).sum(), x)
    got, = torch.autograd.grad(run(x).sum(), x)
    assert got.shape == x.shape
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_refused():
    gate, up = (torch.randn(2, 8, requires_grad=True) for _ in range(2))
    dgate, = torch.autograd.grad(tkq.swiglu(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError):
        dgate.sum().backward()


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_the_backward_computes_what_is_needed(needs):
    dy, gate, up = (torch.randn(2, 8) for _ in range(3))
    got = gated_ops.gated_backward(dy, gate, up, "swiglu", "apart", *needs)
    assert tuple(t is not None for t in got) == needs


@pytest.mark.parametrize("error, says, call", [
    (TypeError, "gate: got str", lambda: tkq.swiglu("x", torch.ones(2))),
    (TypeError, "up: got int", lambda: tkq.swiglu(torch.ones(2), 1)),
    (TypeError, "gate: dtype is torch.float64", lambda: tkq.swiglu(torch.ones(2).double(), torch.ones(2))),
    (TypeError, "up is torch.float16, gate is torch.float32", lambda: tkq.geglu(torch.ones(2), torch.ones(2).half())),
    (ValueError, r"gate: got shape \(\)", lambda: tkq.swiglu(torch.tensor(1.0), torch.tensor(1.0))),
    (ValueError, r"up: shape is \(3, 2\), expected \(2, 3\)", lambda: tkq.swiglu(torch.ones(2, 3), torch.ones(3, 2))),
    (ValueError, "up: shape is", lambda: tkq.swiglu(torch.ones(2, 3, 4), torch.ones(6, 4))),
    (ValueError, "gate: strides are", lambda: tkq.swiglu(torch.ones(4, 2).t(), torch.ones(2, 4))),
    (ValueError, "up: strides are", lambda: tkq.swiglu(torch.ones(2, 4), torch.ones(4, 2).t())),
    (ValueError, "up: is on meta", lambda: tkq.swiglu(torch.ones(2), torch.ones(2, device="meta"))),
    (ValueError, "last dimension must be even", lambda: tkq.swiglu(torch.ones(2, 5))),
    (ValueError, "layout: got 'rows'", lambda: tkq.swiglu(torch.ones(2, 4), layout="rows")),
    (ValueError, "layout: got 'apart'", lambda: tkq.swiglu(torch.ones(2, 4), layout="apart")),
    (ValueError, "approximate: got 'erf'", lambda: tkq.geglu(torch.ones(2), torch.ones(2), approximate="erf")),
    (TypeError, r"approximate: got \['tanh'\]", lambda: tkq.geglu(torch.ones(2, 4), approximate=["tanh"]))])
def test_bad_input_is_named(error, says, call):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (16,), (0, 16)])
def test_opcheck(kind, shape):
    gate, up = (torch.randn(shape, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.tkq.gated, (gate, up, kind, "apart"))
    torch.library.opcheck(torch.ops.tkq.gated, (gate, None, kind, "interleaved"))
    plain = gate.detach(), up.detach()
    for needs in ((True, True), (False, True)):
        torch.library.opcheck(torch.ops.tkq.gated_backward, (plain[0], *plain, kind, "apart", *needs))


def test_the_fake_has_the_strides_of_the_result():
    x = torch.randn(5, 4, 64).transpose(0, 1)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.tkq.gated(mode.from_tensor(x), None, "swiglu", "split")
    real = tkq.swiglu(x)
    assert fake.shape == real.shape and fake.stride() == real.stride() and fake.dtype == real.dtype


# ---- what a call launches: the compiled function is replaced by a note ----------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """[(spec, arguments)] of what the launch path would run, on CPU tensors."""
    seen = []
    monkeypatch.setattr(gated_ops.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(gated_ops, "_launchers", {})
    monkeypatch.setattr(gated_ops, "_launch_cache", {})
    monkeypatch.setattr(gated_ops.runtime, "function",
                        lambda recipe: lambda *args: seen.append((recipe.args[0], args)))
    return seen


def rows_of(tensors):
    return [None if t is None else tuple(t.shape) for t in tensors]


@pytest.mark.parametrize("dtype, make, vector", [
    ("bf16", lambda z: (z(4, 64), z(4, 64)), 8), ("fp32", lambda z: (z(4, 64), z(4, 64)), 4),
    ("bf16", lambda z: (z(5, 60), z(5, 60)), 4), ("bf16", lambda z: (z(5, 63), z(5, 63)), 1),
    ("bf16", lambda z: (z(4, 128)[:, :64], z(4, 128)[:, 64:]), 8), ("fp16", lambda z: (z(4, 70)[:, :64], z(4, 64)), 2),
    ("bf16", lambda z: (z(4, 72)[:, 1:65], z(4, 64)), 1), ("bf16", lambda z: (z(4, 64), z(4, 72)[:, 4:68]), 4),
    ("bf16", lambda z: (z(3, 4, 64), z(4, 3, 64).transpose(0, 1)), 8),
    ("bf16", lambda z: (z(1, 64).expand(5, 64), z(5, 64)), 8)])
def test_the_access_fits_every_address(launches, dtype, make, vector):
    torch_type = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    gate, up = make(lambda *shape: torch.zeros(shape, dtype=torch_type))
    out = gated_ops._value(gate, up, "swiglu", "apart")
    (spec, args), = launches
    assert (spec.dtype, spec.vector, spec.rank) == (dtype, vector, gate.dim())
    assert args[0] is gate and args[1] is up and args[3] is out
    assert all(t.data_ptr() % (vector * t.element_size()) == 0 for t in (args[0], args[1], args[3]))


@pytest.mark.parametrize("packing, N2, first, vector", [
    ("split", 128, 0, 8), ("split", 24, 0, 4), ("split", 6, 0, 1), ("split", 128, 2, 2),
    ("interleaved", 128, 0, 4), ("interleaved", 24, 0, 4), ("interleaved", 6, 0, 1), ("interleaved", 128, 4, 2)])
def test_the_access_of_one_tensor(launches, packing, N2, first, vector):
    x = torch.zeros(5, 136).bfloat16()[:, first:first + N2]
    out = gated_ops._value(x, None, "geglu", packing)
    (spec, args), = launches
    assert spec.vector == vector and args[0] is x and out.shape == (5, N2 // 2)


def test_pairs_that_begin_in_the_middle_are_copied_first(launches):
    x = torch.arange(5 * 20).view(5, 20).bfloat16()[:, 1:17]
    gated_ops._value(x, None, "swiglu", "interleaved")
    (spec, args), = launches
    assert spec.vector == 4 and torch.equal(args[0], x) and args[0].is_contiguous()


def test_rows_of_odd_length_are_joined(launches):
    gate, up = torch.zeros(16, 63).bfloat16(), torch.zeros(16, 63).bfloat16()
    out = gated_ops._value(gate, up, "swiglu", "apart")
    dy = torch.zeros(4, 2, 63).float()
    gated_ops._gradients_on_gpu(dy, dy + 1, dy + 2, "swiglu", "apart", True, True)
    (spec, args), (backward, more) = launches
    assert spec.vector == 8 and rows_of(args) == [(2, 504), (2, 504), None, (2, 504), None]
    assert args[3].data_ptr() == out.data_ptr()
    assert backward.vector == 4 and rows_of(more) == [(2, 252)] * 5


def test_many_leading_dimensions_become_rows(launches):
    gate = torch.zeros(2, 3, 4, 5, 16)
    out = gated_ops._value(gate, gate, "swiglu", "apart")
    assert rows_of(launches[0][1]) == [(120, 16), (120, 16), None, (120, 16), None] and out.shape == gate.shape
    gated_ops._value(torch.zeros(16), torch.zeros(16), "swiglu", "apart")
    assert rows_of(launches[1][1])[0] == (1, 16)


def test_nothing_to_do_launches_nothing(launches):
    for shape in ((0, 16), (4, 0), (2, 0, 16), (0,)):
        for _ in range(2):
            assert gated_ops._value(torch.zeros(shape), torch.zeros(shape), "swiglu", "apart").shape == shape
    assert launches == []


def test_very_many_elements_are_several_launches(launches, monkeypatch):
    monkeypatch.setattr(gated_ops, "MAX_UNITS", 100)
    x = torch.arange(77 * 14.0).view(7, 11, 14)
    out = gated_ops._value(x, x + 1, "swiglu", "apart")
    assert launches[0][0].vector == 2 and len(launches) > 1
    assert torch.equal(torch.cat([args[0] for _, args in launches]), x.view(77, 14))
    assert torch.equal(torch.cat([args[1] for _, args in launches]), x.view(77, 14) + 1)
    assert all(args[0].numel() // 2 <= 100 for _, args in launches)
    assert launches[-1][1][3].data_ptr() + launches[-1][1][3].numel() * 4 == out.data_ptr() + out.numel() * 4


@pytest.mark.parametrize("needs, wanted", [((True, True), "both"), ((True, False), "gate"), ((False, True), "up")])
def test_the_backward_s_launch(launches, needs, wanted):
    gate, up = torch.zeros(4, 64), torch.zeros(4, 64)
    for dy in (torch.ones(4, 64), torch.ones(()).expand(4, 64), torch.ones(64, 4).t()):
        dgate, dup = gated_ops._gradients_on_gpu(dy, gate, up, "geglu", "apart", *needs)
        spec, args = launches.pop()
        assert spec.gradients == wanted and args[2].stride(1) == 1 and args[2].shape == dy.shape
        assert (args[3] is dgate, args[4] is dup) == (True, True)
        assert (dgate is not None, dup is not None) == needs
    x = torch.zeros(4, 128)
    dx, none = gated_ops._gradients_on_gpu(dy, x, None, "geglu", "split", True, False)
    spec, args = launches.pop()
    assert spec.gradients == "both" and spec.packing == "split" and dx.shape == x.shape and none is None


def test_a_refused_call_leaves_nothing_behind(launches):
    good, bad = torch.zeros(4, 64), torch.zeros(4, 64).double()
    for _ in range(2):
        with pytest.raises(TypeError, match="gate: dtype"):
            gated_ops._value(bad, bad, "swiglu", "apart")
        with pytest.raises(ValueError, match="layout: got 'rows'"):
            gated_ops._value(good, None, "swiglu", "rows")
    assert launches == []


def test_recipes_say_everything():
    from tkq.pointwise.spec import GatedSpec

    specs = [GatedSpec(kind, dtype, packing, 1, gradients, rank) for kind in KINDS for dtype in WIDTH
             for packing in ("apart", "split") for gradients in (None, "both") for rank in (2, 3)]
    assert len({repr(gated_ops.recipe(spec)) for spec in specs}) == len(specs)


def test_a_layout_of_one_tensor_is_refused_with_two():
    x = torch.randn(4, 8)
    for gated in (tkq.swiglu, tkq.geglu, tkq.nn.SwiGLU("interleaved"), tkq.nn.GEGLU(layout="interleaved")):
        more = {} if isinstance(gated, torch.nn.Module) else dict(layout="interleaved")
        with pytest.raises(ValueError, match="layout is 'interleaved', which is of gate and up in one tensor"):
            gated(x, x, **more)
