"""Gradients of more than 2^31 elements: rows at the end as in a small problem of them alone."""
import pytest
import torch

from tkq.attention.arguments import Lengths, Options
from tkq.attention.backward import ops, varlen_ops

HEADS, DIM, FEW, LAST = 128, 128, 130, 1000
MANY = (1 << 31) // (HEADS * DIM) + 5000


def run(packed, tensors):
    """(dq, dk, dv) of (do, q, k, v, o, lse)."""
    found = [torch.full_like(x, float("nan")) for x in tensors[1:4]]
    if not packed:
        ops.run((*tensors, None), found, Options(False))
        return found
    (rows, keys), flat = (x.shape[1] for x in tensors[1:3]), [x[0] for x in tensors]
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (rows, keys))
    varlen_ops.run((*flat, None), [x[0] for x in found], Lengths(cu_q, cu_k, None, None, rows, keys),
                            Options(False))
    return found


def new(rows):
    """In [-1, 1), of memory for little more than itself."""
    return torch.empty(1, rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16).uniform_(-1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("packed", (False, True))
def test_dq(packed):
    """A row's gradient depends on no other row."""
    q, do, o, k, v = new(MANY), new(MANY), new(MANY), new(FEW), new(FEW)
    lse = torch.full((1, HEADS, MANY), 5.0, device="cuda")
    dq = run(packed, (do, q, k, v, o, lse))[0]
    last = [x[:, -LAST:].contiguous() for x in (do, q, o)]
    small = run(packed, (last[0], last[1], k, v, last[2], lse[:, :, -LAST:].contiguous()))[0]
    torch.testing.assert_close(dq[:, -LAST:], small, rtol=2 ** -7, atol=1e-5)
    assert all(bool(dq[:, i].isfinite().all()) and bool(dq[:, i].any()) for i in (0, MANY // 2, MANY - 1))


@pytest.mark.slow
@pytest.mark.parametrize("packed", (False, True))
def test_dk_and_dv(packed):
    """A key's gradients depend on no other key, given lse and o."""
    k, v, q, do, o = new(MANY), new(MANY), new(FEW), new(FEW), new(FEW)
    lse = torch.full((1, HEADS, FEW), 5.0, device="cuda")
    found = run(packed, (do, q, k, v, o, lse))[1:]
    last = [x[:, -LAST:].contiguous() for x in (k, v)]
    for big, small in zip(found, run(packed, (do, q, *last, o, lse))[1:]):
        assert big.numel() > 1 << 31
        torch.testing.assert_close(big[:, -LAST:], small, rtol=2 ** -7, atol=1e-5)
        assert all(bool(big[:, i].isfinite().all()) and bool(big[:, i].any()) for i in (0, MANY // 2, MANY - 1))
