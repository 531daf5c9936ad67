"""tkq.scan on the GPU: numerics by the 2x rule, layouts, directions, states, the same bits in every run."""
import math

import pytest
import torch

import tkq
from tests.helpers.convolution import gradient
from tests.helpers.recurrence import check, make
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.recurrence import plan


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [1, 31, 63, 64, 65, 700])
def test_numerics(T, reverse):
    check(*make(2, T, 264), reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_fp32(reverse):
    check(*make(2, 200, 40, "fp32"), reverse=reverse)


@pytest.mark.parametrize("C, dtype", [
    (1930, "bf16"), *(pytest.param(1932, dtype, marks=pytest.mark.slow) for dtype in ("bf16", "fp32"))])
def test_several_channels_a_thread(C, dtype):
    check(*make(8, 70, C, dtype))


def test_channels_of_several_sequences_in_a_warp():
    """Few channels, and a number that is odd."""
    check(*make(7, 150, 5, "bf16"), reverse=True)


@pytest.mark.parametrize("T, C, dtype, reverse", [
    (8, 5, "bf16", False), (200, 40, "bf16", True), (776, 33, "bf16", False), (776, 33, "bf16", True),
    pytest.param(204, 40, "fp32", False, marks=pytest.mark.slow), (203, 3, "fp32", True)])
def test_contiguous_tokens(T, C, dtype, reverse):
    a, b, state = make(2, T, C, dtype, time=True)
    h, _, found = check(a, b, state, reverse=reverse)
    assert h.stride() == a.stride() == found[0].stride()


def test_layouts_agree():
    """Of steps in order, and of tokens joined by products."""
    given = make(2, 1024, 40, "fp32")
    lying = [t.detach().mT.contiguous().mT if t.dim() == 3 else t.detach() for t in given]
    found = []
    for a, b, state in (given, [t.requires_grad_() for t in lying]):
        h, final = tkq.scan(a, b, state, False, True)
        assert torch.equal(h[:, -1], final)
        found.append((h, final, *torch.autograd.grad((h, final), (a, b, state), (gradient(h), gradient(final, 2)))))
    assert found[0][0].stride() != found[1][0].stride()
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_long():
    check(*make(1, 16384 + 3, 8, "fp32"))


def test_several_lines_a_block():
    """Many short lines, one after the other, in two rounds of the warps; the last block has one."""
    check(*make(7, 1032, 1207, "bf16", time=True))


def test_long_lines():
    """Of more runs than warps, for half of the GPU, so in one segment. Of equal factors near 1, the roundings of whose
    products add up."""
    a, b, state = make(1, 8204, 67, "fp32", time=True)
    check(torch.full_like(a, 0.9997).requires_grad_(), b, state)


@pytest.mark.parametrize("reverse", [False, True])
def test_states_chain(reverse):
    a, b, state = make(2, 200, 264)
    with torch.no_grad():
        whole, last = tkq.scan(a, b, state, reverse, True)
        cut = [slice(77, None), slice(77)] if reverse else [slice(77), slice(77, None)]
        first, middle = tkq.scan(a[:, cut[0]], b[:, cut[0]], state, reverse, True)
        second, end = tkq.scan(a[:, cut[1]], b[:, cut[1]], middle, reverse, True)
    parts = (second, first) if reverse else (first, second)
    assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(last, end)


@pytest.mark.parametrize("T", [0, 200])
def test_of_no_token_and_of_none_wanted(T):
    """Plain calls, without states; T of 0 gives the states back."""
    a, b, state = make(2, T, 264)
    h = tkq.scan(a, b)
    found = torch.autograd.grad(h, (a, b), gradient(h))
    with_zeros = tkq.scan(a, b, torch.zeros_like(state), False, True)
    again = torch.autograd.grad(with_zeros, (a, b), (gradient(h), torch.zeros_like(state)))
    assert torch.equal(h, with_zeros[0]) and all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    if not T:
        h, final = tkq.scan(a, b, state, False, True)
        assert torch.equal(final, state)
        assert torch.equal(torch.autograd.grad(final, state, torch.ones_like(final))[0], torch.ones_like(final))


@pytest.mark.parametrize("wanted", ["a", "b", "state"])
def test_one_gradient(wanted):
    given = dict(zip(["a", "b", "state"], make(2, 100, 264)))
    h = tkq.scan(*given.values())
    whole = dict(zip(given, torch.autograd.grad(h, given.values(), gradient(h))))
    alone = {name: t.detach().requires_grad_(name == wanted) for name, t in given.items()}
    found, = torch.autograd.grad(tkq.scan(*alone.values()), alone[wanted], gradient(h))
    assert torch.equal(found, whole[wanted])


def test_strides_and_what_is_around():
    """Slices of a wider tensor, NaN in all the rest."""
    a, b, state = make(2, 100, 264)
    wide = torch.full((4, 102, 2, 300), math.nan, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wide[1:3, 1:101, 0, 8:272], wide[1:3, 1:101, 1, 8:272] = a, b
    views = [wide[1:3, 1:101, i, 8:272].requires_grad_() for i in range(2)]
    h, final, _ = check(*views, state)
    again = tkq.scan(a, b, state, False, True)
    assert torch.equal(h, again[0]) and torch.equal(final, again[1])


def test_lines_and_what_is_around():
    a, b, state = make(2, 104, 35, time=True)
    wide = torch.full((2, 2, 40, 120), math.nan, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wide[0, :, 3:38, 8:112], wide[1, :, 3:38, 8:112] = a.mT, b.mT
    check(*(wide[i, :, 3:38, 8:112].mT.requires_grad_() for i in range(2)), state)


def test_other_orders_are_copied_and_constants_are_not():
    a, b, state = make(2, 100, 264)
    with torch.no_grad():
        wanted = tkq.scan(a, b, state)
        assert torch.equal(tkq.scan(a, b.mT.contiguous().mT, state), wanted)
        assert torch.equal(tkq.scan(a.permute(1, 2, 0).contiguous().permute(2, 0, 1), b, state), wanted)
        decay = a[:1, :1].expand(2, 100, 264)
        assert torch.equal(tkq.scan(decay, b), tkq.scan(decay.contiguous(), b))


@pytest.mark.parametrize("factor, time", [(0.0, False), (1.0, False), (-1.0, False), (1.25, False), (1.25, True)])
def test_constant_factors(factor, time):
    """Sums, alternating sums, growth by 1e9."""
    a, b, state = make(1, 96, 264, "fp32", time=time)
    check(torch.full_like(a, factor).requires_grad_(), b, state)
    if factor == 0:
        with torch.no_grad():
            assert torch.equal(tkq.scan(torch.zeros_like(b), b), b)


@pytest.mark.parametrize("T, C, time", [(200, 264, False), (8192, 12, False), (200, 264, True), (65536, 12, True)])
def test_growth_that_nothing_feeds(T, C, time):
    """A product of factors beyond fp32, of a state that is 0: no state of any token is, behind segments neither. And
    of gradients that are 0."""
    filled = lambda x: torch.full((1, C, T) if time else (1, T, C), x, device="cuda")
    a, b = (x.mT if time else x for x in (filled(1e30), filled(0.0)))
    a.requires_grad_()
    b[:, -1] = 3
    state = torch.zeros(1, C, device="cuda", requires_grad=True)
    h, final = tkq.scan(a, b.requires_grad_(), state, False, True)
    assert torch.equal(h, b) and torch.equal(final, b[:, -1])
    dh = torch.zeros_like(h)
    dh[:, 0] = 3
    da, db, dstate = torch.autograd.grad((h, final), (a, b, state), (dh, torch.zeros_like(final)))
    assert torch.equal(db, dh) and not da.any() and torch.equal(dstate, 3 * a[:, 0])


@pytest.mark.parametrize("time", [False, True])
def test_growth_through_segments(time):
    """By 1e8 and more, of what the first token brings, and back from the last."""
    T, C, factor = (65536, 12, 1.0003) if time else (8192, 12, 1.0025)
    filled = lambda x: torch.full((2, C, T) if time else (2, T, C), x, device="cuda")
    a, b = (x.mT if time else x for x in (filled(factor), filled(0.0)))
    state = torch.zeros(2, C, device="cuda")
    b[:, 0] = 1
    given = [x.requires_grad_() for x in (a, b, state)]
    h, final = tkq.scan(*given, False, True)
    dh = torch.zeros_like(h)
    dh[:, -1] = 1
    da, db, dstate = torch.autograd.grad((h, final), given, (dh, torch.zeros_like(final)))
    powers = a[0, 0, 0].detach().double() ** torch.arange(T + 1, device="cuda")
    near = lambda found, want: torch.testing.assert_close(found.double(), want.expand_as(found), rtol=1e-3, atol=0.0)
    near(h, powers[:-1, None]), near(final, powers[T - 1]), near(db, powers[:-1].flip(0)[:, None])
    near(da[:, 1:], powers[T - 2]), near(dstate, powers[T])
    assert not da[:, 0].any()


@pytest.mark.parametrize("time", [False, True])
def test_nan_and_infinities_stay_in_their_channel_and_behind(time):
    a, b, _ = make(1, 200, 264, time=time, state=None)
    with torch.no_grad():
        a.clamp_(-0.9, 0.9)
        b[0, 100, 8], b[0, 50, 9] = math.nan, math.inf
        h = tkq.scan(a, b)
    bad = ~h.isfinite()
    assert bad[0, 100:, 8].all() and not bad[0, :100, 8].any() and bad[0, 50, 9] and not bad[0, :50, 9].any()
    assert not bad[..., :8].any() and not bad[..., 10:].any()


def test_the_same_bits():
    given = make(2, 2048, 256)
    found = [torch.autograd.grad(tkq.scan(*given), given, gradient(given[0])) for _ in range(3)]
    assert all(torch.equal(x, y) for x, y in zip(found[0], found[1])) and all(
        torch.equal(x, y) for x, y in zip(found[0], found[2]))


@pytest.mark.parametrize("reverse, time", [(False, False), (True, True)])
def test_segments(reverse, time, monkeypatch):
    """Few columns of many tokens; lines as short as those of channels, too."""
    monkeypatch.setattr(plan, "SHORTEST_LINE", plan.SHORTEST)
    a, b, state = make(2, 8192, 12, "fp32", time=time)
    check(a, b, state, reverse=reverse)
    with torch.no_grad():
        found = [tkq.scan(a, b, state, reverse, True) for _ in range(2)]
        alone = tkq.scan(a[:, 1:], b[:, 1:], state, reverse)  # of an odd number of tokens
    assert all(torch.equal(x, y) for x, y in zip(*found))
    torch.testing.assert_close(alone[:, 4000:], found[0][0][:, 4001:], rtol=1e-4, atol=1e-4)
