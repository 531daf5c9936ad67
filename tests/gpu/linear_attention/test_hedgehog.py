"""tkq.hedgehog on a GPU, against all pairs of tokens in float64."""
import math

import pytest
import torch

import tkq
from tests.helpers import hedgehog_launches
from tests.helpers.linear_launches import launched
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.hedgehog import gradients as by_launches
from tkq.linear_attention.hedgehog.launch import Given as Forward
from tkq.linear_attention.hedgehog.launch import Window, start, window_gradients
from tkq.linear_attention.hedgehog.plan import segments
from tkq.linear_attention.launch import Given, launch
from tkq.reference import hedgehog as reference
from tkq.testing import assert_2x

BF16 = torch.bfloat16
NAMES = "q", "k", "v", "q_map", "k_map", "linear_factor", "window_factor"


def make(B, S, H, D, F=64, dtype=BF16, sharp=1.0, scale=1.0):
    """sharp: 1 makes features of some size, more makes most of them 1e-6. scale: of q and k."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, H, D, device="cuda") for _ in range(3))
    q_map, k_map = (sharp * D**-0.5 * torch.randn(H, D, F, device="cuda") for _ in range(2))
    factors = (0.1 + 0.9 * torch.rand(H, device="cuda") for _ in range(2))
    return *(x.to(dtype) for x in (scale * q, scale * k, v, q_map, k_map)), *factors


def chunked(q, k, v, q_map, k_map, linear, window):
    """As the kernel rounds it, in plain PyTorch: weights in the window, features and the state go through 16 bits."""
    def narrow(x):
        return x.to(v.dtype).float()

    scale, wide = q.shape[3]**-0.5, [x.float().transpose(1, 2) for x in (q, k, v)]
    f, g = (narrow(reference.features(x.float(), w.float())).transpose(1, 2) for x, w in ((q, q_map), (k, k_map)))
    q, k, v = wide
    linear, window = (x[:, None, None] for x in (linear, window))
    state, sums, out = f.new_zeros(*f.shape[:2], f.shape[3], v.shape[3]), f.new_zeros(*f.shape[:2], f.shape[3]), []
    for at in range(0, q.shape[2], 64):
        own, past = slice(at, at + 64), slice(max(0, at - 64), at)
        scores = scale * q[:, :, own] @ k[:, :, past.start:own.stop].mT
        e = scores.masked_fill(torch.ones_like(scores).triu(1 + at - past.start).bool(), -math.inf)
        e = (e - e.amax(-1, keepdim=True)).exp()
        top = linear * (f[:, :, own] @ narrow(state)) + narrow(window * e) @ v[:, :, past.start:own.stop]
        total = window * e.sum(-1, keepdim=True) + linear * (f[:, :, own] @ sums[..., None])
        out.append(top / (total + 1e-6))
        state, sums = state + g[:, :, past].mT @ v[:, :, past], sums + g[:, :, past].sum(2)
    return torch.cat(out, 2).transpose(1, 2).to(q.dtype) if out else v.transpose(1, 2)


def check(*given):
    with poisoned():
        o = tkq.hedgehog(*given)
    want = reference.hedgehog(*(x.double() for x in given))
    assert_2x(o, want, chunked(*given).to(o.dtype), what="o")
    return o


@pytest.mark.parametrize("S", [1, 64, 65, 129, 460])
def test_lengths(S):
    check(*make(2, S, 2, 128))


@pytest.mark.parametrize("dtype, D, F", [(BF16, 64, 64), (BF16, 64, 32), (torch.float16, 128, 64)])
def test_types_and_sizes(dtype, D, F):
    """Features in the place of what they are made of, and beside it."""
    check(*make(2, 333, 3, D, F, dtype))


@pytest.mark.parametrize("sharp, scale", [(8.0, 1.0), (40.0, 6.0), (0.0, 0.0)])
def test_hard_data(sharp, scale):
    """Features at their least; weights of one key alone; all alike."""
    check(*make(1, 600, 2, 128, sharp=sharp, scale=scale))


@pytest.mark.parametrize("linear, window", [(0.0, 1.0), (1.0, 0.0)])
def test_one_part_alone(linear, window):
    """Without a window's weight, tokens without others have 0."""
    *given, _, _ = make(1, 400, 2, 128)
    check(*given, torch.full((2,), linear, device="cuda"), torch.full((2,), window, device="cuda"))


def all_at_their_least(S, size):
    """Of y = q W and y = k W the largest and the smallest columns are others: but for 1e-6 in the place of less, which
    exp(-size) is, there would be next to no weights before the window."""
    q, k, v, q_map, k_map, *_ = make(1, S, 2, 64)
    for i, (x, x_map, largest, smallest) in enumerate(((q, q_map, 3, 10), (k, k_map, 20, 41))):
        x.zero_(), x_map.zero_()
        x[..., i], x_map[:, i, largest], x_map[:, i, smallest] = size, 1, -1
    ones = torch.ones(2, device="cuda")
    return q, k, v, q_map, k_map, ones, torch.zeros_like(ones)


