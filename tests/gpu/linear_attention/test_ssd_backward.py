"""Gradients of tkq.mamba2_ssd against the reference's in float64, beside the same launches in plain PyTorch, rounded as
the kernels round, with sums in float64."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_ssd_forward import BF16, F32, make, ours, wide
from tests.helpers.linear_launches import launched
from tests.helpers.one_sign import bias_of_one_sign
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.split import concurrent
from tkq.linear_attention.ssd import gradients as ssd_gradients
from tkq.linear_attention.ssd.gradients import SsdGradients
from tkq.linear_attention.suffix.launch import suffix_sums
from tkq.reference.ssd import mamba2_ssd_backward
from tkq.testing import assert_2x

NAMES = SsdGradients._fields
OF_TWO_PARTS = 2.0**8  # 2^-16, in units of the last place of fp32


def incoming(given, of_state=True):
    B, _, H, P = given.x.shape
    B = B if given.cu is None else len(given.cu) - 1
    return torch.randn_like(given.x), torch.randn(B, H, P, given.B.shape[3], device="cuda") if of_state else None


def gradients(given, dy, dstates):
    """By autograd through the op; None for what there is not."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given[:9]]
    results = ours(given._replace(**dict(zip(given._fields, leaves))))
    pairs = [(y, d) for y, d in zip(results, (dy, dstates)) if d is not None]
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [d for _, d in pairs]))
    return [None if x is None else next(found) for x in leaves]


def sums(x, less, end, cu):
    """`suffix_sums` by torch, in float64."""
    return suffix_sums(*(None if y is None else y.double() for y in (x, less, end)), cu).float()


def check(monkeypatch, given, of_state=True):
    dy, dstates = incoming(given, of_state)
    with poisoned():
        found = gradients(given, dy, dstates)
    want = mamba2_ssd_backward(dy.double(), None if dstates is None else dstates.double(), *wide(given))
    with monkeypatch.context() as m:
        m.setattr(ssd_gradients, "launch", launched)
        m.setattr(concurrent, "_worth", lambda given: None)  # one after the other
        m.setattr(ssd_gradients, "_by_launch", lambda dots: False)
        m.setattr(ssd_gradients, "suffix_sums", sums)
        peer = ssd_gradients.backward(given, dy, dstates)
    # tensor cores cut off what they add to a sum of fp32: an ulp for each 16 tokens at most, and for each 16 columns
    room = 1 + (given.x.shape[1] + given.x.shape[3] + given.B.shape[3]) / 16
    for name, mine, exact, other in zip(NAMES, found, want, peer):
        assert (mine is None) == (exact is None), name
        if exact is not None:
            # what rounding does to a token is in the sums of all tokens before it: they may have one sign. Those that
            # gates' gradients are differences of have operands in two parts, of 16 bits: a few such roundings decide,
            # of long sequences and in what is added up of all tokens as many as there are
            S = given.dt.shape[1]
            # a token's has part in sums of those behind it: of longer sequences as many times more as of 300
            tokens = given.dt.shape[0] * S if exact.dim() == 1 else max(1, S / 300)
            ulps = max(room, OF_TWO_PARTS * tokens**0.5) if name in ("dt", "A", "dt_bias") else room
            assert_2x(*(x.reshape(-1, exact.shape[-1]) for x in (mine, exact, other)), what=name,
                      **dict(ulps=ulps, bias_ulps=bias_of_one_sign(exact, other, ulps)) if mine.dtype == F32 else {})
    return found


@pytest.mark.parametrize("S", [1, 63, 64, 65, 300])
def test_lengths(monkeypatch, S):
    check(monkeypatch, make(2, S, of_dt=F32, without=("z",)))


@pytest.mark.parametrize("S, dtype, sizes", [(1000, BF16, {}), (200, torch.float16, {}), (130, BF16, dict(G=4)),
                                             (130, torch.float16, dict(N=64))])
