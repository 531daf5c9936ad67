"""examples/hybrid_train.py on the CPU: PyTorch's side of it computes what tkq's does."""
import pathlib
import sys

import pytest
import torch

from tkq.reference.linear_attention import linear_attn as recurrence

sys.path.append(str(pathlib.Path(__file__).parents[3] / "examples"))
import hybrid_train


@pytest.mark.parametrize("tokens", [1, 64, 65, 150])
def test_the_rule_in_chunks(tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, tokens, 2, n, dtype=torch.float64) for n in (8, 8, 12))
    g, beta = -torch.rand(2, tokens, 2, dtype=torch.float64), torch.rand(2, tokens, 2, dtype=torch.float64)
    unit = torch.nn.functional.normalize
    want, _ = recurrence(unit(q, dim=-1), unit(k, dim=-1), v, g, beta=beta)
    torch.testing.assert_close(hybrid_train.chunked_delta_rule(q, k, v, g, beta), want)


def test_a_step_of_both():
    """Losses and gradients, from the same weights on the same tokens."""
    torch.manual_seed(0)
    model, found = hybrid_train.Hybrid(hybrid_train.SMALL), {}
    ids = hybrid_train.language(hybrid_train.SMALL, 1, "cpu")[0]
    for ops in (hybrid_train.TKQ, hybrid_train.TORCH):
        model.ops = ops
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids)
        loss.backward()
        found[ops.name] = loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])
    (mine, gradients), (theirs, right) = found["tkq"], found["torch"]
    assert abs(mine - theirs) < 2e-3 * theirs and (gradients - right).norm() < 0.06 * right.norm()


def test_how_far_curves_are_apart():
    a = [float(i) for i in range(1, 31)]
    assert hybrid_train.apart(a, a) == 0 and hybrid_train.apart([1.01 * x for x in a], a) == pytest.approx(0.01)
    assert hybrid_train.apart([2.0, 2.0], [1.0, 3.0]) == 0  # fewer than ten: one mean


def test_the_language_has_something_to_learn():
    """Half of the words are the ones that follow their predecessors always."""
    ids = hybrid_train.language(hybrid_train.Sizes(words=300, batch=4, tokens=500), 2, "cpu")
    assert ids.shape == (2, 4, 501) and ids.min() >= 0 and ids.max() < 300
    pairs = torch.zeros(300, 300).index_put_((ids[..., :-1].flatten(), ids[..., 1:].flatten()), torch.ones(()), True)
    assert 0.45 < pairs.amax(1).sum() / pairs.sum() < 0.65
