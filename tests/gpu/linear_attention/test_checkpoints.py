"""`checkpoint_every`: bit for bit the states of shorter calls, where the docstring says that they are."""
import pytest
import torch

import tkq
from tests.gpu.linear_attention.test_packed import CUTS, N, cu_of, tensors_of
from tests.gpu.linear_attention.test_ssd_forward import make
from tests.helpers.sanitizer.nan_fill import poisoned

OPS = "linear_attn", "gated_delta_rule"


def shorter(op, tensors, initial, first, end, **more):
    """The state behind token end - 1 of a sequence that begins with `first`."""
    part = [x[:, first:end] for x in tensors]
    return getattr(tkq, op)(*part, initial_state=initial, output_final_state=True, **more)[1]


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
            want = shorter(op, tensors, initial[n:n + 1], first, first + 64 * (j + 1),
                           cu_seqlens=cu_of((0, 64 * (j + 1))))
            assert torch.equal(found[row].mT, want[0])
    assert rows.sum() == 4 and not found[~rows.cuda()].any()


def test_numbers_that_lie():
    """Nothing outside is written."""
    *tensors, initial = tensors_of("linear_attn", N=3)
    found = [tkq.linear_attn(*tensors, initial_state=initial, output_final_state=True, cu_seqlens=cu_of(cuts),
                             checkpoint_every=64)[2]
             for cuts in ((-70, 130, 64, 1 << 30), (0, 130, 130, tensors[0].shape[1]))]
    assert torch.equal(*found) and found[0].abs().amax((1, 2, 3)).gt(0).sum() >= 4


def test_of_mamba2():
    given = make(2, 200, without=())
    call = lambda given, **more: tkq.mamba2_ssd(*given[:9], given.softplus, given.limit, True, **more)
    with poisoned():
        y, states, found = call(given, checkpoint_every=64)
    want, last = call(given)
    assert torch.equal(y, want) and torch.equal(states, last) and found.shape == (2, 3, 4, 64, 128)
    for j in range(3):
        part = {name: getattr(given, name)[:, :64 * (j + 1)] for name in ("x", "dt", "B", "C", "z")}
        assert torch.equal(found[:, j], call(given._replace(**part))[1])
