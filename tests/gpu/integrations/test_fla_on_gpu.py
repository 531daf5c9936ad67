"""tkq.integrations.fla on a GPU: each function against float64, forward and backward."""
import pytest
import torch

from tests.helpers import fla_calls
from tests.helpers.sanitizer.nan_fill import poisoned


def near(found, want, what):
    error = ((found.double() - want).norm() / want.norm()).item()
    assert error < 0.02, (what, error)  # q, k and v are of 16 bits, and so are the engine's operands


@pytest.mark.parametrize("name", fla_calls.SIGNATURES)
def test_results_and_gradients(name):
    given = fla_calls.inputs(name, 130, 64, 64, "cuda")
    if name in fla_calls.COLUMNS:  # by kernels that other tests have; states of these functions go through on a CPU
        given = {n: x for n, x in given.items() if n not in ("initial_state", "output_final_state")}
    leaves = {n: x.detach().requires_grad_() for n, x in given.items() if isinstance(x, torch.Tensor)}
    wide = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    want, last = fla_calls.exact(name, given | wide)
    with poisoned():
        found, state = fla_calls.call(name, given | leaves)
        do = torch.randn_like(found)
        mine = torch.autograd.grad(found, list(leaves.values()), do)
    near(found, want, "o")
    if state is None:
        state = last = ()
    state, last = (x if isinstance(x, tuple) else (x,) for x in (state, last))
    for a, b in zip(state, last):
        near(a, b, "state")
    for n, a, b in zip(leaves, mine, torch.autograd.grad(want, list(wide.values()), do.double())):
        near(a, b, n)
