"""`checkpoint_every`: bit for bit the states of shorter calls, where the docstring says that they are."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_packed import CUTS, N, cu_of, tensors_of
from tests.helpers.sanitizer.nan_fill import poisoned

OPS = "linear_attn", "gated_delta_rule"


def shorter(op, tensors, initial, first, end):
    """The state behind token end - 1 of a sequence that begins with `first`."""
    part = [x if x.dim() == 1 else x[:, first:end] for x in tensors]
    return getattr(tkq, op)(*part, initial_state=initial, output_final_state=True)[1]


@pytest.mark.parametrize("op", OPS)
def test_of_a_batch(op):
    *tensors, initial = tensors_of(op, S=300, N=1)
    with poisoned():
        o, state, found = getattr(tkq, op)(*tensors, initial_state=initial, output_final_state=True,
                                           checkpoint_every=128)
    want, last = getattr(tkq, op)(*tensors, initial_state=initial, output_final_state=True)
    assert torch.equal(o, want) and torch.equal(state, last) and found.shape == (1, 2, 4, 64, 64)
    for j in range(2):
        assert torch.equal(found[:, j], shorter(op, tensors, initial, 0, 128 * (j + 1)))


@pytest.mark.parametrize("op", OPS)
def test_of_packed_sequences(op):
    *tensors, initial = tensors_of(op)
    v_first = initial.mT.contiguous()
    with poisoned():
        o, state, found = getattr(tkq, op)(*tensors, initial_state=v_first, output_final_state=True,
                                           cu_seqlens=cu_of(), state_v_first=True, checkpoint_every=64)
    want, last = getattr(tkq, op)(*tensors, initial_state=v_first, output_final_state=True, cu_seqlens=cu_of(),
                                  state_v_first=True)
    assert torch.equal(o, want) and torch.equal(state, last)
    rows = torch.zeros(len(found), dtype=torch.bool)
    for n in range(N):
        first, end = CUTS[n:n + 2]
        for j in range((end - first) // 64):
            row = first // 64 + j
            rows[row] = True
            assert torch.equal(found[row].mT, shorter(op, tensors, initial[n:n + 1], first, first + 64 * (j + 1))[0])
    assert rows.sum() == 4 and not found[~rows.cuda()].any()


def test_numbers_that_lie():
    """Nothing outside is written."""
    *tensors, _ = tensors_of("linear_attn")
    found = [tkq.linear_attn(*tensors, cu_seqlens=cu_of((-70, 130, 64, 1 << 30)), checkpoint_every=64)[1],
             tkq.linear_attn(*tensors, cu_seqlens=cu_of((0, 130, 130, len(tensors[0][0]))), checkpoint_every=64)[1]]
    assert torch.equal(*found) and found[0].abs().amax((1, 2, 3)).gt(0).sum() >= 4
