"""tkq.nn.GatedDeltaNet and its short convolution on the CPU, against float64."""
import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers import delta_layers
from tkq.linear_attention.layers import DeltaNetCache
from tkq.linear_attention.short_convolution import ShortConvolution, causal_conv1d

BF16 = torch.bfloat16


def make(dtype=BF16, **options):
    torch.manual_seed(0)
    return tkq.nn.GatedDeltaNet(48, **{**dict(num_heads=2, num_v_heads=4, head_dim=32, head_v_dim=48), **options}
                                ).to(dtype)


def tokens(S=11, dtype=BF16):
    return torch.randn(2, S, 48, generator=torch.Generator().manual_seed(1)).to(dtype)


def error(found, want):
    return ((found.double() - want).norm() / want.norm()).item()


# ---- the convolution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution(width, bias, activation):
    torch.manual_seed(0)
    x, weight, b, before = (torch.randn(s, dtype=torch.float64) for s in (
        (2, 7, 6), (6, width), (6,), (2, 6, width - 1)))
    b = b if bias else None
    y, state = causal_conv1d(x, weight, b, activation, before, True)
    whole = torch.cat((before.mT, x), 1)
    for t in range(7):
        want = (whole[:, t:t + width].mT * weight).sum(-1) + (0 if b is None else b)
        torch.testing.assert_close(y[:, t], F.silu(want) if activation else want)
    assert y.is_contiguous() and torch.equal(state.mT, whole[:, 7:])
    first, middle = causal_conv1d(x[:, :2], weight, b, activation, before, True)
    second, last = causal_conv1d(x[:, 2:], weight, b, activation, middle, True)
    torch.testing.assert_close(torch.cat((first, second), 1), y)
    assert torch.equal(last, state)
    zeros = torch.zeros_like(before)
    assert torch.equal(causal_conv1d(x, weight, b, activation), causal_conv1d(x, weight, b, activation, zeros))


def test_a_convolution_of_no_tokens():
    before = torch.randn(2, 6, 3)
    y, state = causal_conv1d(torch.zeros(2, 0, 6), torch.randn(6, 4), None, "silu", before, True)
    assert y.shape == (2, 0, 6) and torch.equal(state, before)


@pytest.mark.parametrize("changed, words", [
    (dict(weight=torch.zeros(5, 4)), r"weight: shape is \(5, 4\), expected \(6, 4\)"),
    (dict(x=torch.zeros(7, 6)), "x: has 2 dimensions"), (dict(weight=torch.zeros(6, 1, 4)), "weight: has 3 dimensions"),
    (dict(initial_state=torch.zeros(2, 6, 4)), r"initial_state: shape is \(2, 6, 4\), expected \(2, 6, 3\)"),
    (dict(activation="relu"), "activation: got 'relu', allowed are 'silu', and None")])
def test_a_convolution_refuses(changed, words):
    with pytest.raises(ValueError, match=f"causal_conv1d: {words}"):
        causal_conv1d(**dict(x=torch.zeros(2, 7, 6), weight=torch.zeros(6, 4)) | changed)


# ---- the layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(use_gate=False), dict(allow_neg_eigval=True), dict(conv_bias=True),
                                     dict(num_v_heads=None, head_v_dim=None, conv_size=2)], ids=str)
def test_results(options):
    layer, x = make(**options), tokens()
    y = layer(x)
    assert y.dtype == BF16 and y.shape == x.shape
    assert error(y, delta_layers.layer_exact(layer, x)) < 0.02


def test_gradients():
    layer, x = make(), tokens().requires_grad_()
    wide = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    dy = torch.randn(x.shape)
    layer(x).backward(dy.to(BF16))
    delta_layers.layer_exact(layer, wide_x, wide).backward(dy.to(BF16).double())
    assert error(x.grad, wide_x.grad) < 0.03
    for name, p in layer.named_parameters():
        assert error(p.grad, wide[name].grad) < 0.03, name


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 3), (64,)])
def test_chained_calls_are_one(cuts):
    layer, x = make(), tokens(70)
    want, last = layer(x, output_cache=True)
    found, cache = [], None
    for part in x.tensor_split(cuts, 1):
        y, cache = layer(part, cache, output_cache=True)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(cache.state, last.state, rtol=2**-5, atol=2**-6)
    for a, b in zip(cache.conv, last.conv):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-7)
    assert not torch.allclose(layer(x[:, cuts[0]:]), want[:, cuts[0]:], rtol=2**-4, atol=2**-5)


