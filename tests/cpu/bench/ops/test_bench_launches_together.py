"""The study of launches at a time: both candidates are a forward and the same launches of its backward."""
import pytest
import torch

from bench.studies import launches_together
from tests.helpers.emulation import fake_gpu


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


GIVEN = {"ssd": lambda: (bf16(1, 128, 2, 64), torch.rand(1, 128, 2), -torch.rand(2), bf16(1, 128, 1, 64),
                         bf16(1, 128, 1, 64), None, None, bf16(1, 128, 2, 64)),
         "linear": lambda: (*(bf16(1, 128, 2, 128) for _ in range(3)), -torch.rand(1, 128, 2), bf16(1, 128, 2, 128))}


@pytest.mark.parametrize("kind", GIVEN)
def test_candidates(kind):
    given, found = GIVEN[kind](), []
    for call in launches_together.candidates(kind).values():
        with fake_gpu.launches() as seen:
            call(*given)
        found.append([recipe for recipe, _ in seen])
    assert found[0] == found[1] and len(found[0]) >= 4


def test_without_a_gpu():
    assert torch.cuda.is_available() or launches_together.main([]) == 2
