"""The tasks of attention's forward over packed sequences, as the producer warp finds them by its own functions, where
cu_seqlens rise and where they do not; and what plain PyTorch makes of such cu_seqlens."""
import random
from functools import lru_cache

import numpy
import pytest
import torch

from tests.cpu.attention.backward.test_attention_backward_packed_cpu import disturb
from tests.helpers.emulation.warp import Memory, instead_of_the_dsl
from tests.helpers.emulation.written import as_written
from tkq import reference
from tkq.attention.common import bounds, tile_order
from tkq.attention.common.integers import ceil_div
from tkq.attention.forward import tile_scheduler
from tkq.attention.forward.tile_scheduler import Scan, Varlen

QUERIES, BLOCK, HEADS = 128, 128, 2


class Simulated(Varlen):
    """The functions that cute.jit decorates, as they are written."""

    def survey(self, falls):
        return as_written(Varlen.survey)(self, falls)

    def surveyed(self):
        return as_written(Varlen.surveyed)(self)


class SimulatedScan(Scan):
    def advance(self):
        as_written(Scan.advance)(self)


@pytest.fixture(autouse=True)
def warp(monkeypatch):
    instead_of_the_dsl(monkeypatch, tile_scheduler, bounds)
    for of, name in ((tile_scheduler, "edges_of"), (bounds.Bounds, "highest")):
        monkeypatch.setattr(of, name, lru_cache(None)(as_written(getattr(of, name))))
    monkeypatch.setattr(tile_scheduler, "work_rank", numpy.vectorize(lambda blocks: tile_order.work_rank(int(blocks))))


def found(cu_q, cu_k, totals, used):
    """All tasks, in order."""
    sequences = Simulated(Memory(cu_q), Memory(cu_k), *used, *totals, HEADS, 1, QUERIES, BLOCK, 512, 1 << 24, True)
    tiles, marks = sequences.surveyed()
    scan = SimulatedScan(sequences, [0] * 4)
    scan.start(marks)
    return [as_written(Scan.find)(scan, number) for number in range(tiles * HEADS)]


@pytest.mark.parametrize("count", [1, 3, 31, 32, 33, 70])
def test_falling_and_huge_cu_seqlens_are_those_of_empty_sequences(count):
    draw = random.Random(count)
    sizes = [[draw.choice((0, 0, 1, 64, 128, 129, 500)) for _ in range(count)] for _ in "qk"]
    spare = draw.choice((0, 77))
    cus = [numpy.cumsum([0, *n]).tolist() for n in sizes]
    totals = [cu[-1] + spare for cu in cus]
    used = [Memory([n // 2 for n in of]) for of in sizes] if count % 2 else (None, None)
    wanted = found(*cus, totals, used)
    assert all(task.tile * QUERIES < task.rows_q for task in wanted)
    rows = [n // 2 if count % 2 else n for n in sizes[0]] + [spare]
    assert len(wanted) == HEADS * sum(ceil_div(n, QUERIES) for n in rows)
    others = [[disturb(cu, total, seed) for cu, total in zip(cus, totals)] for seed in range(5)]
    assert any(other != cus for other in others)
    assert all(found(*other, totals, used) == wanted for other in others)


@pytest.mark.parametrize("bad, same", [
    ([0, 40, 10, 90], [0, 40, 40, 90]), ([0, 40, -5, 90], [0, 40, 40, 90]), ([0, 200, 50, 90], [0, 100, 100, 100]),
    ([0, 40, 90, 0], [0, 40, 90, 90]), ([0, (1 << 31) - 1, -(1 << 31), 90], [0, 100, 100, 100])])
@pytest.mark.parametrize("in_use", [False, True])
def test_the_reference_says_the_same(bad, same, in_use):
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(100, 2, 16, generator=g) for _ in range(4))
    bad, same = (torch.tensor(cu, dtype=torch.int32) for cu in (bad, same))
    used = torch.tensor([20, -3, (1 << 31) - 1], dtype=torch.int32) if in_use else None
    plain = torch.tensor([20, 0, 100], dtype=torch.int32) if in_use else None
    options = True, None, -1, -1, 0.0
    o, lse = reference.flash_attn_varlen(q, k, v, bad, bad, used, used, *options)
    wanted = reference.flash_attn_varlen(q, k, v, same, same, plain, plain, *options)
    assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1])
    from tkq.reference.attention_backward import flash_attn_varlen_backward as backward

    gradients = backward(do, q, k, v, o, lse, None, (bad, bad, used, used), options, None)
    again = backward(do, q, k, v, o, lse, None, (same, same, plain, plain), options, None)
    assert all(torch.equal(a, b) for a, b in zip(gradients[:3], again[:3]))