def test_packed_sequences():
    """Each behind its own cache, as if it were alone; gradients too."""
    layer, x, cuts = make(), tokens(74)[:1], [2, 6, 6, 73]
    _, before = layer(tokens(20)[:1].repeat(3, 1, 1), output_cache=True)
    before = DeltaNetCache(tuple(t.detach() for t in before.conv), before.state.detach())
    cu = torch.tensor(cuts)
    y, cache = layer(x, before, output_cache=True, cu_seqlens=cu)
    alone = [layer(x[:, a:e], DeltaNetCache(tuple(t[n:n + 1] for t in before.conv), before.state[n:n + 1]),
                   output_cache=True) for n, (a, e) in enumerate(itertools.pairwise(cuts))]
    want = torch.cat([part for part, _ in alone], 1)
    near = dict(rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(y[:, 2:73], want, **near)
    for n, (_, last) in enumerate(alone):
        torch.testing.assert_close((cache.state[n:n + 1], *(t[n:n + 1] for t in cache.conv)), (last.state, *last.conv),
                                   **near)
    dy = torch.randn(want.shape).to(BF16)
    found, right = (torch.autograd.grad(out, list(layer.parameters()), dy) for out in (y[:, 2:73], want))
    assert all(error(a, b.double()) < 0.01 for a, b in zip(found, right))


def test_a_cache_is_not_written_over():
    layer, x = make(), tokens()
    _, cache = layer(x, output_cache=True)
    before = [t.clone() for t in (*cache.conv, cache.state)]
    layer(x, cache, output_cache=True)
    assert all(map(torch.equal, (*cache.conv, cache.state), before))


def test_gradients_reach_through_a_cache():
    layer, x = make(), tokens().requires_grad_()
    _, cache = layer(x, output_cache=True)
    layer(tokens(), cache).sum().backward()
    assert x.grad[:, 3].any()


def test_float32_parameters_under_autocast():
    layer, x = make(torch.float32), tokens(dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        y = layer(x)
    assert y.dtype == BF16 and error(y, delta_layers.layer_exact(layer, x)) < 0.02
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    with pytest.raises(TypeError, match="gated_delta_rule: q: .*float32"):
        layer(x)


def test_how_parameters_begin():
    """Gates that decay, from 0.01 to 16 times softplus of 0.001 to 0.1, in whatever type; also from the meta device."""
    layer = tkq.nn.GatedDeltaNet(8, num_heads=500, head_dim=32, device="meta")
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 0.0099 < A.min() < 1 and 15 < A.max() < 16.01 and 0.00099 < dt.min() < 0.002 and 0.09 < dt.max() < 0.101
    assert all(p.isfinite().all() for p in layer.parameters()) and (layer.o_norm.weight == 1).all()


def test_state_dicts_pickles_copies():
    layer, x = make(), tokens()
    names = {f"{n}_proj.weight" for n in "qkvabgo"} | {f"{n}_conv1d.weight" for n in "qkv"}
    assert layer.state_dict().keys() == names | {"A_log", "dt_bias", "o_norm.weight"}
    assert layer.q_conv1d.weight.shape == (64, 1, 4)
    other = tkq.nn.GatedDeltaNet(48, num_heads=2, num_v_heads=4, head_dim=32, head_v_dim=48, dtype=BF16)
    other.load_state_dict(layer.state_dict())
    for made in (other, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(made(x), layer(x))
    assert "num_heads=2, head_dim=32, num_v_heads=4, head_v_dim=48" in repr(layer)


def test_compiled_with_its_cache():
    layer, x = make(), tokens()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    (y, cache), (want, wanted) = (m(x, m(x, output_cache=True)[1], output_cache=True) for m in (compiled, layer))
    torch.testing.assert_close((y, *cache.conv, cache.state), (want, *wanted.conv, wanted.state))


@pytest.mark.parametrize("changed, error, words", [
    (dict(head_dim=40), NotImplementedError, "head_dim is 40, supported are multiples of 16 from 32 to 256"),
    (dict(head_dim=272), NotImplementedError, "head_dim is 272"),
    (dict(head_v_dim=512), NotImplementedError, "head_v_dim is 512, supported are multiples of 16 from 32 to 256"),
    (dict(num_v_heads=3), ValueError, "num_v_heads is 3, allowed are multiples of num_heads, which is 2"),
    (dict(num_heads=0), ValueError, "num_heads is 0"), (dict(conv_size=1.5), TypeError, "conv_size"),
    (dict(norm_eps=-1.0), ValueError, "norm_eps: got -1.0"), (dict(norm_eps=None), TypeError, "norm_eps: got NoneType"),
    (dict(use_gate=1), TypeError, "use_gate: got 1"), (dict(allow_neg_eigval=None), TypeError, "allow_neg_eigval: got"),
])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=f"GatedDeltaNet: {words}"):
        make(**changed)


def test_inputs_that_are_refused():
    layer = make()
    with pytest.raises(ValueError, match=r"x: shape is \(2, 11, 32\), expected \(any, any, 48\)"):
        layer(tokens()[..., :32])
    _, cache = layer(tokens(), output_cache=True)
    with pytest.raises(ValueError, match="causal_conv1d: initial_state: shape is"):
        layer(tokens()[:1], cache)


def test_caches_that_are_refused():
    layer, x = make(), tokens()
    _, cache = layer(x, output_cache=True)
    with pytest.raises(TypeError, match="^GatedDeltaNet: output_cache: got 1, allowed are True and False"):
        layer(x, output_cache=1)
    for wrong, words in (((1, 2), ": got tuple, expected a DeltaNetCache"),
                         (cache._replace(state=1), ".state: got int"),
                         (cache._replace(conv=cache.conv[:2]), ".conv: got .*, expected the tensors of q, k and v"),
                         (cache._replace(conv=(None,) * 3), ".conv: got NoneType")):
        with pytest.raises(TypeError, match=f"^GatedDeltaNet: cache{words}"):
            layer(x, wrong)


def test_a_convolution_is_a_module_of_its_own():
    """With what hooks see: the projection's result, and what the rule is given."""
    layer, seen = make(), []
    assert isinstance(layer.v_conv1d, ShortConvolution)
    layer.v_conv1d.register_forward_hook(lambda module, given, found: seen.append(given[0].shape))
    layer(tokens())
    assert seen == [(2, 11, 192)]
