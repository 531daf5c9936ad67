"""Mamba-2 of packed sequences and with a pool of states, where no GPU is needed."""
import itertools
import math

import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tests.helpers.linear_launches import launched
from tkq.linear_attention.ssd import gradients as ssd_gradients
from tkq.linear_attention.ssd.forward import SsdSaved, forward
from tkq.linear_attention.ssd.gradients import backward
from tkq.reference.ssd import mamba2_ssd, mamba2_ssd_backward

LENGTHS = 0, 1, 9, 0, 66, 5  # of sequences, before which are 3 tokens, and 7 behind
CU = tuple(itertools.accumulate(LENGTHS, initial=3))
S, N = CU[-1] + 7, len(LENGTHS)
OF_TOKENS = "x", "dt", "B", "C", "z"
INDICES = 3, -1, 0, 7, -(1 << 31), (1 << 31) - 1  # of a pool of 7


def make(dtype=torch.float64, states=N, without=(), D_dims=1):
    """Two heads share one of B and C."""
    torch.manual_seed(0)
    H, G, P, K = 4, 2, 48, 32
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape, of=wide):
        return torch.randn(*shape, dtype=torch.float64).to(of)

    given = dict(x=randn(1, S, H, P, of=dtype), dt=randn(1, S, H), A=-randn(H).exp(), B=randn(1, S, G, K, of=dtype) / 6,
                 C=randn(1, S, G, K, of=dtype) / 6, D=randn(*(H, P)[:D_dims]), z=randn(1, S, H, P, of=dtype),
                 dt_bias=randn(H), initial=randn(states, H, P, K))
    return SsdSaved(**{name: None if name in without else x for name, x in given.items()}, softplus=True)


def cu(dtype=torch.int32):
    return torch.tensor(CU, dtype=dtype)


def of(at, given):
    """The tensors of a sequence."""
    return given._replace(**{name: x[:, at] for name in OF_TOKENS if (x := getattr(given, name)) is not None})


def spoilt(given):
    """NaN in tokens of no sequence."""
    given = given._replace(**{name: x.clone() for name in OF_TOKENS if (x := getattr(given, name)) is not None})
    for name in OF_TOKENS:
        if getattr(given, name) is not None:
            getattr(given, name)[:, [*range(3), *range(CU[-1], S)]] = math.nan
    return given


def call(given, states=True, **places):
    return tkq.mamba2_ssd(*given[:9], given.softplus, given.limit, states, **places)


@pytest.mark.parametrize("without", [(), ("z", "D"), ("initial",)])
def test_sequences_one_by_one(without):
    """The reference, and its gradients by hand."""
    given = make(without=without)
    dy, dstates = torch.randn_like(given.x), torch.randn(N, 4, 48, 32, dtype=torch.float64)
    bad = spoilt(given)
    y, states = mamba2_ssd(*bad[:11], cu())
    found = mamba2_ssd_backward(dy, dstates, *bad[:11], cu())
    for x in (y, *(getattr(found, name) for name in OF_TOKENS)):
        assert x is None or not (x[:, :3].any() or x[:, CU[-1]:].any())
    heads = dict.fromkeys(("A", "D", "dt_bias"), 0.0)
    for n, (a, e) in enumerate(itertools.pairwise(CU)):
        if a == e:
            first = 0 * states[n] if given.initial is None else given.initial[n]
            assert torch.equal(states[n], first)
            assert found.initial_states is None or torch.equal(found.initial_states[n], dstates[n])
            continue
        one = of(slice(a, e), given)
        leaves = [None if x is None else x[n:n + 1] if i == 8 else x for i, x in enumerate(one[:9])]
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in leaves]
        results = mamba2_ssd(*leaves, True, given.limit)
        want = iter(torch.autograd.grad(results, [x for x in leaves if x is not None],
                                        (dy[:, a:e], dstates[n:n + 1]), materialize_grads=True))
        assert torch.allclose(y[:, a:e], results[0]) and torch.allclose(states[n:n + 1], results[1])
        for name, x, leaf in zip(found._fields, found, leaves):
            if leaf is None:
                assert x is None
            elif name in heads:
                heads[name] += next(want)
            else:
                assert torch.allclose(x[n:n + 1] if name == "initial_states" else x[:, a:e], next(want)), name
    for name, want in heads.items():
        assert getattr(found, name) is None or torch.allclose(getattr(found, name), want), name


