"""cross_entropy's gradient over the logits, and with the loss in one pass: leaves, tracing, strides."""
import pytest
import torch

import tkq
from tkq.reference.losses import Terms


def test_a_leaf_is_not_written_over_by_the_backward():
    logits, target = torch.randn(6, 9), torch.arange(6)
    leaf = logits.clone().requires_grad_()
    for x in (leaf, leaf[:, :9], leaf.view(2, 3, 9)):
        with pytest.raises(RuntimeError, match="cross_entropy: logits is a leaf that requires a gradient"):
            tkq.cross_entropy(x, target.view(x.shape[:-1]), inplace_backward=True)
    wanted, = torch.autograd.grad(tkq.cross_entropy(leaf, target), leaf)
    for x in (leaf * 1, (leaf * 1).view(6, 9)):
        found, = torch.autograd.grad(tkq.cross_entropy(x, target, inplace_backward=True), leaf)
        assert torch.equal(found, wanted)
    assert torch.equal(leaf, logits) and not tkq.cross_entropy(logits, target, inplace_backward=True).requires_grad
    with torch.no_grad():
        tkq.cross_entropy(leaf, target, inplace_backward=True)  # there is no backward


@pytest.mark.parametrize("options", [dict(), dict(reduction="sum", label_smoothing=0.1, softcap=5.0)])
def test_loss_and_gradient_at_once_are_traced(options):
    logits, target, weight = torch.randn(6, 9), torch.arange(6), torch.rand(9)
    terms = Terms(weight, -100, options.get("reduction", "mean"), options.get("label_smoothing", 0.0), 0.0,
                  options.get("softcap", 0.0))
    torch.library.opcheck(torch.ops.tkq.cross_entropy_and_gradient, (logits, target, *terms),
                          test_utils=("test_schema", "test_faketensor"))
    wanted = tkq.cross_entropy_and_gradient(logits, target, weight=weight, **options)
    torch._dynamo.reset()
    for inplace in (False, True):
        run = torch.compile(lambda x, inplace=inplace: tkq.cross_entropy_and_gradient(
            x, target, weight=weight, inplace=inplace, **options), fullgraph=True, backend="aot_eager")
        for requires_grad in (False, True):
            given = logits.clone().requires_grad_(requires_grad)
            found = run(given)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted))
            assert torch.equal(given, wanted[1] if inplace else logits) and not found[0].requires_grad


def test_rows_with_room_behind_them_have_a_gradient_like_it_traced_too():
    """As far apart as the logits' rows, in a fake tensor as in a real one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    logits, target = torch.randn(6, 66)[:, :64], torch.arange(6)
    with FakeTensorMode() as mode:
        fake = tkq.cross_entropy_and_gradient(*map(mode.from_tensor, (logits, target)))[1]
    assert fake.stride() == (66, 1) and fake.shape == logits.shape


def test_what_autograd_forbids_is_refused():
    """A leaf, or a view of one, written over; a gradient of class weights: there is none."""
    leaf, target = torch.randn(3, 8, requires_grad=True), torch.tensor([1, 2, 3])
    before = leaf.detach().clone()
    for logits in (leaf, leaf[:2]):
        with pytest.raises(RuntimeError, match="cross_entropy_and_gradient: logits is a leaf that requires a gradient"):
            tkq.cross_entropy_and_gradient(logits, target[:len(logits)], inplace=True)
    assert torch.equal(leaf, before)
    with torch.no_grad():
        tkq.cross_entropy_and_gradient(leaf, target, inplace=True)
    weight = torch.rand(8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="cross_entropy_and_gradient: weight requires a gradient"):
        tkq.cross_entropy_and_gradient(torch.randn(3, 8), target, weight=weight)
