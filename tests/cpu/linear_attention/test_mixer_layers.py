"""tkq.nn.KimiDeltaAttention and Mamba2 on the CPU: as near to float64 as eager PyTorch in their type."""
import copy
import inspect
import itertools
import math
import pickle

import numpy
import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.helpers import mixer_layers

BF16 = torch.bfloat16
KIMI = dict(hidden_size=48, num_heads=2, num_v_heads=4, head_dim=32, head_v_dim=48)
MAMBA = dict(d_model=48, d_state=32, headdim=32)
OPTIONS = [("kimi", {}), ("kimi", dict(allow_neg_eigval=True, lower_bound=-5.0)),
           ("kimi", dict(num_v_heads=None, head_v_dim=None, conv_bias=True, conv_size=2)),
           ("mamba2", {}), ("mamba2", dict(d_model=64, ngroups=2, D_has_hdim=True, bias=True)),
           ("mamba2", dict(rmsnorm=False, conv_bias=False, d_conv=2, dt_limit=(0.01, 0.5)))]
BOTH = pytest.mark.parametrize("kind", ["kimi", "mamba2"])


def make(kind, dtype=BF16, **options):
    torch.manual_seed(0)
    layer = (tkq.nn.KimiDeltaAttention(**{**KIMI, **options}) if kind == "kimi" else
             tkq.nn.Mamba2(**{**MAMBA, **options})).to(dtype)
    for p in layer.parameters():  # norms' weights too
        p.data.add_(torch.randn_like(p) * 0.05)
    return layer


