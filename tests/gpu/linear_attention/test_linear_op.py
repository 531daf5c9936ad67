"""tkq.linear_attn against the recurrence in float64: results and gradients, beside the same form in plain PyTorch."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_linear_forward import BF16, chunked, make
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

NAMES = "q", "k", "v", "g", "initial_state"


def with_states(given, dtype=torch.float32):
    q, _, v, _ = given
    return *given, torch.randn(len(q), v.shape[2], q.shape[3], v.shape[3], device="cuda").to(dtype)


def results(of, given, gradients):
    """(o, the state, gradients of the tensors among given) by a function's autograd, None for what there is not."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    o, state = of(*leaves)
    wanted = [x for x in leaves if x is not None]
    pairs = [(y, dy.to(y.dtype)) for y, dy in zip((o, state), gradients) if dy is not None]
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs]))
    return [o.detach(), state.detach(), *(None if x is None else next(found) for x in leaves)]


def ours(q, k, v, g, initial):
    return tkq.linear_attn(q, k, v, g, None, initial, True)


def exactly(q, k, v, g, initial):
    return recurrence(q, k, v, g, initial_state=initial)


def check(q, k, v, g, initial=None, of_state=True):
    given = q, k, v, g, initial
    do = torch.randn_like(v)
    dstate = torch.randn(len(q), v.shape[2], q.shape[3], v.shape[3], device="cuda") if of_state else None
    with poisoned():
        found = results(ours, given, (do, dstate))
    want = results(exactly, [None if x is None else x.double() for x in given], (do, dstate))
    peer = results(chunked, given, (do, dstate))
    # tensor cores cut off what they add to a sum of fp32: an ulp for each 16 tokens at most
    tolerance = dict(ulps=1 + q.shape[1] / 16, bias_ulps=1 + q.shape[1] / 16)
    for name, mine, exact, theirs in zip(("o", "state", *NAMES), found, want, peer):
        if exact is not None:
            rows = exact.shape[-1]
            assert_2x(*(x.reshape(-1, rows) for x in (mine, exact, theirs)), what=name,
                      **tolerance if mine.dtype == torch.float32 else {})
    return found


@pytest.mark.parametrize("S", [2, 63, 65, 200])
def test_shared_heads(S):
    check(*make(2, S, 2, 4, 64, 64, "token"), of_state=False)


@pytest.mark.parametrize("K, V, gate, dtype", [
    (64, 64, "token", BF16), (128, 128, "head", BF16), (64, 128, "none", BF16), (64, 64, "token", torch.float16)])
@pytest.mark.sampled(when=lambda K, V: (K, V) == (64, 64))
def test_states(K, V, gate, dtype):
    check(*with_states(make(2, 130, 1, 3, K, V, gate, dtype)))


def test_states_of_16_bits():
    check(*with_states(make(1, 65, 2, 2, 64, 64, "token"), BF16))


@pytest.mark.slow  # those of ssd, of 256, run every day
@pytest.mark.parametrize("V", [144, 256])
def test_more_values_than_a_gradients_launch_takes(V):
    check(*make(1, 100, 1, 2, 64, V, "token"), of_state=False)


def test_no_tokens():
    q, k, v, g, initial = with_states(make(2, 0, 2, 4, 64, 64, "token"))
    initial.requires_grad_()
    o, state = tkq.linear_attn(q, k, v, g, None, initial, True)
    dstate = torch.randn_like(state)
    assert o.shape == v.shape and torch.equal(state, initial)
    torch.testing.assert_close(torch.autograd.grad(state, initial, dstate)[0], dstate)
    assert not tkq.linear_attn(q, k, v, g, output_final_state=True)[1].any()


def test_two_calls_are_one():
    q, k, v, g = make(1, 256, 2, 2, 64, 64, "token")
    o, state = tkq.linear_attn(q, k, v, g, output_final_state=True)
    first, middle = tkq.linear_attn(*(x[:, :128] for x in (q, k, v, g)), output_final_state=True)
    second, last = tkq.linear_attn(*(x[:, 128:] for x in (q, k, v, g)), None, middle, True)
    assert torch.equal(torch.cat((first, second), 1), o) and torch.equal(last, state)