def test_outputs_by_token_rows(monkeypatch, S, dtype, sizes):
    """Of many chunks; of heads that share B and C, or have their own."""
    check(monkeypatch, make(2, S, dtype, of_dt=F32, D_dims=2, without=("z",), **sizes))


def test_a_long_sequence(monkeypatch):
    """Of which a segment of sums has several tiles."""
    check(monkeypatch, make(1, 16500, H=2, G=1, N=64, of_dt=F32, without=("z", "D")), of_state=False)


@pytest.mark.parametrize("D_dims", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_packed_sequences(monkeypatch, D_dims):
    """NaN in tokens before the first one and behind the last one, and in what comes in for them."""
    given = make(1, 350, of_dt=F32, N=64, without=("z",) if D_dims == 2 else (), D_dims=D_dims)
    cu = torch.tensor((9, 9, 10, 73, 137, 137, 202, 340), device="cuda", dtype=torch.int32)
    initial = torch.randn(7, 4, 64, 64, device="cuda")
    for x in given[:9]:
        if x is not None and x.shape[:2] == (1, 350):
            x[:, :9] = x[:, 340:] = torch.nan
    found = check(monkeypatch, given._replace(cu=cu, initial=initial))
    for x in found:
        assert x is None or x.shape[:2] != (1, 350) or not (x[:, :9].any() or x[:, 340:].any())


@pytest.mark.slow  # `test_steps_as_they_are` is without most of it, other tests each have some
@pytest.mark.parametrize("without", [("initial",), ("D", "dt_bias", "initial"), ()])
@pytest.mark.parametrize("D_dims", [1, 2])
def test_what_there_is(monkeypatch, without, D_dims):
    check(monkeypatch, make(1, 130, without=without, D_dims=D_dims), of_state=not without)


@pytest.mark.parametrize("P, N, dtype", [(32, 32, BF16), (64, 64, torch.float16), (128, 128, BF16), (80, 96, BF16),
                                         (144, 64, BF16), (256, 128, BF16)])
@pytest.mark.sampled(when=lambda P: P == 256)
def test_widths(monkeypatch, P, N, dtype):
    check(monkeypatch, make(1, 130, dtype, P=P, N=N, D_dims=2, without=("z",)))


@pytest.mark.parametrize("G", [1, 8])
def test_many_heads_of_few_groups(monkeypatch, G):
    check(monkeypatch, make(1, 100, H=80, G=G, N=64, without=("z", "initial")), of_state=False)


@pytest.mark.parametrize("bias", [-20.0, 0.0, 3.0, 8.0])
def test_steps(monkeypatch, bias):
    check(monkeypatch, make(1, 130, of_dt=F32, bias=bias, without=("z",)), of_state=bias <= 0.0)


@pytest.mark.parametrize("bias", [-2.0, 3.0])
def test_gradients_of_steps_are_not_rounding(bias):
    """Where little is left of a token in the next, too: what it has from itself is in no difference."""
    given = make(1, 130, of_dt=F32, bias=bias, N=64)
    dy, _ = incoming(given, False)
    found, want = gradients(given, dy, None), mamba2_ssd_backward(dy.double(), None, *wide(given))
    for name, mine, exact in zip(NAMES, found, want):
        if name in ("dt", "A", "dt_bias"):
            assert (mine.double() - exact).norm() < 2**-8 * exact.norm(), name


def test_resets(monkeypatch):
    """A step of 40 is in the sums of all tokens before it, with what rounding did to it: by gradients of 16 bits."""
    given = make(1, 300, N=64, without=("z",))
    given.dt[:, ::37] = 40.0
    check(monkeypatch, given)


def test_steps_as_they_are(monkeypatch):
    """Without softplus, bias and D; of every third token 0."""
    given = make(1, 200, of_dt=F32, without=("D", "dt_bias", "z"))
    given.dt.abs_()
    given.dt[:, ::3] = 0.0
    check(monkeypatch, given._replace(softplus=False))


@pytest.mark.parametrize("softplus", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_limits(monkeypatch, softplus):
    """A step that is cut off has no gradient."""
    given = make(1, 130, of_dt=F32, bias=-1.0, N=64)._replace(limit=(0.2, 0.8), softplus=softplus)
    of_dt = check(monkeypatch, given, of_state=False)[1]
    assert 0.1 < (of_dt == 0).float().mean() < 0.95


@pytest.mark.slow  # the layer of test_mixer_layers_on_gpu.py has them every day
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_parameters_of_16_bits(monkeypatch, dtype):
    """In bf16, of x, B and C of the other type, too."""
    given = make(1, 100, dtype, N=64, without=("z",))
    check(monkeypatch, given._replace(D=given.D.to(BF16), dt_bias=given.dt_bias.to(BF16),
                                      initial=given.initial.to(BF16)))


@pytest.mark.parametrize("leaf", range(9))
@pytest.mark.sampled(when=lambda leaf: leaf in (0, 8))
def test_one_gradient_is_that_of_all(leaf):
    """Those of x, C and the states come from operands in one part where dt's is not asked for."""
    given = make(1, 65, without=())
    dy, dstates = incoming(given)
    leaves = [x.detach().requires_grad_(i == leaf) for i, x in enumerate(given[:9])]
    found, = torch.autograd.grad(ours(given._replace(**dict(zip(given._fields, leaves)))), [leaves[leaf]],
                                 (dy, dstates))
    want = gradients(given, dy, dstates)[leaf]
    if NAMES[leaf] in ("x", "C", "initial"):
        torch.testing.assert_close(found, want, rtol=0, atol=2**-6 * want.abs().max().item())
    else:
        assert torch.equal(found, want)


@pytest.mark.parametrize("used", ["y", "states"])
def test_one_result_is_used(used):
    given = make(1, 65, of_dt=F32, without=("z",))
    dy, dstates = incoming(given)
    leaves = [None if x is None else x.detach().requires_grad_() for x in given[:9]]
    results = ours(given._replace(**dict(zip(given._fields, leaves))))
    y, d = (results[0], dy) if used == "y" else (results[1], dstates)
    wanted = [x for x in leaves if x is not None]
    found = torch.autograd.grad(y, wanted, d)
    want = [x for x in gradients(given, dy * (used == "y"), dstates * (used == "states")) if x is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_gradients_of_odd_strides():
    """Those that come in: expanded, and in rows that TMA does not take."""
    given = make(1, 65, of_dt=F32, without=("z",), P=64)
    for dy in (torch.ones((), device="cuda", dtype=BF16).expand(1, 65, 4, 64),
               torch.randn(1, 65, 4, 67, device="cuda").to(BF16)[..., 1:65]):
        found, want = (gradients(given, x, None) for x in (dy, dy.contiguous()))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, want))


def test_no_tokens():
    given = make(2, 0, without=("z",))
    dy, dstates = incoming(given)
    *found, of_states = gradients(given, dy, dstates)
    assert torch.equal(of_states, dstates) and not any(x.any() for x in found if x is not None)


def test_the_same_bits():
    given = make(2, 700, without=())
    dy, dstates = incoming(given)
    first = gradients(given, dy, dstates)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(gradients(given, dy, dstates), first))


def test_in_a_cuda_graph():
    given = make(1, 130, without=())
    dy, dstates = incoming(given)
    gradients(given, dy, dstates)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(given, dy, dstates)
    for x in (given.x, given.dt, given.B, given.C, given.z, dy):
        x.copy_(x.flip(1))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(given, dy, dstates)))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_compiled_in_one_graph():
    given = make(1, 65, without=())
    leaves = [x.requires_grad_() for x in given[:9]]
    f = lambda *x: tkq.mamba2_ssd(*x, dt_softplus=True, return_final_states=True)
    compiled, dy = torch.compile(f, fullgraph=True), [torch.randn_like(y) for y in f(*leaves)]
    found, want = (torch.autograd.grad(g(*leaves), leaves, dy) for g in (compiled, f))
    assert all(torch.equal(a, b) for a, b in zip(found, want))
