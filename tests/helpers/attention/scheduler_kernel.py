"""A kernel of the tests: what attention's producer makes of each task's number among sequences of any length."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.forward.tile_scheduler import Varlen
from tkq.runtime.compile import fake

QUERIES, BLOCK = 64, 80


class Deal:
    """tasks[n] = (where the sequence ends in q, in k, head, tile, rows_q, rows_k) of number n, and number[0] how many
    there are: as ``blocks`` blocks find them, each every blocks-th number."""

    @cute.jit
    def __call__(self, cu_q: cute.Tensor, cu_k: cute.Tensor, seqused_q: cute.Tensor, seqused_k: cute.Tensor,
                 tasks: cute.Tensor, number: cute.Tensor, total_q: Int32, total_k: Int32, heads: Int32, blocks: Int32,
                 stream: cuda.CUstream):
        varlen = Varlen(cu_q, cu_k, seqused_q, seqused_k, total_q, total_k, heads, Int32(1), QUERIES, BLOCK, 512,
                        1 << 20,
                        True)
        self.kernel(varlen, tasks, number).launch(grid=[blocks, 1, 1], block=[32, 1, 1], stream=stream)

    def fake_arguments(self) -> tuple:
        """What it is compiled for."""
        B, n = fake.sym(), fake.sym()
        ints = lambda *shape: fake.tensor("int32", shape, align=4)
        return (ints(fake.sym()), ints(fake.sym()), ints(B), ints(B), ints(n, 6), ints(1), Int32(0), Int32(0),
                Int32(1), Int32(1))

    @cute.kernel
    def kernel(self, varlen: Varlen, tasks: cute.Tensor, number: cute.Tensor):
        scan, schedule = varlen.begin(tk.Schedule(Int32(0), "static"))
        n = schedule.first()
        while n < schedule.tasks:
            found = scan.find(n)
            if tk.lane_id() == 0:
                for f in cutlass.range_constexpr(6):
                    tasks[n, f] = Int32((found[0], found[1], *found[2:])[f])
            n = schedule.following(n)
        number[0] = schedule.tasks
