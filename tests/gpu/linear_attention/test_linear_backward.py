"""Gradients of linear attention against autograd of the recurrence in float64."""
import pytest
import torch

from tests.gpu.linear_attention.test_linear_forward import chunked, make
from tkq.linear_attention import launch
from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.testing import assert_2x


def truth(do, dfinal, q, k, v, g, initial, of=recurrence):
    given = [x.double().requires_grad_() for x in (q, k, v)]
    start = None if initial is None else initial.double().requires_grad_()
    o, final = of(*given, g, initial_state=start)
    wanted = [*given] + ([start] if start is not None else [])
    return torch.autograd.grad((o, final), wanted, (do.double(), dfinal.double()))


def peer(do, dfinal, q, k, v, g, initial):
    """The same of the chunked form, whose products are rounded as the kernel's are, in PyTorch's autograd."""
    given = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    start = None if initial is None else initial.detach().clone().requires_grad_()
    o, final = chunked(*given, g, start)
    wanted = [*given] + ([start] if start is not None else [])
    return torch.autograd.grad((o, final), wanted, (do, dfinal))


@pytest.mark.parametrize("gate", ["none", "head", "token"])
@pytest.mark.parametrize("S, K, V", [(1, 64, 64), (64, 64, 128), (65, 128, 64), (300, 128, 128)])
def test_gradients(gate, S, K, V):
    q, k, v, g = make(2, S, 3, 3, K, V, gate)
    initial, dfinal = torch.randn(2, 3, K, V, device="cuda"), torch.randn(2, 3, K, V, device="cuda")
    do = torch.randn_like(v)
    got = launch.backward(do, q, k, v, g, K**-0.5, initial, dfinal, True)
    want, other = truth(do, dfinal, q, k, v, g, initial), peer(do, dfinal, q, k, v, g, initial)
    for name, mine, exact, theirs in zip(("dq", "dk", "dv", "dinitial"), got, want, other):
        flat = (0, 2) if name == "dinitial" else (0, 1)
        assert_2x(mine.flatten(*flat), exact.flatten(*flat), theirs.flatten(*flat), what=name)


def test_shared_heads():
    q, k, v, g = make(1, 200, 2, 6, 64, 64, "token")
    do = torch.randn_like(v)
    dq, dk, dv, _ = launch.backward(do, q, k, v, g, 0.125)
    wide = [x.repeat_interleave(3, 2) for x in (q, k)]
    zero = torch.zeros(1, 6, 64, 64, device="cuda")
    want = truth(do, zero, *wide, v, g, None)
    other = peer(do, zero, *wide, v, g, None)
    for name, mine, exact, theirs in zip(("dq", "dk", "dv"), (dq, dk, dv), want, other):
        assert_2x(mine.flatten(0, 1), exact.flatten(0, 1), theirs.flatten(0, 1), what=name)
