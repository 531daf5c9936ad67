"""tkq.nn.GatedDeltaNet on a GPU against float64; and the hybrid model of examples/hybrid_train.py."""
import pathlib
import sys

import pytest
import torch

import tkq.nn
from tests.helpers import delta_layers
from tests.helpers.sanitizer.nan_fill import poisoned

sys.path.append(str(pathlib.Path(__file__).parents[3] / "examples"))
BF16 = torch.bfloat16


def make(dtype=BF16, **options):
    torch.manual_seed(0)
    return tkq.nn.GatedDeltaNet(256, num_heads=2, num_v_heads=4, head_dim=64, head_v_dim=128, device="cuda",
                                **options).to(dtype)


def tokens(S=200):
    return torch.randn(2, S, 256, device="cuda").to(BF16)


def error(found, want):
    return ((found.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("options", [{}, dict(allow_neg_eigval=True, use_gate=False)], ids=str)
def test_results_and_gradients(options):
    layer, x = make(**options), tokens().requires_grad_()
    wide = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    with poisoned():
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
    want = delta_layers.layer_exact(layer, wide_x, wide)
    want.backward(dy.double())
    assert error(y, want) < 0.02 and error(x.grad, wide_x.grad) < 0.05
    for name, p in layer.named_parameters():
        assert error(p.grad, wide[name].grad) < 0.05, name


@pytest.mark.parametrize("cuts", [(64, 128), (1, 2, 100)])
def test_chained_calls_are_one(cuts):
    layer, x = make(), tokens()
    with torch.no_grad():
        want, last = layer(x, output_cache=True)
        found, cache = [], None
        for part in x.tensor_split(cuts, 1):
            y, cache = layer(part, cache, output_cache=True)
            found.append(y)
    assert error(torch.cat(found, 1), want.double()) < 0.02
    assert error(cache.state, last.state.double()) < 0.02
    assert all(error(a, b.double()) < 0.01 for a, b in zip(cache.conv, last.conv))


def test_compiled():
    layer, x = make(), tokens()
    torch._dynamo.reset()
    with torch.no_grad():
        found, want = torch.compile(layer, fullgraph=True)(x), layer(x)
    assert error(found, want.double()) < 0.02


def test_a_step_in_a_cuda_graph():
    """One token, the cache in tensors that the graph reads and writes."""
    layer, x = make(), tokens(8)
    with torch.no_grad():
        _, cache = layer(x[:, :4], output_cache=True)
        held, one = [t.clone() for t in (*cache.conv, cache.state)], x[:, 4:5].clone()

        def step():
            y, new = layer(one, type(cache)(tuple(held[:3]), held[3]), output_cache=True)
            for old, t in zip(held, (*new.conv, new.state)):
                old.copy_(t)
            return y

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for old, t in zip(held, (*cache.conv, cache.state)):
            old.copy_(t)
        want = layer(x)
        for i in range(4, 8):
            one.copy_(x[:, i:i + 1])
            graph.replay()
            assert error(out, want[:, i:i + 1].double()) < 0.02, i


def test_a_step_of_the_example():
    import hybrid_train

    torch.manual_seed(0)
    sizes = hybrid_train.Sizes(layers=4, batch=2, tokens=500)
    model, found = hybrid_train.Hybrid(sizes).cuda(), {}
    ids = hybrid_train.language(sizes, 1, "cuda")[0]
    for ops in (hybrid_train.TKQ, hybrid_train.TORCH):
        model.ops = ops
        model.zero_grad()
        with torch.autocast("cuda", BF16):
            loss = model(ids)
        loss.backward()
        found[ops.name] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])
    (mine, gradients), (theirs, right) = found["tkq"], found["torch"]
    assert abs(mine - theirs) < 2e-3 * theirs and (gradients - right).norm() < 0.06 * right.norm()


@pytest.mark.slow
def test_learning():
    """300 steps of the example: the same losses, within 0.5 % in the mean of ten steps."""
    import hybrid_train

    torch.manual_seed(0)
    model, batches = hybrid_train.Hybrid(hybrid_train.Sizes()).cuda(), hybrid_train.language(
        hybrid_train.Sizes(), 300, "cuda")
    weights = [p.detach().clone() for p in model.parameters()]
    ours, theirs = (hybrid_train.learn(model, ops, batches, weights) for ops in (hybrid_train.TKQ, hybrid_train.TORCH))
    assert theirs[-1] < 0.8 * theirs[0], "nothing was learnt"
    assert hybrid_train.apart(ours, theirs) < 0.005
