"""Gradients of linear attention against autograd of the recurrence in float64."""
import pytest
import torch

from tests.gpu.linear_attention.test_linear_forward import chunked, make
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.linear_attention.gradients import Saved, backward
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x

NAMES = "dq", "dk", "dv", "dg", "dinitial"


def gradients(of, do, dfinal, given):
    """By autograd; None for what there is not."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in given]
    q, k, v, g, initial = leaves
    o, final = of(q, k, v, g, initial)
    wanted = [x for x in leaves if x is not None]
    found = iter(torch.autograd.grad((o, final), wanted, (do.to(o.dtype), dfinal.to(final.dtype))))
    return [None if x is None else next(found) for x in leaves]


def exactly(q, k, v, g, initial):
    return recurrence(q, k, v, g, initial_state=initial)


def check(q, k, v, g, initial, scale):
    do = torch.randn_like(v)
    dfinal = torch.randn(len(q), v.shape[2], q.shape[3], v.shape[3], device="cuda")
    with poisoned():
        got = backward(Saved(q, k, v, g, initial), scale, do, dfinal)
    given = [q, k, v, g, initial]
    want = gradients(exactly, do, dfinal, [None if x is None else x.double() for x in given])
    other = gradients(chunked, do, dfinal, given)
    for name, mine, exact, theirs in zip(NAMES, got, want, other):
        if exact is None:
            assert mine is None
            continue
        rows = exact.shape[-1]
        # tensor cores cut off what they add to a sum of fp32: an ulp for each 16 tokens at most
        ulps = 1 + q.shape[1] / 16 if mine.dtype == torch.float32 else 1
        assert_2x(mine.reshape(-1, rows), exact.reshape(-1, rows), theirs.reshape(-1, rows), ulps=ulps,
                  bias_ulps=ulps - 1, what=name)


@pytest.mark.parametrize("S, K, V, gate", [
    (2, 64, 64, "token"), (64, 64, 64, "token"), (300, 64, 64, "token"), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in ((65, 128, 64, "head"), (64, 64, 128, "none"))),
    (300, 128, 128, "token"), (65, 128, 128, "token")])
def test_gradients(S, K, V, gate):
    given = make(2, S, 3, 3, K, V, gate)
    check(*given, torch.randn(2, 3, K, V, device="cuda"), K**-0.5)


def test_shared_heads():
    check(*make(1, 200, 2, 6, 64, 64, "token"), None, 0.125)
