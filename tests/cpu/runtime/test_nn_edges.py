"""Modules and functions at the edges of what torch's take: nothing, and gradients of several at a time."""
import pytest
import torch

import tkq
import tkq.nn


def test_empty_batches_in_any_order():
    """They have no neighbours that might lie apart; `contiguous` leaves their strides as they are."""
    x = torch.empty(0, 4, 8).transpose(1, 2)
    assert tkq.nn.RMSNorm(4)(x).shape == tkq.nn.LayerNorm(4)(x).shape == tkq.rmsnorm(x).shape == x.shape
    assert tkq.swiglu(x.contiguous()).shape == (0, 8, 2)
    loss = tkq.nn.CrossEntropyLoss(reduction="sum")(torch.empty(0, 4, 3), torch.empty(0, 3, dtype=torch.long))
    assert loss == 0


def test_a_linear_layer_without_inputs_is_its_bias():
    layer = tkq.nn.Linear(0, 8).bfloat16()
    assert torch.equal(layer(torch.empty(2, 3, 0).bfloat16()), layer.bias.expand(2, 3, 8))


def test_gradients_of_a_batch_at_a_time_are_refused_by_name():
    x = torch.randn(4, 8, requires_grad=True)
    for name, y in (("rmsnorm", tkq.rmsnorm(x)), ("softmax", tkq.softmax(x)), ("swiglu", tkq.swiglu(x))):
        with pytest.raises(NotImplementedError, match=f"{name}.*gradients of a batch at a time"):
            torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)
