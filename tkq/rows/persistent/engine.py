"""What a RowKernel runs: the launch, the roles of a block, and the way of a row through its exchanges."""
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from ... import tile as tk
from .columns import ColumnSums, sum_slabs
from .exchange import Slots
from .held import HeldRows
from .partition import block_partition, thread_partition
from .ring import GlobalRows, RowRing
from .shape import carveout, scratch_bytes


@dataclass(frozen=True)
class Args:
    """What a launch brings; tuples are empty as None. rows: M. workspace: (column sums, units, pitch) fp32."""

    loads: Any
    stores: Any
    vectors: Any
    scalars: Any
    results: Any
    columns: Any
    workspace: Any
    counter: Any
    parameters: Any
    rows: Int32


class PersistentRows:
    """A part of `kernel.RowKernel`, whose docstring draws the roles: a launch, and what a block does in it. elements:
    what is done with a row once it is there, `RowElements`.

    Between methods goes a context: g (``Args``), s (the block's ``Share``), part (the thread's), rows (``RowRing`` or
    ``GlobalRows``), slots (one for each exchange), columns (``ColumnSums`` or None), vectors (what is held of them).
    r is a row's numbers by name, e a chunk's elements."""

    def __init__(self, elements):
        self.elements, self.spec, self.plan, self.active = elements, elements.spec, elements.plan, elements.active

    # ---- launch -------------------------------------------------------------------------------------

    @cute.jit
    def launch(self, row_kernel: Constexpr, g: Constexpr[Args], units: Int32, stream: cuda.CUstream):
        """Of row_kernel's `kernel` and `tail`, in whose names its class is."""
        p = self.plan
        tiles = cute.ceil_div(g.rows, p.groups)
        units = tiles if const_expr(p.held) else cutlass.min(units, tiles)
        shape, cluster = [units * p.cluster, 1, 1], [p.cluster, 1, 1]
        if const_expr(p.held):
            shape, cluster = [units, p.cluster, 1], [1, p.cluster, 1]
        barrier = const_expr(g.columns is not None and p.finish == "grid")
        row_kernel.kernel(g).launch(
            grid=shape, block=[p.block, 1, 1], cluster=cluster if const_expr(p.cluster > 1) else None, stream=stream,
            min_blocks_per_mp=p.min_blocks_per_sm, preferred_smem_carveout=carveout(self.spec.shape, p),
            cooperative=bool(barrier and p.cooperative), use_pdl=p.pdl)
        if const_expr(g.columns is not None and p.finish == "tail"):
            slabs = cute.ceil_div(p.pitch // 4, p.slab)
            row_kernel.tail(g, units).launch(grid=[slabs, 1, 1], block=[p.threads, 1, 1], stream=stream, use_pdl=True)

    # ---- device -------------------------------------------------------------------------------------

    @cute.jit
    def block(self, g: Constexpr[Args]):
        """All that a block does."""
        p = self.plan
        al = tk.SharedAllocator()
        s = block_partition(p, g.rows)
        rows = self._rows(al, g)
        slots = [Slots.allocate(al, p, x.monoid) for x in self.active] if const_expr(p.width > 1) else []
        columns = self._column_sums(al, g) if const_expr(g.columns is not None) else None
        needed = [x for x in (rows, *slots, columns) if hasattr(x, "init")]
        self._init(needed)
        rows = self._primed(rows, g, s)
        c = SimpleNamespace(g=g, s=s, rows=rows, slots=slots, columns=columns)
        if const_expr(p.held):
            self._start(c)  # loads go out before all others are here
        if const_expr(p.cluster > 1):
            tk.cluster_arrive_relaxed()
            tk.cluster_wait()
        elif const_expr(needed):
            tk.sync_block()
        if const_expr(p.held):
            self._rows_at_once(c)
        elif const_expr(p.direct):
            self.compute(c)
        else:
            tk.specialise(lambda: self.produce(c), lambda _: self.compute(c), p.consumers, p.registers)
        if const_expr(p.cluster > 1 and not p.held):
            tk.cluster_arrive_relaxed()  # no block exits while another may still send to it
            tk.cluster_wait()

    @cute.jit
    def _init(self, needed: Constexpr):
        """By one thread, the semaphores of what needs some."""
        if const_expr(needed):
            if tk.warp_id() == 0:
                tk.nap("start")
                with cute.arch.elect_one():
                    for x in needed:
                        x.init()
                cute.arch.mbarrier_init_fence()
                tk.publish()

    @cute.jit
    def _primed(self, rows: Constexpr, g: Constexpr[Args], s: Constexpr):
        """rows, the first of them under way, as soon as the kernel before this one is done."""
        p = self.plan
        if const_expr(p.pdl):
            cute.arch.griddepcontrol_wait()
        if const_expr(p.pdl or p.finish == "tail"):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(not p.direct):
            if tk.warp_id() == 0:
                rows.prime(g.loads, s)
        return rows

    def _rows(self, al, g):
        p = self.plan
        if p.held:
            return HeldRows.allocate(p, [t.element_type for t in g.loads])
        return GlobalRows(g.loads) if p.direct else RowRing.allocate(al, p, [t.element_type for t in g.loads])

    def _column_sums(self, al, g):
        p = self.plan
        registers = {s.name: cute.make_rmem_tensor((p.vector, p.chunks), Float32) for s in self.spec.columns}
        scratch = al.allocate_array(Float32, max(4, scratch_bytes(self.spec.shape, p) // 4), byte_alignment=128)
        return ColumnSums(registers, g.workspace, scratch, al.semaphores(), al.semaphores(), g.counter, p)

    @cute.jit
    def produce(self, c: Constexpr):
        c.rows.produce(c.g.loads, c.s)
        if const_expr(c.columns is not None):
            c.columns.keep_barrier()

    @cute.jit
    def compute(self, c: Constexpr):
        p = self.plan
        thread = cute.arch.thread_idx()[0] - (p.block - p.threads)
        c.part = thread_partition(p, c.s, thread)
        c.thread = thread
        c.vectors = self.elements.vectors(c)
        if const_expr(c.columns is not None):
            c.columns.clear()
        if const_expr(p.width == 1 or not self.active):
            self._rows_of_a_warp(c)
        else:
            self._rows_of_many(c)
        if const_expr(c.columns is not None):
            if const_expr(not self.elements.early):
                c.columns.flush(c.part, thread)
            c.columns.finish(c.g.columns, c.s.units, thread)

    # ---- one block for each tile --------------------------------------------------------------------

    def _start(self, c):
        """All that the tile needs is under way."""
        c.part = thread_partition(self.plan, c.s, cute.arch.thread_idx()[0])
        c.rows.load(c.g.loads, c.part)
        c.numbers = self.elements.numbers()
        self.elements.load_numbers(c, c.numbers, Int32(0))
        c.vectors = self.elements.vectors(c)

    @cute.jit
    def _rows_at_once(self, c: Constexpr):
        """The block's only tile. A cluster's block leaves when it has what the others send."""
        row, last = c.part.row(0), const_expr(len(self.active) - 1)
        state = SimpleNamespace(seen=[x.ring() for x in c.slots])
        views, r = self.elements.views(c, None, row), self.elements.known(c, c.numbers)
        for k in cutlass.range_constexpr(len(self.active)):
            values = self.elements.element(c, k, views, row, r)
            if const_expr(self.plan.width > 1):
                c.slots[k].publish(state.seen[k], c.part, values)
            if const_expr(not (self.elements.first_finishes and k == last)):
                if const_expr(self.plan.width > 1):
                    values = c.slots[k].collect(state.seen[k], c.part)
                self.elements.reduced(r, k, values)
        if const_expr(self.elements.first_finishes):
            self._finish_by_first(c, state, row, r)
        else:
            self.elements.write(c, views, row, c.part.exists(row), r)

    # ---- persistent blocks --------------------------------------------------------------------------

    @cute.jit
    def _rows_of_a_warp(self, c: Constexpr):
        """A row lies within a warp: its element needs shuffles only."""
        ring = c.rows.ring() if const_expr(not self.plan.direct) else None
        numbers, following = self.elements.numbers(), self.elements.numbers()
        self.elements.load_numbers(c, following, Int32(0))
        for i in cutlass.range(c.s.tiles, unroll=1):
            self.elements.move(numbers, following)
            self.elements.load_numbers(c, following, i + 1)
            row = c.part.row(i)
            views = self.elements.views(c, ring, row)
            if const_expr(not self.plan.direct):
                c.rows.wait(ring)
            r = self.elements.known(c, numbers)
            for k in cutlass.range_constexpr(len(self.active)):
                self.elements.reduced(r, k, self.elements.element(c, k, views, row, r))
                cute.arch.sync_warp()  # read memory again below, rather than hold the row in registers
            if const_expr(self.elements.early and c.columns is not None):
                if i == c.s.tiles - 1:
                    c.columns.flush(c.part, c.thread)
            self.elements.write(c, views, row, c.part.exists(row), r)
            if const_expr(not self.plan.direct):
                c.rows.release(ring)
                ring.advance()

    @cute.jit
    def _rows_of_many(self, c: Constexpr):
        """Several warps share a row. In step i a warp works on tile i, then on tile i - 1, whose first exchange is done
        by now, and so on: tile i - a has ``age`` a."""
        oldest = const_expr(len(self.active))
        state = self._state(c)
        self.elements.load_numbers(c, state.following, Int32(0))
        self.elements.move(state.numbers[0], state.following)
        for i in cutlass.range(c.s.tiles + oldest, unroll=1):
            self.elements.load_numbers(c, state.following, i + 1)
            if i < c.s.tiles:
                self._step(c, 0, i, state)
            if const_expr(self.elements.early and c.columns is not None):
                if i == c.s.tiles - 1:
                    c.columns.flush(c.part, c.thread)
            for age in cutlass.range_constexpr(1, oldest + 1):
                if i >= age and i - age < c.s.tiles:
                    self._step(c, age, i - age, state)
            self._grow_older(state)

    def _state(self, c):
        """What the rows under way need: their numbers, the results of exchanges that are over, and positions."""
        oldest = len(self.active)
        exchanged = [[cute.make_rmem_tensor((x.monoid.sums,), Float32) for _ in range(oldest - k)]
                for k, x in enumerate(self.active)]
        for tensor in [t for tensors in exchanged for t in tensors]:
            tensor.fill(0.0)
        return SimpleNamespace(
            numbers=[self.elements.numbers() for _ in range(oldest + 1)], following=self.elements.numbers(),
            exchanged=exchanged,
            stages=[None if self.plan.direct else c.rows.ring() for _ in range(oldest + 1)],
            sent=[x.ring() for x in c.slots], seen=[x.ring() for x in c.slots])

    @cute.jit
    def _step(self, c: Constexpr, age: Constexpr[int], tile: Int32, state: Constexpr):
        row = c.part.row(tile)
        stage = state.stages[age]
        views = self.elements.views(c, stage, row)
        if const_expr(age == 0 and not self.plan.direct):
            c.rows.wait(stage)
        r = self.elements.known(c, state.numbers[age])
        alone = const_expr(self.elements.first_finishes)
        for k in cutlass.range_constexpr(age):
            exchanged = state.exchanged[k][age - k - 1]
            if const_expr(k == age - 1 and not (alone and k == len(self.active) - 1)):
                values = c.slots[k].collect(state.seen[k], c.part)
                state.seen[k].advance()
                for i in cutlass.range_constexpr(len(values)):
                    exchanged[i] = values[i]
            if const_expr(not (alone and k == len(self.active) - 1)):
                self.elements.reduced(r, k, tuple(exchanged[i] for i in range(self.active[k].monoid.sums)))
        if const_expr(age < len(self.active)):
            element = self.elements.element(c, age, views, row, r)
            c.slots[age].publish(state.sent[age], c.part, element)
            state.sent[age].advance()
        elif const_expr(alone):
            self._finish_by_first(c, state, row, r)
            state.seen[age - 1].advance()
        else:
            self.elements.write(c, views, row, c.part.exists(row), r)
        if const_expr(age == self.elements.last_read and not self.plan.direct):
            c.rows.release(stage)
        if const_expr(not self.plan.direct):
            stage.advance()

    @cute.jit
    def _finish_by_first(self, c: Constexpr, state: Constexpr, row: Int32, r: Constexpr):
        """The last exchange's result, of which nothing but numbers is made: by the row's first warp alone."""
        if c.part.warp == 0:
            self._finish(c, state, row, r)

    def _finish(self, c, state, row, r):
        last, known = len(self.active) - 1, type(r)(**r.__dict__)
        self.elements.reduced(known, last, c.slots[last].collect(state.seen[last], c.part))
        self.elements.write(c, None, row, c.part.exists(row), known)

    def _grow_older(self, state):
        for a in range(len(self.active), 0, -1):
            self.elements.move(state.numbers[a], state.numbers[a - 1])
        self.elements.move(state.numbers[0], state.following)
        for tensors in state.exchanged:
            for a in range(len(tensors) - 1, 0, -1):
                self.elements.move(tensors[a], tensors[a - 1])

    # ---- the other way to finish --------------------------------------------------------------------

    @cute.jit
    def tail(self, g: Constexpr[Args], units: Int32):
        """What a kernel of its own does for the column sums."""
        cute.arch.griddepcontrol_wait()
        p = self.plan
        scratch = tk.SharedAllocator().allocate_array(Float32, 4 * p.threads * len(g.columns), byte_alignment=16)
        sum_slabs(p, g.workspace, g.columns, scratch, units, cute.arch.thread_idx()[0])
