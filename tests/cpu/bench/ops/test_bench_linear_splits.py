"""The study of splits: its candidates are what the plan chooses among, and launch what they say."""
import torch

from bench.studies import linear_splits
from tests.helpers.emulation import fake_gpu
from tkq.linear_attention.split.plan import Split


def test_candidates():
    found = linear_splits.candidates("gdn", (2, 4))
    assert {linear_splits.name_of(Split(groups, count)) for groups in (1, 2) for count in (1, 2, 4)} <= set(found)
    q, k, v = torch.zeros(3, 1, 640, 2, 128, dtype=torch.bfloat16)
    g = beta = torch.zeros(1, 640, 2)
    parts = {"whole": [None], "segments": ["states", "transfers", None, "outputs"], "alone": ["states"]}
    for name, call in found.items():
        with fake_gpu.launches() as seen:
            call(q, k, v, g, beta, g)
        assert [getattr(r.args[0], "part", None) for r, _ in seen] == parts[name.split()[-1]], name
        if len(seen[0][0].args) == 2:
            assert seen[0][0].args[1].groups == (1 if name.startswith("64") else 2)


def test_without_a_gpu(capsys):
    assert torch.cuda.is_available() or linear_splits.main([]) == 2
