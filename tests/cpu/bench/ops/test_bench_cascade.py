"""The study of shared prefixes: its candidates launch what they say, on inputs that share a prefix."""
import torch

from bench.studies import cascade
from tests.helpers.emulation import fake_gpu


def test_candidates(monkeypatch):
    monkeypatch.setattr(cascade, "randn", lambda seed, *shape: torch.zeros(shape, dtype=torch.bfloat16))
    given = cascade.inputs(0, 3, 72, (8, 2), 16)
    table = given[4]
    assert (table[:, :4] == table[0, :4]).all() and len(table.unique()) == 4 + 3 * 17 == len(given[1])
    for name, call in cascade.candidates(72).items():
        with fake_gpu.launches() as seen:
            call(*given)
            planned = len(seen)
            call(*given)
        kinds = [recipe.builder.partition(":")[2] for recipe, _ in seen[planned:]]
        assert kinds == (["Decode", "Decode", "MergeState"] if name == "read once" else ["Decode"]), name
        assert planned - len(kinds) == (2 if name == "read once" else 1)  # plans


def test_without_a_gpu(capsys):
    assert torch.cuda.is_available() or cascade.main([]) == 2
