"""The options of tkq.gated_delta_rule as layers call it, against float64 from the first step on."""
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.gpu.linear_attention.test_delta_forward import chunked
from tests.helpers import delta_layers
from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops.every_op import Maker
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x

BF16 = torch.bfloat16


def make(S=130, K=64, V=128, dtype=BF16):
    return delta_layers.tensors(Maker("cuda", S, 0, dtype), K, V)


def by_torch(q, k, v, g, beta, A_log, dt_bias):
    """What the options make of q, k, g and beta, in plain PyTorch in float32: (q, k, v, g, beta)."""
    q, k = ((x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) for x in (q, k))
    return q, k, v, -A_log.float().exp() * F.softplus(g.float() + dt_bias.float()), 2 * beta


@pytest.mark.parametrize("S", [1, 65, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.sampled(when=lambda S, dtype: (S == 65) == (dtype == torch.float16))
def test_results(S, dtype):
    given = make(S, dtype=dtype)
    with poisoned():
        o, state = delta_layers.call(**given, output_final_state=True)
    want, last = delta_layers.exact(**given)
    peer, peer_state = chunked(*by_torch(**given), None)
    assert_2x(o, want, peer, what="o")
    assert_2x(state.flatten(0, 2), last.flatten(0, 2), peer_state.flatten(0, 2), what="final state")


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_lengths_of_keys(scale):
    """Near the eps, and where squares would leave fp16."""
    given = make(dtype=torch.float16)
    given |= {name: given[name] * scale for name in ("q", "k")}
    with poisoned():
        o = delta_layers.call(**given)
    assert_2x(o, delta_layers.exact(**given)[0], chunked(*by_torch(**given), None)[0], what="o")


def test_gradients():
    given = make()
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    do = torch.randn_like(given["v"])
    with poisoned():
        mine = torch.autograd.grad(delta_layers.call(**leaves), list(leaves.values()), do)
    peer = torch.autograd.grad(tkq.gated_delta_rule(*by_torch(**leaves)), list(leaves.values()), do)
    exact = torch.autograd.grad(delta_layers.exact(**wide)[0], list(wide.values()), do.double())
    for name, a, b, c in zip(leaves, mine, exact, peer):
        assert a.dtype == leaves[name].dtype
        error, theirs = ((x.double() - b).norm() / b.norm() for x in (a, c))
        assert error <= 1.1 * theirs + 2**-9, (name, error, theirs)


def test_the_same_bits():
    given = {name: x.requires_grad_() for name, x in make(300).items()}
    do = torch.randn_like(given["v"])
    def run():
        o = delta_layers.call(**given)
        return o, *torch.autograd.grad(o, list(given.values()), do)
    first = run()
    for _ in range(3):
        assert all(map(torch.equal, run(), first))


def test_in_a_cuda_graph():
    """Also what is made anew in each call: the norm's weight."""
    given = make()
    delta_layers.call(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = delta_layers.call(**given)
    for x in given.values():
        x.copy_(x.flip(0) * 0.5)
    graph.replay()
    assert torch.equal(found, delta_layers.call(**given))


def test_compiled():
    checks.compiles_once(delta_layers.CASE, "cuda", sizes=checks.ROWS[:2])