def tokens(S=11, dtype=BF16, size=48):
    return torch.randn(2, S, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def peer_of(kind):
    return getattr(mixer_layers, kind)


@pytest.mark.parametrize("kind, options", OPTIONS, ids=str)
def test_results_and_gradients(kind, options):
    layer = make(kind, **options)
    x = tokens(70, size=options.get("d_model", 48))
    mixer_layers.assert_as_near(layer, peer_of(kind), x, torch.randn(x.shape).to(BF16))


def apart(kind, x):
    """How far rounding in eager PyTorch moves a result: what chained calls and steps may differ by, twice."""
    layer = make(kind)
    with torch.no_grad():
        exact, peer = (peer_of(kind)(layer, x.to(d), mixer_layers.weights(layer, d)) for d in (torch.float64, BF16))
    return 2 * mixer_layers.error(peer, exact)


@BOTH
@pytest.mark.parametrize("cuts", [(5,), (1, 2, 3), (64,)])
def test_chained_calls_are_one(kind, cuts):
    layer, x = make(kind), tokens(70)
    want, last = layer(x, output_cache=True)
    found, cache = [], None
    for part in x.tensor_split(cuts, 1):
        y, cache = layer(part, cache, output_cache=True)
        found.append(y)
    bound = apart(kind, x)
    assert mixer_layers.error(torch.cat(found, 1), want) <= bound
    assert mixer_layers.error(cache.state, last.state) <= bound
    assert mixer_layers.error(layer(x[:, cuts[0]:]), want[:, cuts[0]:]) > 5 * bound  # of a sequence that begins there


@BOTH
def test_steps(kind):
    """In place, with tensors that stay where they are: what the whole call gives."""
    layer, x = make(kind), tokens(30)
    with torch.no_grad():
        want, last = layer(x, output_cache=True)
        _, cache = layer(x[:, :20], output_cache=True)
        held = [cache.state, *(cache.conv if kind == "kimi" else (cache.conv,))]
        before = [t.clone() for t in held]
        found = torch.cat([layer.step(x[:, i:i + 1], cache) for i in range(20, 30)], 1)
    bound = apart(kind, x)
    assert mixer_layers.error(found, want[:, 20:]) <= bound and mixer_layers.error(cache.state, last.state) <= bound
    assert not any(map(torch.equal, held, before))
    conv = last.conv if kind == "kimi" else (last.conv,)
    assert all(mixer_layers.error(a, b) <= bound for a, b in zip(held[1:], conv))


@BOTH
def test_a_step_has_no_gradients(kind):
    layer, x = make(kind), tokens()
    _, cache = layer(x, output_cache=True)
    cache = type(cache)(*(tuple(t.detach() for t in part) if isinstance(part, tuple) else part.detach()
                          for part in cache))
    before = copy.deepcopy(cache)
    with pytest.raises(NotImplementedError, match="_step: .*gradient"):
        layer.step(x[:, :1], cache)
    assert torch.equal(cache.state, before.state)
    conv = (zip(cache.conv, before.conv) if kind == "kimi" else ((cache.conv, before.conv),))
    assert all(torch.equal(a, b) for a, b in conv)


@BOTH
def test_a_cache_is_not_written_over(kind):
    layer, x = make(kind), tokens().requires_grad_()
    _, cache = layer(x, output_cache=True)
    before = copy.deepcopy([t.detach() for t in (*cache.conv, cache.state)])
    y = layer(tokens(), cache)
    assert all(map(torch.equal, (*cache.conv, cache.state), before))
    y.sum().backward()
    assert x.grad[:, 3].any()  # gradients reach through it


@BOTH
def test_float32_parameters_under_autocast(kind):
    layer, x = make(kind, torch.float32), tokens(dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        y = layer(x)
    bound = apart(kind, x)
    exact = peer_of(kind)(layer, x.double(), mixer_layers.weights(layer))
    assert y.dtype == BF16 and mixer_layers.error(y, exact) <= bound
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    with pytest.raises(TypeError, match="(gated_delta_rule: q|mamba2_ssd: x): .*float32"):
        layer(x)


@BOTH
def test_compiled_with_autocast_inside(kind):
    layer, x = make(kind, torch.float32), tokens(dtype=torch.float32)

    def low(x):
        with torch.autocast("cpu", BF16):
            return layer(x)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(low, fullgraph=True, backend="eager")(x), low(x))


@pytest.mark.parametrize("layer", [
    lambda: tkq.nn.KimiDeltaAttention(8, num_heads=500, head_dim=32, device="meta"),
    lambda: tkq.nn.Mamba2(800, headdim=32, expand=20, d_state=32, device="meta")])
def test_how_parameters_begin(layer):
    """A from 1 to 16, softplus of dt_bias from 0.001 to 0.1, in whatever type; also from the meta device."""
    layer = layer()
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 0.999 < A.min() < 2 and 15 < A.max() < 16.01 and 0.00099 < dt.min() < 0.002 and 0.09 < dt.max() < 0.101
    assert all(p.isfinite().all() for p in layer.parameters())
    if hasattr(layer, "D"):
        assert (layer.D == 1).all()


def test_gates_with_a_bound_begin_at_zero():
    assert not tkq.nn.KimiDeltaAttention(**KIMI, lower_bound=-5.0).A_log.any()


# As flash-linear-attention 0.6, mamba_ssm 2 and transformers write them.
STATES = {
    "kimi": {**{f"{n}_proj.weight": s for n, s in dict(q=(64, 48), k=(64, 48), v=(192, 48), b=(4, 48),
                                                       o=(48, 192)).items()},
             **{f"{n}_conv1d.weight": (s, 1, 4) for n, s in dict(q=64, k=64, v=192).items()},
             "f_proj.0.weight": (48, 48), "f_proj.1.weight": (128, 48), "g_proj.0.weight": (48, 48),
             "g_proj.1.weight": (192, 48), "g_proj.1.bias": (192,), "A_log": (4,), "dt_bias": (128,),
             "o_norm.weight": (48,)},
    "mamba2": {"in_proj.weight": (259, 48), "conv1d.weight": (160, 1, 4), "conv1d.bias": (160,), "dt_bias": (3,),
               "A_log": (3,), "D": (3,), "norm.weight": (96,), "out_proj.weight": (48, 96)}}


@BOTH
def test_state_dicts_pickles_copies(kind):
    layer, x = make(kind), tokens()
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == STATES[kind]
    other = make(kind)
    other.load_state_dict(layer.state_dict())
    for made in (other, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(made(x), layer(x))


def test_numbers_of_numpy():
    layer = make("kimi", lower_bound=numpy.float32(-2.0), norm_eps=numpy.float64(1e-3))
    assert type(layer.lower_bound) is float and layer.lower_bound == -2.0 and layer.o_norm.eps == 1e-3


def test_what_is_printed():
    assert "num_v_heads=4, head_v_dim=48, lower_bound=-2.0\n" in repr(make("kimi", lower_bound=-2.0))
    assert "48, d_state=32, heads=3, headdim=32, ngroups=1\n" in repr(tkq.nn.Mamba2(**MAMBA))


@BOTH
def test_compiled_with_its_cache(kind):
    layer, x = make(kind), tokens()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    (y, cache), (want, wanted) = (m(x, m(x, output_cache=True)[1], output_cache=True) for m in (compiled, layer))
    torch.testing.assert_close((y, *cache.conv, cache.state), (want, *wanted.conv, wanted.state))


def test_compiled_where_rows_lie_at_16_bytes():
    """As at usual sizes: nobody asks where the gate lies in memory, which tracers do not know."""
    layer, x = make("mamba2", d_model=128), tokens(5, size=128)
    assert not layer.in_proj.out_features % 8
    want, last = layer(x, output_cache=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), want)
    for strict in (False, True):
        torch.testing.assert_close(torch.export.export(layer, (x,), strict=strict).module()(x), want)
    with torch.no_grad():
        steps = [copy.deepcopy(type(last)(*(t.detach() for t in last))) for _ in range(2)]
        y = torch.compile(layer.step, fullgraph=True, backend="eager")(x[:, :1], steps[0])
        torch.testing.assert_close((y, *steps[0]), (layer.step(x[:, :1], steps[1]), *steps[1]))


@BOTH
@pytest.mark.parametrize("strict", [False, True])
def test_exported_for_any_number_of_tokens(kind, strict):
    """Where Mamba2's gate is copied, as a row of the projection is no multiple of 16 bytes."""
    layer = make(kind)
    dynamic = {1: torch.export.Dim("tokens", min=2, max=64)},
    program = torch.export.export(layer, (tokens(5),), dynamic_shapes=dynamic, strict=strict).module()
    for S in (2, 33):
        torch.testing.assert_close(program(tokens(S)), layer(tokens(S)))


@pytest.mark.parametrize("kind, changed, error, words", [
    ("kimi", dict(head_dim=144), NotImplementedError, "head_dim is 144, supported are multiples of 16 from 32 to 128"),
    ("kimi", dict(head_dim=40), NotImplementedError, "head_dim is 40, supported are multiples of 16 from 32 to"),
    ("kimi", dict(head_v_dim=512), NotImplementedError, "head_v_dim is 512, supported are multiples of 16 from 32"),
    ("kimi", dict(num_v_heads=3), ValueError, "num_v_heads is 3, allowed are multiples of num_heads, which is 2"),
    ("kimi", dict(num_heads=0), ValueError, "num_heads is 0"), ("kimi", dict(conv_size=1.5), TypeError, "conv_size"),
    ("kimi", dict(conv_bias=1), TypeError, "conv_bias: got 1"),
    ("kimi", dict(lower_bound="low"), TypeError, "lower_bound: got str"),
    ("kimi", dict(lower_bound=0.5), ValueError, "lower_bound: got 0.5, allowed are numbers below 0"),
    *(("kimi", dict(lower_bound=wrong), ValueError, "lower_bound: got .*, allowed are finite numbers")
      for wrong in (-math.inf, math.nan, -10**400)),
    ("kimi", dict(norm_eps=math.nan), ValueError, "norm_eps: got nan"),
    ("kimi", dict(norm_eps="1"), TypeError, "norm_eps: got str"),
    ("mamba2", dict(norm_eps=-1e-5), ValueError, "norm_eps: got -1e-05, allowed are finite numbers from 0 on"),
    ("mamba2", dict(headdim=40), ValueError, "headdim is 40, allowed are divisors of expand . d_model, which is 96"),
    ("mamba2", dict(headdim=24), NotImplementedError, "headdim is 24, supported are multiples of 16 from 32 to 256"),
    ("mamba2", dict(d_state=40), NotImplementedError, "d_state is 40, supported are multiples of 16 from 32 to"),
    ("mamba2", dict(ngroups=2), ValueError, "ngroups is 2, allowed are divisors of the number of heads, which is 3"),
    ("mamba2", dict(expand=0), ValueError, "expand is 0"), ("mamba2", dict(rmsnorm=None), TypeError, "rmsnorm: got"),
    ("mamba2", dict(dt_limit=0.1), TypeError, "dt_limit"),
    ("mamba2", dict(dt_limit=(2.0, 1.0)), ValueError, "dt_limit"),
])
def test_what_is_refused(kind, changed, error, words):
    with pytest.raises(error, match=f"{'KimiDeltaAttention' if kind == 'kimi' else 'Mamba2'}: {words}"):
        make(kind, **changed)


@BOTH
def test_inputs_that_are_refused(kind):
    layer = make(kind)
    x = next(iter(inspect.signature(layer.forward).parameters))
    with pytest.raises(ValueError, match=rf"{x}: shape is \(2, 11, 32\), expected \(any, any, 48\)"):
        layer(tokens()[..., :32])
    _, cache = layer(tokens(), output_cache=True)
    with pytest.raises(ValueError, match="causal_conv1d: initial_state: shape is"):
        layer(tokens()[:1], cache)
    with pytest.raises(ValueError, match=rf"{x}: shape is \(2, 11, 48\), expected \(any, 1, 48\)"):
        layer.step(tokens(), cache)


@BOTH
def test_caches_that_are_refused(kind):
    layer, x = make(kind), tokens(1)
    name = type(layer).__name__
    _, cache = layer(x, output_cache=True)
    with pytest.raises(TypeError, match=f"^{name}: output_cache: got 1, allowed are True and False"):
        layer(x, output_cache=1)
    with pytest.raises(TypeError, match=f"^{name}: cache: got tuple, expected a .*Cache, .* or None"):
        layer(x, (1, 2))
    for wrong in (None, tuple(cache)):
        with pytest.raises(TypeError, match=f"^{name}.step: cache: got {type(wrong).__name__}, expected a .*Cache"):
            layer.step(x, wrong)
    for call, where in ((layer, name), (layer.step, f"{name}.step")):
        with pytest.raises(TypeError, match=f"^{where}: cache.conv: got"):
            call(x, cache._replace(conv=1))
        with pytest.raises(TypeError, match=f"^{where}: cache.state: got NoneType"):
            call(x, cache._replace(state=None))


def test_a_limit_has_no_step():
    layer = make("mamba2", dt_limit=(0.0, 0.5))
    _, cache = layer(tokens(), output_cache=True)
    with pytest.raises(NotImplementedError, match=r"Mamba2.step: dt_limit is \(0.0, 0.5\), supported is \(0.0, inf\)"):
        layer.step(tokens(1), cache)


@BOTH
def test_packed_sequences(kind):
    """Of 4, 0, 66 and 1 tokens and behind a cache of their own: each as if it were alone, and tokens of none are 0s."""
    layer, x = make(kind), tokens(74)[:1]
    cuts = [2, 6, 6, 72, 73]
    with torch.no_grad():
        _, before = layer(tokens(20, size=48).repeat(2, 1, 1), output_cache=True)
        y, cache = layer(x, before, output_cache=True, cu_seqlens=torch.tensor(cuts))
        bound = apart(kind, x)
        for n, (a, e) in enumerate(itertools.pairwise(cuts)):
            row = type(before)(*(tuple(t[n:n + 1] for t in part) if isinstance(part, tuple) else part[n:n + 1]
                                 for part in before))
            want, last = layer(x[:, a:e], row, output_cache=True)
            assert a == e or mixer_layers.error(y[:, a:e], want) <= bound, n
            assert mixer_layers.error(cache.state[n:n + 1], last.state) <= bound
            for found, wanted in zip(*((c.conv if kind == "kimi" else (c.conv,)) for c in (cache, last))):
                assert mixer_layers.error(found[n:n + 1], wanted) <= bound


@BOTH
@pytest.mark.parametrize("sequences", [0, 2])
def test_packed_sequences_without_tokens(kind, sequences):
    layer, cu = make(kind), torch.zeros(sequences + 1, dtype=torch.int32)
    y, cache = layer(tokens(0)[:1], output_cache=True, cu_seqlens=cu)
    conv = cache.conv if kind == "kimi" else (cache.conv,)
    assert y.shape == (1, 0, 48) and all(len(t) == sequences and not t.any() for t in (*conv, cache.state))


@BOTH
def test_gradients_of_packed_sequences(kind):
    layer, x = make(kind), tokens(70)[:1]
    cu, dy = torch.tensor([0, 4, 70]), torch.randn(1, 70, 48).to(BF16)
    found = torch.autograd.grad(layer(x, cu_seqlens=cu), list(layer.parameters()), dy)
    alone = torch.cat([layer(x[:, a:e]) for a, e in ((0, 4), (4, 70))], 1)
    bound = apart(kind, x)
    for a, b in zip(found, torch.autograd.grad(alone, list(layer.parameters()), dy)):
        assert mixer_layers.error(a, b) <= bound


@pytest.mark.parametrize("layer, size", [(tkq.nn.Mamba2(**MAMBA), MAMBA["d_model"]),
                                         (tkq.nn.KimiDeltaAttention(**KIMI), KIMI["hidden_size"])])
def test_a_step_that_cannot_write_all_of_a_cache_writes_none(layer, size):
    x, layer = torch.randn(2, 5, size).bfloat16(), layer.bfloat16()
    with torch.no_grad():
        _, cache = layer(x, output_cache=True)
        parts = cache.conv if isinstance(cache.conv, tuple) else (cache.conv,)
        overlapping = tuple(part[..., :1].expand(part.shape) for part in parts)
        with torch.inference_mode():
            inferred = tuple(part.clone() for part in parts)
        state = cache.state.clone()
        for conv, error, words in ((overlapping, ValueError, "cache.conv: is"),
                                   (inferred, RuntimeError, "cache.conv: was")):
            with pytest.raises(error, match=words):
                layer.step(x[:, :1], cache._replace(conv=conv if len(conv) > 1 else conv[0]))
        with pytest.raises(ValueError, match="cache.state: shape is"):
            layer.step(x[:1, :1], cache._replace(conv=tuple(c[:1] for c in parts) if len(parts) > 1 else parts[0][:1]))
        assert torch.equal(cache.state, state)
