"""The study of launches at a time: both candidates are a forward and the same launches of its backward, at a time in
one of them."""
import pytest
import torch

from bench.studies import launches_together
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention import launch
from tkq.linear_attention.split import together


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


S = together.SHORTEST
GIVEN = {"ssd": lambda: (bf16(1, S, 2, 64), torch.rand(1, S, 2), -torch.rand(2), bf16(1, S, 1, 64), bf16(1, S, 1, 64),
                         None, None, bf16(1, S, 2, 64)),
         "linear": lambda: (*(bf16(1, S, 2, 128) for _ in range(3)), -torch.rand(1, S, 2), bf16(1, S, 2, 128))}


@pytest.mark.parametrize("kind", GIVEN)
def test_candidates(kind, monkeypatch):
    asked = []

    def noted(calls, hows):
        """Where there are no streams."""
        asked.append(len(found))
        return [launch.launch(together.laid_out(given, how), scale) for (given, scale), how in zip(calls, hows)]

    monkeypatch.setattr(together, "_at_a_time", noted)
    given, found = GIVEN[kind](), []
    for call in launches_together.candidates(kind).values():
        with fake_gpu.launches() as seen:
            call(*given)
        found.append([recipe for recipe, _ in seen])
    assert found[0] == found[1] and len(found[0]) >= 4 and asked == [0], "the first, at a time"


def test_without_a_gpu():
    assert torch.cuda.is_available() or launches_together.main([]) == 2
