"""The tasks of chunked prefill on a CPU: which one each number means."""
from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tests.helpers.emulation import finish
from tkq.attention.decode.chunked.state import Results, Sizes
from tkq.attention.decode.chunked.tasks import Tasks
from tkq.runtime.compile import fake

FIELDS = 7


class TasksOnCpu:
    """found (tasks, 7): row of q behind its sequence, sequence, head, tile, rows_q, rows_k, is it as it says? sizes:
    (14,), the numbers of `state.Sizes` in its order."""

    def __init__(self, ragged, longest_first=True):
        self.ragged, self.longest_first = ragged, longest_first

    def fake_arguments(self):
        ints = lambda *shape: fake.tensor("int32", shape, align=4)
        return ints(fake.sym()), (ints(fake.sym()), ints(fake.sym()), ints(14), ints(fake.sym(), FIELDS))

    @cute.jit
    def __call__(self, plan: cute.Tensor, others: tuple):
        seqlens, cu, sizes, found = others
        tasks = Tasks(seqlens, None, cu if self.ragged else None, Results(plan, None, plan),
                      Sizes(*(sizes[i] for i in range(14)), 64), 512, 16 << 20, self.longest_first)
        for number in cutlass.range(found.shape[0]):
            task, fine = (tasks.listed if self.ragged else tasks.of_sequence)(Int32(number))
            for i in cutlass.range_constexpr(FIELDS):
                found[number, i] = Int32((*task[:FIELDS - 1], fine)[i])


def function(ragged, monkeypatch):
    return finish.function(TasksOnCpu(ragged), monkeypatch)
