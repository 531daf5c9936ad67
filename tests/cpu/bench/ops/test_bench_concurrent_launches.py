"""The study of concurrent launches: both candidates are a forward and the same launches of its backward, which are
concurrent in one of them."""
import pytest
import torch

from bench.studies import concurrent_launches
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention import launch
from tkq.linear_attention.split import concurrent


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


S = concurrent.SHORTEST
GIVEN = {"ssd": lambda: (bf16(1, S, 2, 64), torch.rand(1, S, 2), -torch.rand(2), bf16(1, S, 1, 64), bf16(1, S, 1, 64),
                         None, None, bf16(1, S, 2, 64)),
         "linear": lambda: (*(bf16(1, S, 2, 128) for _ in range(3)), -torch.rand(1, S, 2), bf16(1, S, 2, 128))}


@pytest.mark.parametrize("kind", GIVEN)
def test_candidates(kind, monkeypatch):
    asked = []

    def noted(calls, hows):
        """Where there are no streams."""
        asked.append(len(found))
        return [launch.launch(concurrent.laid_out(given, how), scale) for (given, scale), how in zip(calls, hows)]

    monkeypatch.setattr(concurrent, "_on_streams", noted)
    given, found = GIVEN[kind](), []
    for call in concurrent_launches.candidates(kind).values():
        with fake_gpu.launches() as seen:
            call(*given)
        found.append([recipe for recipe, _ in seen])
    assert found[0] == found[1] and len(found[0]) >= 4 and asked == [0], "the first"


def test_without_a_gpu():
    assert torch.cuda.is_available() or concurrent_launches.main([]) == 2