def test_features_that_are_all_at_their_least():
    check(*all_at_their_least(400, 20.0))


def test_many_chunks():
    """Sums of many tokens, on the last ones."""
    given = make(1, 16384, 1, 128)
    o, peer = tkq.hedgehog(*given), chunked(*given)
    q, k, v, *others = (x.double() for x in given)
    f, g = reference.features(q, others[0])[:, -64:], reference.features(k, others[1])[:, :-128]
    scores = torch.einsum("bihd,bjhd->bhij", q[:, -64:], k[:, -128:]) * 128**-0.5
    scores = scores.masked_fill(torch.ones_like(scores).triu(65).bool(), -math.inf)
    near = others[3] * (scores - scores.amax(-1, keepdim=True)).exp()
    a = torch.cat((others[2] * torch.einsum("bihf,bjhf->bhij", f, g), near), -1)
    want = torch.einsum("bhij,bjhd->bihd", a / (a.sum(-1, keepdim=True) + 1e-6), v)
    assert_2x(o[:, -64:], want, peer[:, -64:].to(o.dtype), what="o")


@pytest.mark.parametrize("S", [1030, 1090, 2100])
def test_segments(S):
    """Few long sequences: states of segments, of which the last one has a chunk of few tokens."""
    given = make(1, S, 3, 128, sharp=2.0)
    assert segments(3, S, torch.cuda.get_device_properties(0).multi_processor_count)
    o = check(*given)
    assert torch.equal(o, tkq.hedgehog(*given))


def test_segments_of_hard_data():
    """Features at their least, and a token whose values are large, in another segment."""
    given = make(2, 1500, 2, 128, sharp=40.0)
    given[2][:, 7] *= 100
    check(*given)


@pytest.mark.parametrize("S", [300, 1100])
def test_nothing_else_counts(S):
    """Slices of packed tensors, with NaN behind each sequence, ahead of it and in other heads."""
    given = make(1, S, 2, 128)
    wide = torch.full((1, S + 100, 3, 4, 128), math.nan, device="cuda", dtype=BF16)
    for i in range(3):
        wide[:, 50:S + 50, i, 1:3] = given[i]
    q, k, v = (wide[:, 50:S + 50, i, 1:3] for i in range(3))
    assert torch.equal(tkq.hedgehog(q, k, v, *given[3:]), tkq.hedgehog(*given))


def test_nan_in_a_key_reaches_all_that_see_it():
    given = make(1, 400, 1, 128)
    given[1][0, 100] = math.nan
    bad = tkq.hedgehog(*given).isnan().all(-1)[0, :, 0]
    assert bad[100:].all() and not bad[:64].any()


def test_the_same_bits():
    given = [x.requires_grad_() for x in make(2, 700, 4, 128)]
    do, seen = torch.randn_like(given[2]), []
    for _ in range(4):
        o = tkq.hedgehog(*given)
        seen.append((o.detach(), *torch.autograd.grad(o, given, do)))
    assert all(torch.equal(x, y) for again in seen[1:] for x, y in zip(again, seen[0]))


def check_gradients(*given):
    leaves = [x.requires_grad_() for x in given]
    with poisoned():
        o = tkq.hedgehog(*leaves)
        torch.manual_seed(1)  # bits are compared, too, under pressure
        do = torch.randn_like(o)
        found = torch.autograd.grad(o, leaves, do)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = torch.autograd.grad(reference.hedgehog(*wide), wide, do.double(), allow_unused=True, materialize_grads=True)
    peer = _as_launched(do, leaves)
    for name, x, exact, other in zip(NAMES, found, want, peer):
        if x.dim() == 1:  # sums over tokens of differences of numbers of size 10, rounded by 2^-9: four deviations
            assert ((x - exact).abs() <= 4 * 10 * 2**-9 * (do.shape[0] * do.shape[1])**0.5).all(), name
            continue
        assert_2x(*(t.reshape(-1, t.shape[-1]) for t in (x, exact, other.to(x.dtype))), what=name)
        # that peer is of the same formulas: a few roundings to 16 bits, of numbers that are added up
        assert (x - exact).norm() <= 2**-5 * exact.norm(), name
    return found


def _as_launched(do, leaves):
    """The launches as the kernels round them, in plain PyTorch."""
    emulated = dict(hedgehog_launches.ALL, launch=launched)
    ours = {name: getattr(by_launches, name) for name in emulated}
    for name, function in emulated.items():
        setattr(by_launches, name, function)
    try:
        with torch.no_grad():
            o, inverse = reference.outputs(*leaves)
            of_tokens = o.to(do.dtype), inverse, reference.largest_scores(*leaves[:2])
            saved = by_launches.Saved(*of_tokens, o.new_empty(0), o.new_empty(0), *leaves)  # makes features anew
            return by_launches.backward(do, saved)
    finally:
        for name, function in ours.items():
            setattr(by_launches, name, function)


