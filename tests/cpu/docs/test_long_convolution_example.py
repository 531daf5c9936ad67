"""examples/long_convolution_train.py on the CPU: both sides compute the same, and what is asked can be known."""
import math
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).parents[3] / "examples"))
import long_convolution_train as example


def test_both_sides():
    (ours, _), (theirs, _) = (example.train(example.SMALL, 3, f, torch.device("cpu"))
                              for f in (example.on_tkq, example.on_torch))
    assert example.apart(ours, theirs) < 0.01


@pytest.mark.parametrize("ours, status", [
    (1.0, 0), (1.0099, 0), (0.9901, 0), (1.011, 1), (0.989, 1), (math.nan, 1), (math.inf, 1)])
def test_it_fails_where_losses_are_apart(ours, status, monkeypatch, capsys):
    """By the last tenth of the steps, whatever was before."""
    losses = {example.on_tkq: [9.0] * 18 + [ours * 0.4, ours * 0.6], example.on_torch: [1.0] * 18 + [0.5, 0.5]}
    monkeypatch.setattr(example, "train", lambda sizes, steps, convolve, device: (losses[convolve], 1.0))
    assert example.main(["--steps", "20"]) == status
    assert ("failed" in capsys.readouterr().out) == bool(status)


def test_what_is_asked_has_been_said():
    sizes = example.Sizes(keys=4, batch=3, tokens=20)
    (ids, target), = example.recall(sizes, 1, "cpu")
    asked = 0
    for row, wanted in zip(ids.tolist(), target.tolist()):
        known = {}
        for t in range(0, 20, 2):
            assert wanted[t] == known.get(row[t], -1) and wanted[t + 1] == -1
            known[row[t]] = row[t + 1]
            asked += wanted[t] >= 0
    assert asked > 10
