"""RowKernel: the engine for kernels that read rows twice, which is every backward of a normalisation.

A subclass names its tensors and writes three short functions on fp32 vectors. Which threads hold a row, how it comes
from memory, how its sums are exchanged and how sums down the columns become a result in the same launch is done for it,
in tkq.rows.
"""
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from ... import tile as tk
from ...reduction_base import ReductionBase
from .elements import RowElements
from .engine import Args, PersistentRows
from .monoid import Exchange, add
from .shape import RowPlan
from .spec import RowSpec


def _all_of(first, others):
    return first, *(() if others is None else others)


class RowKernel(ReductionBase):
    """Persistent blocks, one to a multiprocessor or several. A row belongs to a few lanes, a warp, several warps, a
    block or a cluster of blocks, by its length; a tile is as many rows as a block holds at once, and tile t goes to
    block (or cluster) t % of as many as there are.

      producer warp     first tiles, before the block's barrier | wait empty -> bulk copies of the next tile | ..
                        | wait flushed -> barrier of the grid -> total
      computing warps   tile t: wait full -> partial, down -> publish the row's element
                        tile t - 1: collect -> row -> write, release the stage       (with n exchanges: tile t - n)
                        after their last ``down``: flush; after their last ``write``: wait total -> a slab of columns

      full[stage]       the producer's arrival and bytes        ``rows.ring.RowRing``
      empty[stage]      each computing warp
      met[slot]         the row's warps, or the bytes that they send through a cluster   ``rows.exchange.Slots``
      flushed, total    each computing warp; the producer       ``rows.columns.ColumnSums``

    So a row's exchange runs under the sums of the next one, and each row is read from shared memory once for each
    exchange and once to write: nothing but column sums and vectors is held in between. A row within a warp needs no
    slot and no lag. Rows that bulk copies cannot take (N odd, say) are read from global memory by the threads
    themselves (``RowPlan.direct``): right, but slower.

    A kernel without stores and column sums, of rows that fit into the registers of a block or a cluster, has neither
    ring nor producer (``RowPlan.held``): one block (or cluster) for each tile, not persistent, reads each element once.

      every warp        all loads go out -> the block's barrier -> partial -> publish -> collect -> row, .. -> write

    A subclass says what it moves. A call may leave out any tensor; ``self.has(name)`` says what it has:

      loads, stores     (M, N), bf16, fp16 or fp32, each with its own type and row stride
      vectors           (N,), read once
      scalars, results  (M,) fp32: read before a row's ``partial``; written from what ``row`` returns
      columns           (N,), bf16, fp16 or fp32: sums over all rows
      parameters        run-time floats of a call
      options           compile-time constants with their defaults, as attributes
      exchanges         one ``Exchange`` for each time that the row is reduced; a plain sum where not said

    A name has one place among these, or two in loads and stores: a tensor that is written in place. plan is no name,
    and no option is called as an attribute of the class or of its instances (spec, N, dtype, stage, ..).

    and what it computes. e has a vector of the row's elements, fp32, for each load and vector; r has the row's numbers:
    scalars, parameters, and all that ``row`` has returned. Elements past the row's end are left out by the engine.

      partial(e, r)     the elements of the exchange's monoid: a tuple of vectors, or of numbers
      row(sums, r)      once a row: a dict of numbers, from the row's result
      write(e, r)       a dict of vectors, one for each store of the call; it may have the class's other stores, too
      down(e, r)        a dict of vectors to be summed down the columns, from scalars and parameters alone. Where a
                        column sum needs what ``row`` returns, write no ``down`` and give it in ``write``'s dict

    Call it as Subclass.launch(name=tensor, ..); see ``tkq.rows.persistent.launch``. Example:
    examples/write_a_row_kernel.py.
    """

    loads: ClassVar[tuple] = ()
    stores: ClassVar[tuple] = ()
    vectors: ClassVar[tuple] = ()
    scalars: ClassVar[tuple] = ()
    results: ClassVar[tuple] = ()
    columns: ClassVar[tuple] = ()
    parameters: ClassVar[tuple] = ()
    options: ClassVar[dict] = {}
    exchanges: ClassVar[tuple] = (Exchange(add(1)),)

    def __init__(self, spec: RowSpec, plan: RowPlan, elements=RowElements):
        super().__init__(tk.element_type(spec.loads[0].dtype), spec.N, stage=len(spec.sums))
        self.spec, self.plan, self.cluster_n = spec, plan, plan.cluster
        for name, value in {**self.options, **dict(spec.options)}.items():
            setattr(self, name, value)
        self.active = () if self.only_down(spec) else self.exchanges
        if spec.sums != tuple(x.monoid.sums for x in self.active):
            raise ValueError(f"{type(self).__name__}: sums: got {spec.sums}, its exchanges have "
                             f"{tuple(x.monoid.sums for x in self.active)}")
        streams = (*spec.loads, *spec.stores, *spec.vectors, *spec.columns)
        self.given = {*(s.name for s in streams), *spec.scalars, *spec.results}
        self._engine = PersistentRows(elements(self))

    def partial(self, e, r) -> tuple:
        raise NotImplementedError(f"{type(self).__name__}.partial")

    def row(self, sums, r) -> dict:
        return {}

    def write(self, e, r) -> dict:
        return {}

    down = None  # or a method (e, r) -> dict

    def has(self, name) -> bool:
        """Was the tensor given? Known at compile time."""
        return name in self.given

    @classmethod
    def only_down(cls, spec: RowSpec) -> bool:
        """Is nothing but ``down``'s column sums asked for?"""
        return not spec.stores and not spec.results and cls.down is not None

    @classmethod
    def exchanges_of(cls, spec: RowSpec) -> tuple:
        """Those that a call needs."""
        return () if cls.only_down(spec) else cls.exchanges

    # ---- what ReductionBase asks for ----------------------------------------------------------------

    def _calculate_threads_per_row(self):
        return self.plan.threads_per_row

    def _get_num_threads(self):
        return self.plan.threads

    def _set_cluster_n(self):
        self.cluster_n = self.plan.cluster

    # ---- launch -------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, first: cute.Tensor, others, stores, vectors, scalars, results, columns, workspace, counter,
                 parameters, units: Int32, stream: cuda.CUstream):
        """first, others: what is loaded. Tuples of tensors in the spec's order, or None; workspace and counter with
        column sums only; units: the most clusters (blocks, without clusters) that may run at once."""
        loads, rows = _all_of(first, others), Int32(first.shape[0])
        g = Args(loads, stores, vectors, scalars, results, columns, workspace, counter, parameters, rows)
        self._engine.launch(self, g, units, stream)

    @cute.kernel
    def kernel(self, g: Args):
        """The roles above."""
        self._engine.block(g)

    @cute.kernel
    def tail(self, g: Args, units: Int32):
        """For the column sums, launched under the end of the main one."""
        self._engine.tail(g, units)

    # ---- from torch ---------------------------------------------------------------------------------

    @classmethod
    def recipe(cls, plan=None, **arguments):
        """What has to be compiled for this call; see `tkq.rows.persistent.launch.recipe`."""
        from .launch import recipe

        return recipe(cls, arguments, plan)

    @classmethod
    def launch(cls, plan=None, **arguments):
        """Compile (once, cached on disk) and call on torch tensors; see `tkq.rows.persistent.launch.launch`."""
        from .launch import launch

        return launch(cls, arguments, plan)
