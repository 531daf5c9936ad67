"""What final states' gradients give to the inputs' and to the initial states', and which strides kernels see."""
import pytest
import torch

from tkq.convolution import ops
from tkq.convolution.launch import readable
from tkq.convolution.states import add_final_gradient
from tkq.reference import convolution as reference

PACKED = [[0, 1, 1, 5, 9], [2, 4, 4, 8], [9, 9], [0, 0, 2, 4, 6, 6]]


@pytest.mark.parametrize("cuts", [None, *PACKED])
def test_final_states_gradients_are_the_references(cuts):
    torch.manual_seed(0)
    cu = None if cuts is None else torch.tensor(cuts)
    B, N = (2, 2) if cuts is None else (1, len(cuts) - 1)
    x, weight, state = (torch.randn(s, dtype=torch.float64) for s in ((B, 9, 5), (5, 4), (N, 5, 3)))
    dx, dstate, dfinal = torch.zeros_like(x), torch.zeros_like(state), torch.randn_like(state)
    wanted = reference.causal_conv1d_backward(torch.zeros_like(x), dfinal, x, weight, None, None, state, cu)
    add_final_gradient(dx, dstate, dfinal, cu, 9)
    assert torch.equal(dx, wanted[0]) and torch.equal(dstate, wanted[-1])


@pytest.mark.parametrize("cuts", [None, [0, 3, 5]])
def test_final_states_gradients_are_not_rounded_before_they_are_added(cuts):
    """Half a unit in the last place of 1 and a little: rounded by themselves first they would leave 1 as it is."""
    dx = torch.ones(1, 5, 2, dtype=torch.bfloat16)
    cu = None if cuts is None else torch.tensor(cuts)
    add_final_gradient(dx, None, torch.full((1 if cuts is None else 2, 2, 1), 2**-8 + 2**-17), cu, 5)
    last = torch.zeros(5, dtype=torch.bool)
    last[[4] if cuts is None else [2, 4]] = True
    assert torch.equal(dx[0, :, 0], torch.where(last, 1 + 2**-7, 1.0).bfloat16())


def test_one_channel_of_any_stride():
    x = torch.randn(2, 5, 3)[:, :, ::3]
    assert x.stride(2) == 3
    found = readable(x, False)
    assert found.stride() == (15, 3, 1) and found.data_ptr() == x.data_ptr() and torch.equal(found, x)


def test_the_gradient_of_an_initial_state_alone():
    """Of fewer tokens than a state has, the final one hands some of its own on."""
    x, weight, state = torch.randn(1, 2, 8), torch.randn(8, 4), torch.randn(1, 8, 3)
    dy, dfinal = torch.randn(1, 2, 8), torch.randn(1, 8, 3)
    *_, found = ops._backward_cuda(dy, dfinal, x, weight, None, None, state, None, 0, 128, False, False, True)
    *_, wanted = reference.causal_conv1d_backward(dy, dfinal, x, weight, None, None, state, None)
    torch.testing.assert_close(found, wanted)
