"""A call that the call cache refuses goes on with the result that was allocated for it."""
import pytest
import torch

from tkq.losses import launch as losses
from tkq.pointwise import gated_ops
from tkq.reference.losses import Terms
from tkq.runtime.call import alloc
from tkq.softmax import ops as softmax

X, Y = torch.randn(5, 48), torch.randn(5, 48)


@pytest.fixture
def made(monkeypatch):
    """The tensors that were made since."""
    found = []

    def noted(make):
        def run(*args, **options):
            found.append(make(*args, **options))
            return found[-1]
        return run

    monkeypatch.setattr(alloc, "empty", noted(alloc.empty))
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, noted(getattr(torch, name)))
    return found


def refuse(*_):
    raise ValueError("dispatcher: nothing is known of such a call")


def alike(made, result):
    """All that was made of the result's size is the result."""
    return [t.data_ptr() for t in made if t.shape == result.shape].count(result.data_ptr()) and all(
        t.data_ptr() == result.data_ptr() for t in made if t.shape == result.shape)


@pytest.mark.parametrize("known", [True, False])
def test_softmax(monkeypatch, made, known):
    places = {False: refuse, (False, -1, X.dtype, 48): refuse} if known else {}
    monkeypatch.setattr(softmax, "_launch_cache", places)
    monkeypatch.setattr(softmax, "_run", lambda x, tensors, *_: tensors[-1].fill_(3.0))
    for call in (lambda: softmax._launch(X, 1.0, False), lambda: softmax._launch_backward(X, Y, 1.0, False)):
        made.clear()
        result = call()
        assert (result == 3.0).all() and alike(made, result)


@pytest.mark.parametrize("log", [False, True])
def test_the_op_of_softmax_looks_at_the_scale(monkeypatch, log):
    """As a compiled program calls it, where the launcher is known, which does not."""
    launched = []
    monkeypatch.setattr(softmax, "_launch_cache", {log: lambda *given: launched.append(given)})
    softmax._cuda(X, 0.5, log)
    with pytest.raises(ValueError, match=f"{'log_' * log}softmax: scale: got nan"):
        softmax._cuda(X, float("nan"), log)
    assert len(launched) == 1


@pytest.mark.parametrize("up", [Y, None])
def test_gated(monkeypatch, made, up):
    packing = "split" if up is None else "apart"
    monkeypatch.setattr(gated_ops, "_launch_cache", {("swiglu", packing): refuse})
    monkeypatch.setattr(gated_ops, "_launch", lambda x, u, dy, out, *_: out.fill_(3.0))
    result = gated_ops._plain(X, up, "swiglu", packing)
    assert result.shape == (5, 24 if up is None else 48) and (result == 3.0).all() and alike(made, result)


@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy(monkeypatch, made, inplace):
    logits, target = X.clone(), torch.arange(5)
    terms = Terms(reduction="none")
    key = -1, "backward", logits.dtype, 48, target.dtype, False, "none", False, False, True, False
    monkeypatch.setattr(losses, "_launch_cache", {key: refuse})
    monkeypatch.setattr(losses, "launcher", lambda *_: lambda *given: given[6].fill_(3.0))
    result = losses.backward(logits, target, torch.ones(5), torch.zeros(12), terms, inplace)
    assert (result == 3.0).all() and (result is logits if inplace else alike(made, result))
