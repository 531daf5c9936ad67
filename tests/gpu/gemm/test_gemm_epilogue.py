"""gemm's epilogues and batches on a GPU: exact where sums are, otherwise against float64 beside PyTorch."""
import itertools
import math

import pytest
import torch

import tkq
from examples.write_an_epilogue import causal, squared_relu
from tests.gpu.gemm.test_gemm import POISON, whole
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq import reference
from tkq.gemm.dense import launch
from tkq.gemm.dense.config import Config
from tkq.gemm.dense.launch import Extra
from tkq.reference.dense import activate
from tkq.testing import assert_2x

BF16 = torch.bfloat16
SHAPES = ((700, 1032, 512), (129, 264, 72), (300, 520, 8), (2100, 2056, 200))  # few and many tiles, short and long K
ODD = ((129, 257, 72), (300, 1001, 136))  # a result that TMA does not write


def operands(m, n, k, b_major="k", batch=(), seed=0):
    """Whole numbers, whose sums are exact, between NaN; or, in a batch, without them."""
    if not batch:
        return whole(m, k, BF16, "r", seed=seed), whole(k, n, BF16, "c" if b_major == "k" else "r", seed=seed + 1)
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = (*batch, m, k), (*batch, n, k) if b_major == "k" else (*batch, k, n)
    a, b = (torch.randint(-4, 5, s, device="cuda", generator=g).to(BF16) for s in shapes)
    return a, b.mT if b_major == "k" else b


def vector(n, dtype=BF16, seed=7):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-9, 10, (n,), device="cuda", generator=g).to(dtype)


def matrix(*shape, dtype=BF16, seed=8):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-9, 10, shape, device="cuda", generator=g).to(dtype)


def exact(a, b, out_dtype=BF16, **extra):
    return reference.gemm(a.double(), b.double(), out_dtype, **extra)