def of_window(S, D=128):
    """As if there were keys before the window: outputs' gradients meet what they, too, have given."""
    q, k, v, *_, linear, window = make(2, S, 2, D)
    do, less = torch.randn_like(v), torch.randn(2, S, 2, device="cuda")
    far = torch.rand(2, S, 2, device="cuda")
    return Window(q, k, v, do, 1 / (window * (1 + far) + linear * far), torch.randn_like(far), less, linear, window)


def added(given):
    """The launch's gradients, added to ones, and the factors'."""
    gradients = [torch.ones_like(x) for x in given[:3]]
    return window_gradients(given, *gradients), *gradients


def check_window(given):
    with poisoned():
        found = added(given)
    wide = Window(*(x.double() for x in given))
    want = hedgehog_launches.window_gradients(wide, *(ones := [torch.ones_like(x) for x in wide[:3]])), *ones
    peer = hedgehog_launches.window_gradients(given, *(ones := [torch.ones_like(x) for x in given[:3]])), *ones
    # scores' gradients are differences of do v and delta
    of_scores = (given.do.float() * given.v.float()).sum(-1).abs().max().item()
    for name, x, exact, other in zip(("factors", "dq", "dk", "dv"), found, want, peer):
        # of float32: sums of 128 exponentials, each by an approximation of 2 ulp, and reciprocals
        ulps = 64 if name == "factors" else 1
        assert_2x(x, exact, other, ulps=ulps, bias_ulps=ulps if name == "factors" else 0, what=name,
                  cancelled=of_scores if name in ("factors", "dq", "dk") else 0.0)
    return found


@pytest.mark.parametrize("S", [1, 65, 200, 460])
def test_gradients_of_the_window(S):
    check_window(of_window(S))


@pytest.mark.parametrize("S", [65, 460])
def test_gradients(S):
    check_gradients(*make(2, S, 2, 128))


def test_the_gradient_of_keys_alone():
    """Is the same as with those of others, and with features that were not kept."""
    given = make(1, 200, 2, 128)
    with poisoned():
        made, _ = start(Forward(*given), True)
    do, saved = torch.randn_like(made.o), by_launches.Saved(*made, *given)
    anew = saved._replace(q_features=made.o.new_empty(0), k_features=made.o.new_empty(0))
    alone = by_launches.backward(do, anew, tuple(i == 1 for i in range(7))).k
    assert torch.equal(alone, by_launches.backward(do, saved).k)


@pytest.mark.parametrize("S, D", [(65, 128), (1100, 128), (333, 64)])
def test_features_that_are_kept(S, D):
    """By one launch and by segments; of keys those of all chunks but the last, behind which nothing is written."""
    given = make(1, S, 2, D)
    with poisoned():
        made, _ = start(Forward(*given), True)
    last = (S - 1) // 64 * 64
    q, k, _, q_map, k_map, *_ = given
    for x, w, found in ((q, q_map, made.q_features), (k[:, :last], k_map, made.k_features[:, :last])):
        want, narrow = reference.features(x.double(), w.double()), reference.features(x.float(), w.float()).to(x.dtype)
        assert_2x(found, want, narrow, ulps=2, what="features")
    assert made.k_features[:, last:].isnan().all()


def test_gradients_of_scores_that_are_alike():
    """Equal keys share what the largest score of a token gets less, those of the chunk before among them."""
    given = make(1, 300, 2, 128)
    given[1][:, 70:200] = given[1][:, 70:71]
    check_gradients(*given)


def test_gradients_of_large_scores():
    """Most weights in the window are of one key alone."""
    check_gradients(*make(1, 300, 2, 128, scale=4.0))


def test_gradients_where_features_are_at_their_least():
    check_gradients(*make(1, 460, 2, 64, sharp=8.0))


def test_gradients_of_float16():
    """Whose weights are multiplied by a power of 2: small ones would have few bits."""
    given = list(make(1, 300, 2, 64, dtype=torch.float16))
    given[5] = given[5] * 1e-3
    check_gradients(*given)


def test_gradients_where_the_linear_factor_is_next_to_nothing():
    """What is before the window has no part in the denominator that could be told from rounding."""
    *given, linear, window = make(2, 200, 2, 128)
    check_gradients(*given, torch.full_like(linear, 1e-20), window)


def test_gradients_of_the_other_size():
    check_gradients(*make(1, 333, 3, 64, 32))


@pytest.mark.parametrize("reverse", [False, True])
def test_other_chunks_alone(reverse):
    """The engine without what a chunk's tokens give each other."""
    q, k, v, *_ = make(2, 300, 2, 128)
    given = Given(q, k, v, reverse=reverse, others=True)
    with poisoned():
        o = launch(given, 0.125).o
    wide = [x.double() for x in (q, k, v)]
    assert_2x(o, 0.125 * reference.before_window(*wide, reverse), launched(given, 0.125).o, what="o")
