"""What modules of tkq.nn refuse when they are made, which no forward would take, and what they copy."""
import pytest
import torch
from torch import nn

import tkq

BF16 = torch.bfloat16
X, TARGET = torch.linspace(-1.0, 1.0, 6).view(2, 3), torch.tensor([0, 2])
WEIGHT = torch.tensor([1.0, 9.0, 2.0, 9.0, 3.0, 9.0])[::2]


@pytest.mark.parametrize("make, error, words", [
    (lambda: tkq.nn.LinearCrossEntropyLoss(8, 1 << 20, device="meta"), NotImplementedError, "num_classes is 1048576"),
    (lambda: tkq.nn.LinearCrossEntropyLoss(8, 3, weight=torch.ones(4)), ValueError, r"weight: shape is \(4,\)"),
    (lambda: tkq.nn.LinearCrossEntropyLoss(8, 3, weight=[1, 1, 1]), TypeError, "weight: got list"),
    (lambda: tkq.nn.CrossEntropyLoss(torch.ones(1, 3)), ValueError, "weight: has 2 dimensions"),
    (lambda: tkq.nn.CrossEntropyLoss(reduction="avg"), ValueError, "reduction: got 'avg'"),
    (lambda: tkq.nn.CrossEntropyLoss(label_smoothing=2), ValueError, "label_smoothing: got 2"),
    (lambda: tkq.nn.CrossEntropyLoss(ignore_index=1.5), TypeError, "ignore_index: got float"),
    (lambda: tkq.nn.RotaryEmbedding(8192, 2), NotImplementedError, "dim: got 8192"),
    (lambda: tkq.nn.RotaryEmbedding(15, 4), ValueError, "dim: got 15"),
    (lambda: tkq.nn.HyenaFilterConv(1 << 25, 1, device="meta"), NotImplementedError, "heads is 33554432"),
    (lambda: tkq.nn.Softmax("a"), TypeError, "dim: got str"),
    (lambda: tkq.nn.LogSoftmax(1.5), TypeError, "dim: got float"),
    (lambda: tkq.nn.RMSNorm(8, eps=-1.0), ValueError, "eps: got -1.0"),
    (lambda: tkq.nn.LayerNorm(8, eps="a"), TypeError, "eps: got str"),
    (lambda: tkq.nn.Linear(7, 8), ValueError, "in_features is 7, allowed are multiples of 8"),
])
def test_refused_when_it_is_made(make, error, words):
    with pytest.raises(error, match=rf"\w+: {words}"):
        make()


def test_a_float8_layer_that_was_cast_names_its_weight():
    with pytest.raises(TypeError, match=r"Fp8Linear: weight: dtype is torch.float64"):
        tkq.nn.Fp8Linear(16, 16).double()(torch.ones(2, 16))


def test_a_loss_s_weights_of_classes_are_copied_where_they_must():
    torch.testing.assert_close(tkq.nn.CrossEntropyLoss(WEIGHT)(X, TARGET), nn.CrossEntropyLoss(WEIGHT)(X, TARGET))
    loss = tkq.nn.LinearCrossEntropyLoss(8, 3, weight=WEIGHT)
    x = torch.linspace(-1.0, 1.0, 16).view(2, 8).to(BF16)
    found = loss(x, TARGET)
    loss.weight = WEIGHT.contiguous()
    assert torch.equal(found, loss(x, TARGET))


def test_a_loss_as_torch_s_older_arguments_have_it():
    assert tkq.nn.CrossEntropyLoss(size_average=False).reduction == "sum"
    assert tkq.nn.CrossEntropyLoss(reduce=False)(X, TARGET).shape == (2,)


def test_all_that_a_long_convolution_is_made_of_is_shown():
    shown = repr(tkq.nn.HyenaFilterConv(1, 4, fast=3.0, slow=0.5, precision="split"))
    assert "heads=1, max_tokens=4, fast=3.0, slow=0.5, precision='split'" in shown