def between_poison(a, b, config=None, first=8, out_dtype=BF16, **extra):
    """Run into a view between poisoned rows and columns; everything outside it must stay."""
    shape = launch.shape_of(a, b, extra.get("activation", ""))
    buffer = torch.full((*shape[:-2], shape[-2] + 2, first + -(-shape[-1] // 8) * 8 + 8), POISON, dtype=out_dtype,
                        device="cuda")
    view = buffer[..., 1:-1, first:first + shape[-1]]
    launch.run(a, b, view, config, extra=Extra(**extra))
    got = view.clone()
    view.fill_(POISON)
    assert (buffer == POISON).all(), "written outside the result"
    return got


CONFIGS = {None: None, "in the gap": Config(), "overlap_epilogue": Config(overlap_epilogue=1, pdl=True),
           "alone": Config(cluster=1),
           "small": Config(m=64, n=128, stages=8, cluster=1)}


@pytest.mark.parametrize("name", CONFIGS)
def test_linear_forms_are_exact(name):
    for m, n, k in SHAPES[::3] if name is None else SHAPES:
        a, b = operands(m, n, k)
        bias, c = vector(n), matrix(m, n)
        forms = [dict(c=c, beta=-2.0, alpha=0.5, bias=bias), dict(bias=bias, activation="relu"), dict(c=c, beta=1.0)]
        for extra in forms if name is None else forms[:1]:
            got = between_poison(a, b, CONFIGS[name], **extra)
            assert torch.equal(got, exact(a, b, **extra)), (name, m, n, k, sorted(extra))


@pytest.mark.parametrize("out_dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("bias_dtype", (torch.float16, torch.float32))
@pytest.mark.sampled(when=lambda out_dtype, bias_dtype: out_dtype != bias_dtype)
def test_other_types(out_dtype, bias_dtype):
    for m, n, k in (*SHAPES[:2], *ODD):
        a, b = operands(m, n, k)
        extra = dict(bias=vector(n, bias_dtype), c=matrix(m, n, dtype=out_dtype), beta=2.0)
        got = between_poison(a, b, out_dtype=out_dtype, first=3 if n % 8 else 8, **extra)
        assert torch.equal(got, exact(a, b, out_dtype, **extra))


def test_c_of_any_stride():
    m, n, k = 300, 520, 136
    a, b = operands(m, n, k)
    wide = matrix(m, 2 * n + 3)
    for c in (wide[:, :n], wide[:, 1:n + 1], wide[:, 2:n + 2], wide[:1, :n].expand(m, n), matrix(m + 1, n)[1:]):
        assert torch.equal(between_poison(a, b, c=c, beta=1.0), exact(a, b, c=c, beta=1.0)), c.stride()
    for m, n, k in ODD:
        a, b = operands(m, n, k)
        c = matrix(m, n)
        assert torch.equal(between_poison(a, b, first=3, c=c, beta=1.0), exact(a, b, c=c, beta=1.0))


SMOOTH = ("silu", "gelu", "gelu_tanh")
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_interleaved", "geglu_interleaved")
LATE = {True: Config(overlap_epilogue=1, defer_activation=True), False: Config(),
        **{i: Config(overlap_epilogue=i, defer_activation=True) for i in (2, 4)}}


def check_activation(a, b, config, activation, out_dtype=BF16, **extra):
    """The 2x rule beside the activation of PyTorch's rounded product."""
    first = 8 if launch.shape_of(a, b, activation)[-1] % 8 == 0 else 3
    got = between_poison(a, b, config, first, out_dtype, activation=activation, **extra)
    truth = exact(a, b, torch.float64, activation=activation, **extra)
    product = exact(a, b, out_dtype, **extra)
    assert_2x(got, truth, activate(product.float(), activation).to(out_dtype), 2, f"{activation} {tuple(a.shape)}")


@pytest.mark.parametrize("activation, defer_activation",
                         (("silu", True), ("gelu", 2), ("geglu_interleaved", 4), ("silu", False),
                                              ("swiglu", False)))
def test_activations(activation, defer_activation):
    for m, n, k in SHAPES:
        a, b = operands(m, n, k)
        check_activation(a / 8, b / 4, LATE[defer_activation], activation, bias=vector(n) / 4)


@pytest.mark.parametrize("activation", (*SMOOTH, *GATED))
@pytest.mark.sampled(when=lambda activation: activation in ("gelu", "gelu_tanh", "geglu_tanh", "swiglu_interleaved"))
def test_activations_as_planned(activation):
    a, b = operands(700, 1040, 256)
    check_activation(a / 8, b / 4, None, activation, alpha=0.5, bias=vector(1040, torch.float32) / 4)
    if activation in ("gelu", "swiglu"):
        check_activation(a / 8, b / 4, None, activation, torch.float32)


@pytest.mark.parametrize("activation", (pytest.param("gelu", marks=pytest.mark.slow), "swiglu", "geglu_interleaved"))
def test_by_elements(activation):
    """b by rows and every other column, halves of 12 columns, odd addresses."""
    for n in (24, 1040, 258):
        a, b = operands(129, n, 72, "n")
        check_activation(a / 8, b / 4, None, activation, bias=vector(n) / 4)
    a, b = whole(129, 72, BF16, "r", first=3, pad=2), whole(72, 130, BF16, "r", first=3, pad=2, seed=1)
    check_activation(a / 8, b / 4, None, activation)


def test_c_and_an_activation():
    for m, n, k in (SHAPES[0], SHAPES[3], ODD[0]):
        a, b = operands(m, n, k)
        check_activation(a / 8, b / 4, None, "silu", c=matrix(m, n), beta=0.25, bias=vector(n))


@pytest.mark.parametrize("activation, defer_activation",
                         (("silu", True), ("gelu", True), *(
                             pytest.param(*each, marks=pytest.mark.slow) for each in (
                                 ("gelu_tanh", True), ("gelu", False)))))
def test_hard_values(activation, defer_activation):
    """Large ones, infinities and NaN come out as from PyTorch; gelu of -inf is its limit."""
    x = torch.linspace(-40, 40, 256).tolist()
    x[:5] = math.inf, -math.inf, math.nan, 3e38, -3e38
    a, b = (torch.zeros(256, 8, device="cuda", dtype=BF16) for _ in range(2))
    a[:, 0], b[:, 0] = torch.tensor(x), 1
    out = torch.empty(256, 256, device="cuda", dtype=BF16)
    launch.run(a, b.t(), out, LATE[defer_activation], extra=Extra(activation=activation))
    want = activate(a[:, :1].double(), activation)
    if activation in ("gelu", "gelu_tanh"):
        want[1] = 0
    want = want.expand(256, 256)
    nan, infinite = torch.isnan(want), torch.isinf(want)
    assert torch.equal(torch.isnan(out), nan) and torch.equal(out.double()[infinite], want[infinite])
    rest = ~(nan | infinite)
    assert torch.allclose(out.double()[rest], want[rest], rtol=0.01, atol=1e-3)


def test_a_function_of_ones_own():
    a, b = operands(700, 1032, 256)
    z = exact(a / 8, b / 4, torch.float64)
    got = tkq.gemm(a / 8, b / 4, activation=squared_relu)
    assert_2x(got, z.clamp(min=0) ** 2, (z.to(BF16).clamp(min=0) ** 2), 4, "squared relu")
    got = tkq.gemm(a, b, activation=causal)
    assert torch.equal(got, exact(a, b).tril())
    few = tkq.gemm(a[:33], b, activation=causal)
    assert torch.equal(few, exact(a[:33], b).tril())
    with poisoned():
        assert not tkq.gemm(a[:, :0], b[:0], activation=causal).any()  # K = 0: it runs on sums of nothing


# ---- batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b_major", "kn")
def test_batches(b_major):
    for batch, (m, n, k) in itertools.product(((1,), (5,)), (*SHAPES[:3], *ODD)):
        a, b = operands(m, n, k, b_major, batch)
        assert torch.equal(between_poison(a, b, first=3 if n % 8 else 8), exact(a, b)), (batch, m, n, k)
    a, b = operands(64, 136, 72, b_major, (300,))
    assert torch.equal(tkq.gemm(a, b), exact(a, b))
    with torch.no_grad():
        assert tkq.gemm(a[:0], b[:0]).shape == (0, 64, 136)


def test_batches_that_share():
    a, b = operands(300, 520, 136, "k", (3,))
    for x, y in ((a[:1].expand(3, -1, -1), b), (a, b[:1].expand(3, -1, -1)),
                 (a[:1].expand(3, -1, -1), b[:1].expand(3, -1, -1)), (a.mT.contiguous().mT, b), (a[::2], b[::2]),
                 (a[:, 1:], b), (a[..., 8:72], b[:, 8:72])):
        assert torch.equal(tkq.gemm(x, y), exact(x, y)), (x.stride(), y.stride())


def test_batches_with_epilogues():
    a, b = operands(300, 528, 136, "k", (3,))
    bias, c = vector(528), matrix(3, 300, 528)
    assert torch.equal(between_poison(a, b, bias=bias, c=c, beta=2.0), exact(a, b, bias=bias, c=c, beta=2.0))
    shared = b[:1].expand(3, -1, -1)
    check_activation(a / 8, shared / 4, None, "swiglu", bias=bias / 4)
    check_activation(a / 8, b / 4, None, "silu")
    check_activation(a / 8, b.contiguous() / 4, None, "geglu_interleaved")


# ---- out, repeats, graphs -------------------------------------------------------------------------------------


def test_out():
    a, b = operands(300, 520, 136)
    c = matrix(300, 520)
    want = exact(a, b, c=c, beta=1.0)
    assert tkq.gemm(a, b, c=c, beta=1.0, out=c) is c and torch.equal(c, want)
    wide = torch.zeros(300, 1024, device="cuda", dtype=BF16)
    with pytest.raises(ValueError, match="shares memory with a"):
        tkq.gemm(wide[:, :136], b, out=wide[:, 128:648])
    wide[:, :136] = a
    assert torch.equal(tkq.gemm(wide[:, :136], b, out=wide[:, 136:656]), exact(a, b))
    with pytest.raises(ValueError, match="out"):
        tkq.gemm(a, b, out=c[1:])
    empty = torch.full((5, 7), math.nan, device="cuda", dtype=BF16)
    assert torch.equal(tkq.gemm(a[:5, :0], b[:0, :7], bias=vector(7), out=empty), vector(7).expand(5, 7))


def test_out_again():
    """Replayed calls: to other memory, over c, not over a; autograd knows of it."""
    a, b = operands(300, 520, 136)
    total = matrix(300, 520)
    for _ in range(3):
        out = torch.full((302, 536), POISON, device="cuda", dtype=BF16)
        want = torch.full_like(out, POISON)
        want[1:-1, 8:-8] = exact(a, b)
        tkq.gemm(a, b, out=out[1:-1, 8:-8])
        assert torch.equal(out, want)
        want = exact(a, b, c=total, beta=1.0)
        assert tkq.gemm(a, b, c=total, beta=1.0, out=total) is total and torch.equal(total, want)
    rows, square = torch.zeros(700, 520, device="cuda", dtype=BF16), torch.ones(520, 520, device="cuda", dtype=BF16).t()
    for first in (300, 350, 400):
        rows[first:] = POISON
        tkq.gemm(rows[:300], square, out=rows[first:first + 300])
        assert not rows[:first + 300].any() and (rows[first + 300:] == POISON).all()
    with pytest.raises(ValueError, match="shares memory with a"):
        tkq.gemm(rows[:300], square, out=rows[299:599])
    saved = torch.ones(300, 520, device="cuda", dtype=BF16, requires_grad=True)
    y = (saved * total).sum()
    with torch.no_grad():
        tkq.gemm(a, b, c=total, beta=1.0, out=total)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("activation", (None, "gelu", "swiglu"))
def test_repeats_and_graphs(activation):
    a, b = (torch.randn(s, device="cuda").to(BF16) for s in ((2100, 512), (2048, 512)))
    bias = torch.randn(2048, device="cuda")
    once = tkq.gemm(a, b.t(), bias=bias, activation=activation)
    assert all(torch.equal(once, tkq.gemm(a, b.t(), bias=bias, activation=activation)) for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tkq.gemm(a, b.t(), bias=bias, activation=activation)
    y.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, once)


def test_a_tile_that_is_one_subtile():
    """Of a gated tile of 128 columns 64 are left: two tiles in a row write through the same shared memory, and with
    one step of K to a tile hardly anything but the writing takes time."""
    m, n, k = 65536, 128, 64
    a, b = (matrix(*shape, seed=seed) / 32 for shape, seed in (((m, k), 1), ((n, k), 2)))
    want = between_poison(a, b.T, Config(m=64, n=256, cluster=1), activation="swiglu")
    for _ in range(10):
        assert torch.equal(between_poison(a, b.T, Config(n=128, stages=6), activation="swiglu"), want)
