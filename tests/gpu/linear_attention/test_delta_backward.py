"""Gradients of tkq.gated_delta_rule against the reference's in float64, beside the same launches in plain PyTorch,
rounded as the kernels round.

A call's gradients are of four launches, each a kernel for each gate, size, dtype and kind of states. All but three
tests have one set, K = V = 64 with gates of tokens and states that come in and go out: lengths, hard data, options,
graphs and traces do not change kernels. The others: no gate; a width with a rest of a tile, V in two parts, beta of
bf16 and no states; fp16. Launches of further widths, and more of inverses that are hard, are in test_delta_launches."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_delta_op import with_beta
from tests.gpu.linear_attention.test_linear_forward import BF16, make
from tests.helpers.linear_launches import launched
from tests.helpers.one_sign import bias_of_one_sign
from tkq.linear_attention.delta import gradients as delta_gradients
from tkq.linear_attention.delta.gradients import DeltaSaved
from tkq.reference.linear_attention import gated_delta_rule_backward
from tkq.testing import assert_2x

NAMES = "q", "k", "v", "g", "beta", "initial_state"


def with_state(given, dtype=torch.float32):
    q, _, v, *_ = given
    return *given, torch.randn(len(q), v.shape[2], q.shape[3], v.shape[3], device="cuda").to(dtype)


def gradients(given, do, dstate, scale=None):
    """By autograd through the op; None for what there is not."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    o, state = tkq.gated_delta_rule(*leaves[:5], scale, leaves[5], True)
    pairs = [(y, dy) for y, dy in ((o, do), (state, dstate)) if dy is not None]
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs]))
    return [None if x is None else next(found) for x in leaves]


def check(monkeypatch, *given, of_state=True, scale=None):
    q, _, v, *_ = given = given if len(given) == 6 else (*given, None)
    do = torch.randn_like(v)
    dstate = torch.randn(len(q), v.shape[2], q.shape[3], v.shape[3], device="cuda") if of_state else None
    found = gradients(given, do, dstate, scale)
    wide = [None if x is None else x.double() for x in (do, dstate, *given)]
    want = gated_delta_rule_backward(*wide, scale)
    with monkeypatch.context() as m:
        m.setattr(delta_gradients, "launch", launched)
        peer = delta_gradients.backward(DeltaSaved(*given), q.shape[3]**-0.5 if scale is None else scale, do, dstate)
    # tensor cores cut off what they add to a sum of fp32: an ulp for each 16 tokens at most
    room = 1 + q.shape[1] / 16
    for name, mine, exact, other in zip(NAMES, found, want, peer):
        assert (mine is None) == (exact is None)
        if exact is not None:
            # an error of u or du, of 16 bits, is in the gradients of all tokens before it: they may have one sign
            bias = bias_of_one_sign(exact, other, room)
            assert_2x(*(x.reshape(-1, exact.shape[-1]) for x in (mine, exact, other)), what=name,
                      **dict(ulps=room, bias_ulps=bias) if mine.dtype == torch.float32 else {})
    return found


@pytest.mark.parametrize("gate, lengths", [
    pytest.param("none", (65,), marks=pytest.mark.slow),  # every day those of test_fla_on_gpu.py
    ("token", (1, 63, 64, 65, 300))])
def test_lengths(monkeypatch, gate, lengths):
    for S in lengths:
        check(monkeypatch, *with_state(with_beta(make(2, S, 2, 4, 64, 64, gate))))


@pytest.mark.parametrize("heads, K, V", [(2, 128, 128), (1, 80, 160)])
@pytest.mark.slow  # its launches are everyday's, test_delta_launches.py
def test_heads_that_share_wide_keys(monkeypatch, heads, K, V):
    """Launches add up neighbours; of four that share, and of two parts of the values."""
    check(monkeypatch, *with_state(with_beta(make(2, 300, heads, 4, K, V, "token"))))


@pytest.mark.slow
def test_widths(monkeypatch):
    check(monkeypatch, *with_beta(make(1, 130, 1, 2, 96, 256, "token"), BF16), of_state=False)


@pytest.mark.slow  # of packed sequences it is everyday's, test_packed.py
def test_fp16(monkeypatch):
    check(monkeypatch, *with_state(with_beta(make(1, 130, 1, 2, 64, 64, "token", torch.float16))))


@pytest.mark.parametrize("keys, beta, decay", [
    ("random", 0.0, 0.1), ("random", 1.0, 20.0), ("identical", 1.0, 0.1), ("identical", 2.0, 0.1),
    ("identical", 2.0, 20.0)])