def test_views_are_read_in_place():
    """Slices of a packed tensor, heads before tokens, heads that are one, gates of any strides."""
    packed = torch.randn(2, 100, 4, 192, device="cuda").to(BF16)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) if i == 2 else x
               for i, x in enumerate(packed.split(64, -1)))
    g = -torch.rand(4, 100, 2, device="cuda").permute(2, 1, 0)
    shared = k[:, :, :1].expand(-1, -1, 4, -1)
    assert torch.equal(tkq.linear_attn(q, shared, v, g), tkq.linear_attn(
        *(x.contiguous() for x in (q, shared, v, g))))


def test_gradients_of_odd_strides():
    """Those that come in: expanded, and in rows that TMA does not take."""
    given = [x.requires_grad_() for x in make(1, 65, 2, 2, 64, 64, "token")]
    for do in (torch.ones((), device="cuda", dtype=BF16).expand(1, 65, 2, 64),
               torch.randn(1, 65, 2, 67, device="cuda").to(BF16)[..., 1:65]):
        o = tkq.linear_attn(*given)
        found, want = (torch.autograd.grad(o, given, x, retain_graph=True) for x in (do, do.contiguous()))
        assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("leaf", range(5))
def test_one_gradient_is_that_of_all(leaf):
    """Those of q, v and the state come from operands in one part where g's is not asked for."""
    given = with_states(make(1, 65, 2, 4, 64, 64, "token"))
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[4])
    def gradient(of):
        leaves = [x.detach().requires_grad_(i in of) for i, x in enumerate(given)]
        return torch.autograd.grad(ours(*leaves), leaves[leaf], (do, dstate))[0]
    found, want = gradient({leaf}), gradient(range(5))
    if NAMES[leaf] in ("k", "g"):
        assert torch.equal(found, want)
    else:
        torch.testing.assert_close(found, want, rtol=0, atol=2**-6 * want.abs().max().item())


@pytest.mark.parametrize("used", ["o", "state"])
def test_one_result_is_used(used):
    given = with_states(make(1, 65, 2, 2, 64, 64, "token"))
    leaves = [x.detach().requires_grad_() for x in given]
    o, state = ours(*leaves)
    y, other = (o, state) if used == "o" else (state, o)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy, retain_graph=True, allow_unused=True)
    want = torch.autograd.grad((y, other), leaves, (dy, torch.zeros_like(other)))
    assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_a_scale_of_zero():
    """o is 0, and what comes back from the state is that of any scale."""
    given = with_states(make(1, 65, 2, 2, 64, 64, "token"))
    dstate, found = torch.randn_like(given[4]), []
    for scale in (0.0, 1.0):
        leaves = [x.detach().requires_grad_() for x in given]
        o, state = tkq.linear_attn(*leaves[:4], scale, leaves[4], True)
        found.append(torch.autograd.grad((o, state), leaves, (torch.zeros_like(o), dstate)))
        assert scale or not o.any()
    assert all(torch.equal(a, b) for a, b in zip(*found)) and not found[0][0].any()


def test_the_same_bits():
    given = with_states(make(2, 700, 2, 4, 64, 64, "token"))
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[4])
    first = results(ours, given, (do, dstate))
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(results(ours, given, (do, dstate)), first))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_compiled_in_one_graph_with_opcheck():
    given = [x.requires_grad_() for x in with_states(make(1, 65, 2, 4, 64, 64, "token"))]
    torch.library.opcheck(torch.ops.tkq.linear_attn.default, (*given, None, True, None, False))
    compiled = torch.compile(lambda *x: ours(*x), fullgraph=True)
    dy = [torch.randn_like(y) for y in ours(*given)]
    found, want = (torch.autograd.grad(f(*given), given, dy) for f in (compiled, ours))
    assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_in_a_cuda_graph():
    given = with_states(make(1, 130, 2, 4, 64, 64, "token"))
    do, dstate = torch.randn_like(given[2]), torch.randn_like(given[4])
    def step():
        leaves = [x.detach().requires_grad_() for x in given]
        return torch.autograd.grad(ours(*leaves), leaves, (do, dstate))
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for x in (*given, do, dstate):
        x.copy_(x.flip(0) * 0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, step()))