@pytest.mark.parametrize("without, D_dims", [((), 1), (("z",), 2), (("initial", "dt_bias"), 1)])
def test_gradients_are_made_of_launches(monkeypatch, without, D_dims):
    """NaN in tokens of no sequence, and in what comes in for them."""
    monkeypatch.setattr(ssd_gradients, "launch", launched)
    given = make(without=without, D_dims=D_dims)._replace(cu=cu())
    dy, dstates = torch.randn_like(given.x), torch.randn(N, 4, 48, 32, dtype=torch.float64)
    want = mamba2_ssd_backward(dy, dstates, *given)
    dy[:, :3] = dy[:, CU[-1]:] = math.nan
    bad = spoilt(given)
    y, states = mamba2_ssd(*given)
    made = launched(forward(bad, torch.float64), 1.0)
    assert torch.allclose(made.o, y) and torch.allclose(made.state, states)
    for name, mine, exact in zip(want._fields, backward(bad, dy, dstates), want):
        assert mine is exact is None or torch.allclose(mine, exact, rtol=1e-8, atol=1e-9), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_op(dtype):
    given = make(torch.bfloat16)
    leaves = given._replace(**{name: x.clone().requires_grad_() for name, x in given._asdict().items()
                               if isinstance(x, torch.Tensor)})
    y, states = call(leaves, cu_seqlens=cu(dtype))
    want, last = mamba2_ssd(*given[:11], cu())
    dy, dstates = torch.randn_like(y), torch.randn_like(states)
    torch.testing.assert_close(y, want.to(y.dtype))
    torch.testing.assert_close(states, last)
    found = torch.autograd.grad((y, states), leaves[:9], (dy, dstates))
    for mine, exact in zip(found, mamba2_ssd_backward(dy, dstates, *given[:11], cu())):
        torch.testing.assert_close(mine, exact.to(mine.dtype))
    compiled = torch.compile(lambda *x: tkq.mamba2_ssd(*x, True, return_final_states=True, cu_seqlens=cu(dtype)),
                             fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(*leaves[:9]), leaves[:9], (dy, dstates)), found))


@pytest.mark.parametrize("packed", [True, False])
def test_a_pool(packed):
    given = make(torch.bfloat16, states=7)
    if not packed:
        given = given._replace(**{name: getattr(given, name).expand(N, *getattr(given, name).shape[1:])
                                  for name in OF_TOKENS})
    pool, indices = given.initial.to(torch.bfloat16), torch.tensor(INDICES, dtype=torch.int32)
    before, version, places = pool.clone(), pool._version, dict(cu_seqlens=cu() if packed else None)
    y, same = call(given._replace(initial=pool), state_indices=indices, **places)
    first = torch.stack([before[i] if 0 <= i < 7 else torch.zeros_like(before[0]) for i in INDICES])
    want, states = call(given._replace(initial=first), **places)
    assert same is pool and pool._version > version
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(pool[[3, 0]], states[[0, 2]].bfloat16())
    assert torch.equal(pool[[1, 2, 4, 5, 6]], before[[1, 2, 4, 5, 6]])
    theirs = before.clone()
    step = torch.compile(lambda pool: call(given._replace(initial=pool), False, state_indices=indices, **places),
                         fullgraph=True, backend="aot_eager")
    assert torch.equal(step(theirs), y) and torch.equal(theirs, pool)
    torch.library.opcheck(torch.ops.tkq.mamba2_ssd_pool.default, (
        *given[:8], before, True, 0.0, math.inf, places["cu_seqlens"], indices))
    with pytest.raises(NotImplementedError, match="state_indices: with a tensor that requires a gradient"):
        call(given._replace(initial=pool, D=given.D.requires_grad_()), state_indices=indices, **places)


@pytest.mark.parametrize("changed, error, words", [
    (dict(cu_seqlens=torch.tensor([0.0, 7.0])), TypeError, "cu_seqlens: dtype is torch.float32"),
    (dict(cu_seqlens=torch.zeros(0, dtype=torch.int32)), ValueError, "cu_seqlens: has no number"),
    (dict(cu_seqlens=torch.zeros(65535, dtype=torch.int32)), NotImplementedError, "cu_seqlens: has 65534 sequences"),
    (dict(cu_seqlens=torch.zeros(9, dtype=torch.int32)), ValueError, r"initial_states: shape is \(6, 4, 48, 32\)"),
    (dict(state_indices=torch.zeros(2, dtype=torch.int32)), ValueError, r"state_indices: shape is \(2,\)"),
    (dict(state_indices=torch.zeros(N)), TypeError, "state_indices: dtype is torch.float32")])
def test_what_is_refused(changed, error, words):
    with pytest.raises(error, match=f"mamba2_ssd: {words}"):
        call(make(torch.bfloat16), **dict(cu_seqlens=cu()) | changed)


def test_what_is_refused_of_a_pool():
    given, indices = make(torch.bfloat16, without=("initial",)), torch.zeros(N, dtype=torch.int32)
    with pytest.raises(ValueError, match="mamba2_ssd: initial_states: is None, with state_indices expected"):
        call(given, cu_seqlens=cu(), state_indices=indices)
    with pytest.raises(ValueError, match="mamba2_ssd: initial_states: .* elements may share memory"):
        call(given._replace(initial=torch.zeros(1, 4, 48, 32).expand(5, -1, -1, -1)), cu_seqlens=cu(),
             state_indices=indices)
    with pytest.raises(ValueError, match="mamba2_ssd: x: has 2 sequences, with cu_seqlens allowed is 1"):
        call(given._replace(**{name: getattr(given, name).expand(2, *getattr(given, name).shape[1:])
                               for name in OF_TOKENS}), cu_seqlens=cu())


def test_the_kernels_of_calls():
    given = make(torch.bfloat16)
    indices = torch.zeros(N, dtype=torch.int64)
    with fake_gpu.launches() as seen, torch.no_grad():
        call(given, cu_seqlens=cu())
        call(given, cu_seqlens=cu(torch.int64), state_indices=indices)
        call(given, False, cu_seqlens=cu()[:1], state_indices=indices[:0])  # no sequence: nothing to launch
    assert [(r.args[0].packed, r.args[0].pool, r.args[0].final) for r, _ in seen] == [
        ("int32", None, "fp32"), ("int64", "int64", "fp32")]
    others = seen[1][1][1]  # behind C
    assert others[5] is others[6] is given.initial
