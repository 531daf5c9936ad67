"""What a RowKernel does with the numbers and elements of one row: read them, reduce them, write them."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from ...utils import widened
from .exchange import across_lanes, of_vector
from .partition import loaded, put
from .returned import Elements, Numbers, call_for_dict, combined, element, row_numbers, row_result, row_vector
from .shape import WARP


class RowElements:
    """A part of a `RowKernel`, its `kernel`: what ``PersistentRows``, whose docstring says what a context is, does with
    a row once it is there. A kernel that reduces or writes rows in another way hands its own to RowKernel's
    constructor."""

    def __init__(self, kernel):
        self.kernel, self.spec, self.plan, self.active = kernel, kernel.spec, kernel.plan, kernel.active

    @property
    def early(self) -> bool:
        """Do the column sums leave the registers before the last tile is written?"""
        return bool(self.plan.early and self.active and self.kernel.down is not None)

    @property
    def last_read(self) -> int:
        """The age at which a row's elements are read for the last time. Where ``write`` has nothing to do it is that of
        the last exchange: the row's stage is free one row earlier."""
        return len(self.active) - (1 if self.active and not self.writes_rows else 0)

    @property
    def first_finishes(self) -> bool:
        """Is the last exchange collected by the row's first warp alone? Where the others have no use for it; and there
        is one before it, which all collect: it keeps them from a slot that the first has not read (see ``Slots``), and
        a block that has one row uses none twice."""
        each_slot_once = self.plan.held and bool(self.active)
        return ((len(self.active) > 1 or each_slot_once) and self.plan.cluster == 1 and self.plan.width > 1
                and not self.writes_rows)

    @property
    def writes_rows(self) -> bool:
        return bool(self.spec.stores or (self.spec.columns and not self.early))

    # ---- a row's numbers ----------------------------------------------------------------------------

    def numbers(self):
        numbers = cute.make_rmem_tensor((max(1, len(self.spec.scalars)),), Float32)
        numbers.fill(0.0)
        return numbers

    def move(self, dst, src):
        for i in range(cute.size(dst)):
            dst[i] = src[i]

    def load_numbers(self, c, numbers, tile):
        """Of a tile to come; past the end those of the last row."""
        row = cutlass.min(c.part.row(tile), c.s.rows - 1)
        for i in range(len(self.spec.scalars)):
            numbers[i] = c.g.scalars[i][row]

    def known(self, c, numbers):
        known = {name: numbers[i] for i, name in enumerate(self.spec.scalars)}
        return Numbers(**known, **dict(zip(self.kernel.parameters, c.g.parameters or (), strict=True)))

    def reduced(self, r, k, values):
        r.__dict__.update(row_numbers(self.kernel, self.active[k].row, values, r))

    # ---- a row's elements ---------------------------------------------------------------------------

    def views(self, c, stage, row):
        return c.rows.views(row if self.plan.direct else stage, c.part)

    def vectors(self, c):
        """This thread's part of the (N,) vectors, as far as it is held."""
        held = {}
        for stream, t in zip(self.spec.vectors, c.g.vectors or (), strict=True):
            view = c.part.of_vector(t, stream.align)
            if self.plan.vectors == "late":
                held[stream.name] = view
                continue
            dtype = t.element_type if self.plan.vectors == "packed" else Float32
            held[stream.name] = cute.make_rmem_tensor((self.plan.vector, self.plan.chunks), dtype)
            for j in range(self.plan.chunks):
                held[stream.name][None, j].store(loaded(view[None, j], c.part.inside(j)).to(dtype))
        return held

    def chunk(self, c, views, j):
        """The elements of chunk j, by name: e of the kernel's methods."""
        inside = c.part.inside(j)
        there = self.plan.held or inside  # in registers
        e = {stream.name: loaded(view[None, j], there) for stream, view in zip(self.spec.loads, views, strict=True)}
        for name, held in c.vectors.items():
            late = self.plan.vectors == "late"
            e[name] = loaded(held[None, j], inside) if late else widened(held[None, j])
        return Elements(**e)

    def element(self, c, k, views, row, r):
        """The warp's part of the row as an element of exchange k's monoid, in all of its lanes."""
        monoid = self.active[k].monoid
        total = cute.make_rmem_tensor((monoid.sums,), Float32)
        for i in range(monoid.sums):
            total[i] = Float32(monoid.neutral[i])
        self._accumulate_if(c, k, views, self.plan.held or c.part.exists(row), r, total)
        return across_lanes(tuple(total[i] for i in range(monoid.sums)), monoid,
                            min(WARP, self.plan.threads_per_row))

    @cute.jit
    def _accumulate_if(self, c: Constexpr, k: Constexpr[int], views: Constexpr, exists: Constexpr, r: Constexpr,
                       total: cute.Tensor):
        if const_expr(exists is True):
            self.accumulate(c, k, views, r, total)
        else:
            if exists:
                self.accumulate(c, k, views, r, total)

    def accumulate(self, c, k, views, r, total):
        exchange = self.active[k]
        monoid, found = exchange.monoid, None
        for j in range(self.plan.chunks):
            e = self.chunk(c, views, j)
            inside = c.part.inside(j)
            values = element(self.kernel, exchange.partial, monoid, e, r)
            values = tuple(or_neutral(v, inside, n) for v, n in zip(values, monoid.neutral, strict=True))
            found = values if found is None else combined(monoid, found, values)
            if k == 0 and self.early and self.spec.columns:
                self._add_columns(c, j, self._down(e, r))
        for i, value in enumerate(of_vector(found, monoid)):
            total[i] = value

    def _add_columns(self, c, j, values):
        method = "write" if self.kernel.down is None else "down"
        for stream in self.spec.columns:
            c.columns.add(stream.name, j, row_vector(self.kernel, method, values, stream.name))

    def _down(self, e, r):
        return call_for_dict(self.kernel, "down", self.kernel.columns, e, r)

    def _write(self, e, r):
        """Column sums are ``down``'s where there is one."""
        columns = self.kernel.columns if self.kernel.down is None else ()
        return call_for_dict(self.kernel, "write", (*self.kernel.stores, *columns), e, r)

    @cute.jit
    def write(self, c: Constexpr, views: Constexpr, row: Int32, exists: Constexpr, r: Constexpr):
        if const_expr(exists is True):
            self.write_row(c, views, row, r)
        else:
            if exists:
                self.write_row(c, views, row, r)

    def write_row(self, c, views, row, r):
        for name, t in zip(self.spec.results, c.g.results or (), strict=True):
            value = row_result(self.kernel, [x.row for x in self.active], r, name)
            _store_one(t, row, value, (c.part.thread == 0) & (c.s.rank == 0))
        if not self.writes_rows:
            return
        outs = [c.part.of_row(t, row) for t in c.g.stores or ()]
        for j in range(self.plan.chunks):
            e = self.chunk(c, views, j)
            values = self._write(e, r) if self.spec.stores or self.kernel.down is None else {}
            for stream, t, out in zip(self.spec.stores, c.g.stores or (), outs, strict=True):
                x = cute.make_rmem_tensor((self.plan.vector,), t.element_type)
                x.store(row_vector(self.kernel, "write", values, stream.name).to(t.element_type))
                put(out[None, j], x, c.part.inside(j), self.plan.streaming)
            if self.spec.columns and not self.early:
                self._add_columns(c, j, values if self.kernel.down is None else self._down(e, r))


@cute.jit
def _store_one(t: cute.Tensor, row: Int32, value: Float32, mine):
    if mine:
        t[row] = value


@cute.jit
def or_neutral(value, inside: Constexpr, neutral: Constexpr[float]):
    """What counts of a chunk that may lie outside the row."""
    if const_expr(inside is True):
        return value
    if const_expr(not isinstance(value, cute.TensorSSA)):
        return cutlass.select_(inside, value, Float32(neutral))
    values = cute.make_rmem_tensor(value.shape, Float32)
    values.fill(neutral)
    if inside:
        values.store(value)
    return values.load()
