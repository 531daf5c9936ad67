"""examples/llama_serve.py on the CPU: both engines give the tokens of the model that sees whole sequences, slots and
pages are used again."""
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).parents[3] / "examples"))
import llama_serve as example

SIZES = example.Sizes(vocab=50, hidden=64, wide=64, layers=2, heads=2, kv_heads=1, system=64, prompt=9, answer=5)


@pytest.mark.parametrize("engine", [example.OnTkq, example.OnTorch])
@torch.no_grad()
def test_tokens(engine):
    cpu = torch.device("cpu")
    model, system = example.Model(SIZES, cpu), torch.randint(50, (64,), generator=torch.Generator().manual_seed(2))
    requests = example.requests_of(SIZES, 5, cpu)
    made = engine(model, 2, cpu, system).capture()
    answers, _ = example.serve(made, requests)
    assert [len(a) for a in answers] == [count for _, count in requests]
    assert not made.active.any() and not made.lengths.any()
    found = example.judge(model, system, requests, answers)
    assert int(found.split("all ")[1].split()[0]) >= 5, found  # of about 20: a model that is never sure proves nothing
    with pytest.raises(AssertionError, match="differ"):
        example.judge(model, system, requests, [(a + 1) % 50 for a in answers])
