"""tkq.gated_delta_rule against the recurrence in float64, beside the same form in plain PyTorch."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_delta_forward import chunked
from tests.gpu.linear_attention.test_linear_forward import BF16, make
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x


def with_beta(given, dtype=torch.float32):
    v = given[2]
    return *given, torch.rand(v.shape[:3], device="cuda").to(dtype)


def check(q, k, v, g, beta, initial=None, scale=None):
    o, state = tkq.gated_delta_rule(q, k, v, g, beta, scale, initial, True)
    want, last = recurrence(*(x.double() for x in (q, k, v)), g, scale, initial, beta=beta)
    peer, peer_state = chunked(q, k, v, g, beta, initial)
    if scale is not None:
        peer = (peer.float() * scale * q.shape[-1]**0.5).to(peer.dtype)
    assert_2x(o, want, peer, what="o")
    assert_2x(state.flatten(0, 2), last.flatten(0, 2), peer_state.flatten(0, 2), what="final state")
    return o, state


@pytest.mark.parametrize("gate", ["none", "token"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.sampled(when=lambda gate, dtype: (gate == "token") == (dtype == BF16))
def test_types(gate, dtype):
    check(*with_beta(make(2, 130, 2, 4, 64, 128, gate, dtype)), scale=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(BF16, marks=pytest.mark.slow)])
def test_two_calls_are_one(dtype):
    given = with_beta(make(1, 256, 2, 2, 64, 64, "token"), dtype)
    o, state = check(*given)
    first, middle = tkq.gated_delta_rule(*(x[:, :128] for x in given), output_final_state=True)
    second, last = tkq.gated_delta_rule(*(x[:, 128:] for x in given), None, middle, True)
    assert torch.equal(torch.cat((first, second), 1), o) and torch.equal(last, state)


def test_views_are_read_in_place():
    """Slices of a packed tensor, heads that are one, beta and gates of any strides, a state of another order."""
    packed = torch.nn.functional.normalize(torch.randn(2, 100, 4, 192, device="cuda"), dim=-1).to(BF16)
    q, k, v = packed.split(64, -1)
    g, beta = (torch.rand(4, 100, 2, device="cuda").permute(2, 1, 0) for _ in range(2))
    k = k[:, :, :1].expand(-1, -1, 4, -1)
    given = q, k, v, -g, beta, None, torch.randn(2, 4, 64, 64, device="cuda").mT
    assert torch.equal(tkq.gated_delta_rule(*given), tkq.gated_delta_rule(
        *(x if x is None else x.contiguous() for x in given)))


def test_nothing_behind_the_end_counts():
    """NaN in the rows behind each tensor's own."""
    given = with_beta(make(1, 100, 2, 2, 64, 64, "token"))
    def behind(x):
        wide = torch.full((1, 200, *x.shape[2:]), torch.nan, device="cuda", dtype=x.dtype)
        wide[:, :100] = x
        return wide[:, :100]
    found = tkq.gated_delta_rule(*given, output_final_state=True)
    again = tkq.gated_delta_rule(*map(behind, given), output_final_state=True)
    assert all(map(torch.equal, found, again))


def test_no_tokens():
    q, k, v, g, beta = with_beta(make(2, 0, 2, 4, 64, 64, "token"))
    initial = torch.randn(2, 4, 64, 64, device="cuda")
    o, state = tkq.gated_delta_rule(q, k, v, g, beta, None, initial, True)
    assert o.shape == v.shape and torch.equal(state, initial)


def test_replayed_calls_are_launched_ones():
    given = with_beta(make(2, 70, 2, 4, 64, 64, "token"))
    found = [tkq.gated_delta_rule(*given, output_final_state=True) for _ in range(4)]
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0]))


def test_in_a_cuda_graph():
    given = with_beta(make(1, 130, 2, 4, 64, 64, "token"))
    tkq.gated_delta_rule(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tkq.gated_delta_rule(*given)
    for x in given:
        x.copy_(x.flip(1) * 0.5)
    graph.replay()
    assert torch.equal(found, tkq.gated_delta_rule(*given))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_compiled_in_one_graph_with_opcheck():
    given = with_beta(make(1, 65, 2, 4, 64, 64, "token"))
    torch.library.opcheck(torch.ops.tkq.gated_delta_rule.default, (*given, None, None, True, None, False))
    compiled = torch.compile(lambda *x: tkq.gated_delta_rule(*x, output_final_state=True), fullgraph=True)
    assert all(map(torch.equal, compiled(*given), tkq.gated_delta_rule(*given, output_final_state=True)))
