"""tkq.nn.KimiDeltaAttention and Mamba2 on a GPU: as near to float64 as eager PyTorch in their type; steps, and steps in
a CUDA graph. Sizes are those of other tests' kernels."""
import pytest
import torch

import tkq.nn
from tests.helpers import mixer_layers
from tests.helpers.sanitizer.nan_fill import poisoned

BF16 = torch.bfloat16
BOTH = pytest.mark.parametrize("kind", ["kimi", "mamba2"])


def make(kind):
    torch.manual_seed(0)
    layer = (tkq.nn.KimiDeltaAttention(256, num_heads=2, num_v_heads=4, head_dim=64, head_v_dim=64) if kind == "kimi"
             else tkq.nn.Mamba2(256, d_state=64, headdim=64, ngroups=2)).to("cuda", BF16)
    for p in layer.parameters():  # norms' weights too
        p.data.add_(torch.randn_like(p) * 0.05)
    return layer


def tokens(S=200):
    return torch.randn(2, S, 256, device="cuda").to(BF16)


def apart(kind, layer, x):
    """How far rounding in eager PyTorch moves a result, twice."""
    of = getattr(mixer_layers, kind)
    with torch.no_grad():
        exact, peer = (of(layer, x.to(d), mixer_layers.weights(layer, d)) for d in (torch.float64, BF16))
    return 2 * mixer_layers.error(peer, exact)


@BOTH
def test_results_and_gradients(kind):
    layer, x = make(kind), tokens()
    with poisoned():
        mixer_layers.assert_as_near(layer, getattr(mixer_layers, kind), x, torch.randn_like(x))


@BOTH
def test_chained_calls_and_steps_are_one_call(kind):
    layer, x = make(kind), tokens()
    bound = apart(kind, layer, x)
    with torch.no_grad():
        want, last = layer(x, output_cache=True)
        found, cache = [], None
        for part in x[:, :190].tensor_split((1, 66, 130), 1):
            y, cache = layer(part, cache, output_cache=True)
            found.append(y)
        found += [layer.step(x[:, i:i + 1], cache) for i in range(190, 200)]
    assert mixer_layers.error(torch.cat(found, 1), want) <= bound
    assert mixer_layers.error(cache.state, last.state) <= bound


@pytest.mark.parametrize("kind", [pytest.param("kimi", marks=pytest.mark.slow), "mamba2"])
def test_a_step_in_a_cuda_graph(kind):
    """The cache's tensors stay where they are."""
    layer, x = make(kind), tokens(12)
    bound = apart(kind, layer, x)
    with torch.no_grad():
        want = layer(x)
        _, cache = layer(x[:, :8], output_cache=True)
        held = [cache.state, *(cache.conv if kind == "kimi" else (cache.conv,))]
        before, one = [t.clone() for t in held], x[:, 8:9].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer.step(one, cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.step(one, cache)
        for t, old in zip(held, before):
            t.copy_(old)
        found = []
        for i in range(8, 12):
            one.copy_(x[:, i:i + 1])
            graph.replay()
            found.append(out.clone())
    assert mixer_layers.error(torch.cat(found, 1), want[:, 8:]) <= bound
