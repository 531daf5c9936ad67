"""Which tasks of a plan the kernel behind MLA decoding merges, on a CPU."""
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tests.helpers.emulation import finish
from tests.helpers.emulation.decode import Seen
from tkq.attention.decode import planner
from tkq.attention.mla import combine
from tkq.attention.mla.config import MlaConfig
from tkq.runtime.compile import fake


class SharedTasksOnCpu:
    """found (n, 4): sequence, tile, splits and first slot of what each part begins, or of each task with fixed splits.
    sizes: as in `planner.Sizes`, capacity in the place of overhead."""

    def __init__(self, fixed):
        self.fixed = fixed
        self.combine = combine.Combine(SimpleNamespace(fixed_splits=fixed, dtype="bf16", ragged=False), MlaConfig())

    def fake_arguments(self):
        ints = lambda *shape: fake.tensor("int32", shape, align=4)
        return ints(fake.sym()), (ints(fake.sym()), fake.tensor("fp32", (fake.sym(), 1, 1), align=4),
                                  ints(fake.sym(), 4)), planner.Sizes(*[Int32(1)] * 11)

    @cute.jit
    def __call__(self, plan, others, sizes: planner.Sizes):
        seqlens, partial, found = others
        g = Seen(plan, seqlens, partial, Int32(seqlens.shape[0]), sizes.heads_kv, sizes.group, sizes.queries,
                 sizes.tiles, sizes.overhead, sizes.left, sizes.split, 64)
        for i in cutlass.range(found.shape[0]):
            t = self.combine.fixed(g, Int32(i)) if cutlass.const_expr(self.fixed) else self.combine.begun(g, Int32(i))
            found[i, 0], found[i, 1], found[i, 2] = t.batch, t.row, t.splits
            found[i, 3] = self.combine.walk.slot(g, t, Int32(0))


def shared_tasks(fixed, parts, monkeypatch):
    """The compiled function of all parts."""
    with monkeypatch.context() as patched:
        patched.setattr(cute.arch, "grid_dim", lambda: (Int32(parts), 1, 1))
        return finish.function(SharedTasksOnCpu(fixed), patched)