def test_hard_inverses(monkeypatch, keys, beta, decay):
    q, k, v, g = make(1, 256, 2, 2, 64, 64, "token", decay=decay)
    k = k[:, :1].expand_as(k).contiguous() if keys == "identical" else k
    check(monkeypatch, *with_state((q, k, v, g, torch.full((1, 256, 2), beta, device="cuda"))))


def test_a_reset(monkeypatch):
    q, k, v, g, beta = with_beta(make(1, 300, 2, 2, 64, 64, "token"))
    g[:, ::37] = -60.0
    check(monkeypatch, *with_state((q, k, v, g, beta)))


def test_a_negative_scale(monkeypatch):
    check(monkeypatch, *with_state(with_beta(make(1, 130, 1, 2, 64, 64, "token"))), scale=-2.0)


def test_a_scale_of_zero():
    """o is 0, and what comes back from the state is that of any scale."""
    given = with_state(with_beta(make(1, 65, 2, 2, 64, 64, "token")))
    dstate = torch.randn_like(given[5])
    found = [gradients(given, torch.zeros_like(given[2]), dstate, scale) for scale in (0.0, 1.0)]
    assert all(torch.equal(a, b) for a, b in zip(*found)) and not found[0][0].any()


def test_no_tokens():
    given = with_state(with_beta(make(2, 0, 2, 4, 64, 64, "token")))
    dstate = torch.randn_like(given[5])
    *_, of_state = gradients(given, torch.zeros_like(given[2]), dstate)
    torch.testing.assert_close(of_state, dstate)


def test_one_gradient_is_that_of_all():
    """dq and dk come from operands in one part where g's is not asked for."""
    given = with_state(with_beta(make(1, 65, 2, 4, 64, 64, "token")))
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[5])
    want = dict(zip(NAMES, gradients(given, do, dstate)))
    for leaf, name in enumerate(NAMES):
        leaves = [x.detach().requires_grad_(i == leaf) for i, x in enumerate(given)]
        results = tkq.gated_delta_rule(*leaves[:5], None, leaves[5], True)
        found, = torch.autograd.grad(results, [leaves[leaf]], (do, dstate))
        if name in ("q", "k"):
            torch.testing.assert_close(found, want[name], rtol=0, atol=2**-6 * want[name].abs().max().item())
        else:
            assert torch.equal(found, want[name]), name


def test_the_state_alone_is_used():
    given = with_state(with_beta(make(1, 65, 2, 2, 64, 64, "token")))
    dstate = torch.randn_like(given[5])
    leaves = [x.detach().requires_grad_() for x in given]
    found = torch.autograd.grad(tkq.gated_delta_rule(*leaves[:5], None, leaves[5], True)[1], leaves, dstate)
    assert all(map(torch.equal, found, gradients(given, torch.zeros_like(given[2]), dstate)))


def test_the_same_bits():
    given = with_state(with_beta(make(2, 700, 2, 4, 64, 64, "token")))
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[5])
    first = gradients(given, do, dstate)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(gradients(given, do, dstate), first))


def test_the_same_bits_of_many_heads():
    """More clusters than are resident: outputs of two heads follow each other as fast as they can."""
    given = with_beta(make(8, 2048, 16, 32, 128, 128, "token"))
    do = torch.randn_like(given[2])
    first = gradients((*given, None), do, None)
    for _ in range(8):
        again = gradients((*given, None), do, None)
        assert all(torch.equal(a, b) for a, b in zip(again[:5], first))


def test_in_a_cuda_graph():
    given = with_state(with_beta(make(1, 130, 2, 4, 64, 64, "token")))
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[5])
    gradients(given, do, dstate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(given, do, dstate)
    for x in (*given, do, dstate):
        x.copy_(x.flip(1) * 0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(given, do, dstate)))


@pytest.mark.slow  # test_packed.py does the same of packed sequences every day
def test_compiled_in_one_graph():
    given = [x.requires_grad_() for x in with_state(with_beta(make(1, 65, 2, 4, 64, 64, "token")))]
    ours = lambda *x: tkq.gated_delta_rule(*x[:5], None, x[5], True)
    compiled, dy = torch.compile(ours, fullgraph=True), [torch.randn_like(y) for y in ours(*given)]
    found, want = (torch.autograd.grad(f(*given), given, dy) for f in (compiled, ours))
    assert all(torch.equal(a, b) for a, b in zip(found, want))
