"""Global memory by TMA: descriptors with the tile they move, loads, stores, reducing stores; and what TMA cannot take.

No predicates anywhere: past the end of the global tensor, loads bring zeros and stores write nothing. With one
exception: along a row, TMA stores whole units of 16 bytes. Where the columns end inside such a unit, a store overwrites
the rest of it too, with what the shared tile holds there, and an add may add to it. Rows end exactly.
"""
import math
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int16
from cutlass.cute.nvgpu import cpasync

from .dtypes import HALF, type_name
from .naps import copy_later, copy_now, late_copies, late_stores, nap, poison, poisoned, store_now
from .shared import SharedTile, st
from .sync import Acquired, Semaphore, _semaphore, cluster_rank
from .views import PIECE

BOX_ROWS = 256  # the most that one TMA box holds


@dataclass(frozen=True)
class gl:
    """A TMA descriptor of a global tensor, and the type of the shared tile that it moves.

    The tensor is (rows, cols), (rows, cols, depth) or (rows, cols, depth, batch), cols contiguous, base and all other
    strides multiples of 16 bytes; or one of those as a function of ``views`` shows it. Made in the host function
    (``@cute.jit``), passed to the kernel.

    Loads fill the tile's elements past the tensor's end with zeros. Stores and adds leave alone what is past it, but
    for up to 15 bytes behind each row, to the next multiple of 16 bytes: either the columns are a multiple of 16 bytes,
    or the padding of the rows is scratch, which holds no other data. A number of columns known when compiled is
    checked.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor  # TMA's coordinate tensor
    type: Constexpr[st]
    multicast: Constexpr[int] = 1
    made_by: Constexpr[str] = "gl.load"  # or "gl.store", "gl.add"

    @staticmethod
    def load(x: cute.Tensor, type: st, multicast=1) -> "gl":
        """For ``load_async``. What is past x's end comes as zeros, column by column and row by row.

        multicast: the blocks of the cluster, each of which loads its part of the tile for all of them."""
        if multicast not in (1, 2, 4, 8, 16) or type.rows % (8 * multicast):
            raise ValueError(f"gl.load: multicast is {multicast} for a tile of {type}, "
                             "allowed are powers of 2 that leave each block a multiple of 8 rows")
        op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        return gl._make("gl.load", op, x, type, multicast)

    @staticmethod
    def store(x: cute.Tensor, type: st) -> "gl":
        """For ``store_async``. Rows past x's end are not written, and columns from the next multiple of 16 bytes on.

        So x's columns are a multiple of 16 bytes, or what follows each row is scratch: the rest of its last 16 bytes is
        overwritten.

        Raises:
            ValueError: a number of columns, known when compiled, that is not a multiple of 16 bytes. (Where scratch
                follows, round the columns up.) One known only at run time is the caller's to check.
        """
        return gl._make_store("gl.store", cpasync.CopyBulkTensorTileS2GOp(), x, type)

    @staticmethod
    def add(x: cute.Tensor, type: st) -> "gl":
        """For ``store_async`` that adds to what is there, element by element, atomically. fp32, bf16, fp16.

        x's columns, and what is past its end: as ``gl.store``."""
        if type.dtype not in (Float32, *HALF):
            raise TypeError(f"gl.add: the tile is {type}, allowed are fp32, bf16, fp16")
        return gl._make_store("gl.add", cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD), x, type)

    @staticmethod
    def _make_store(what, op, x, type):
        made = gl._make(what, op, x, type)
        cols, unit = x.shape[1], 128 // type.dtype.width
        if isinstance(cols, int) and cols % unit:
            raise ValueError(f"{what}: x has {cols} columns, allowed for {type_name(type.dtype)} are multiples of "
                             f"{unit}: TMA writes whole units of 16 bytes, and would overwrite what follows each row")
        return made

    @staticmethod
    def _make(what, op, x, type, multicast=1):
        if cute.rank(x) not in (2, 3, 4):
            raise ValueError(f"{what}: x has {cute.rank(x)} dimensions, allowed are 2 to 4")
        if x.element_type is not type.dtype:
            raise TypeError(f"{what}: x is {type_name(x.element_type)}, the tile is {type}")
        if type.rows > BOX_ROWS * multicast:
            raise ValueError(f"{what}: the tile is {type}, allowed are up to {BOX_ROWS * multicast} rows")
        if type.row_groups != isinstance(x.shape[1], tuple):
            raise ValueError(f"{what}: the tile is {type}, x's columns are {x.shape[1]}; allowed are tiles in groups "
                             "of 8 rows with tensors as ``row_groups`` shows them, and others with others")
        _addresses(what, x)
        atom, tensor = cpasync.make_tiled_tma_atom(op, x, type.layout(), _tiler(what, x, type), multicast)
        return gl(atom, tensor, type, multicast, what)

    def part(self, size) -> "gl":
        """Of a ``ragged`` tensor: rows are counted in a piece of ``size`` of them, and clipped at its end. Where the
        piece ends is the batch coordinate.

        Raises:
            ValueError: a tensor that is not ragged, as far as its shape shows.
        """
        if cute.rank(self.tensor) != 4 or (self.made_by == "gl.load" and not self._wraps):
            raise ValueError(f"part: the descriptor is a {self.made_by} of a tensor that is not ragged: "
                             "see ragged and ragged_store")
        rows, back = self.tensor.shape[0], (0, PIECE) if self._wraps else 0
        shift = rows - size if isinstance(self.type_rows, int) else (0, rows[1] - size)
        return replace(self, tensor=cute.domain_offset((shift, 0, 0, back), self.tensor))

    def rows_from(self, first) -> "gl":
        """Rows are counted from row ``first`` on, of ``row_groups`` from that group on, and go on to the tensor's
        end."""
        first = first if isinstance(self.type_rows, int) else (0, first)
        rest = (0,) * (cute.rank(self.tensor) - 1)
        return replace(self, tensor=cute.domain_offset((first, *rest), self.tensor))

    @property
    def _wraps(self):
        """Is the tensor one of ``ragged``, whose last dimension is two?"""
        return cute.rank(self.tensor) == 4 and isinstance(self.tensor.shape[3], tuple)

    @property
    def type_rows(self):
        """How a tile divides the rows: a number, or (n, rows / n) of a ``packed`` tensor."""
        return _tiler("gl", self.tensor, self.type)[0]

    def _partition(self, what, tile: SharedTile, coord):
        if (what == "load_async") != (self.made_by == "gl.load"):
            allowed = "gl.load" if what == "load_async" else "gl.store and gl.add"
            raise TypeError(f"{what}: the descriptor is a {self.made_by}, allowed is {allowed}")
        if not isinstance(tile, SharedTile) or tile.stage is None:
            raise TypeError(f"{what}: the shared operand must be one tile (index the ring), got {tile}")
        if tile.type != self.type:
            raise TypeError(f"{what}: the shared tile is {tile.type}, the descriptor moves {self.type}")
        rank = cute.rank(self.tensor)
        if len(coord) != rank:
            raise ValueError(f"{what}: coord has {len(coord)} numbers, the global tensor has {rank} dimensions")
        *outer, r, c = coord
        if self._wraps:
            outer[0] = (outer[0], 0)
        x = self.tensor if rank == 2 else self.tensor[(None, None, *reversed(outer))]
        tiler = _tiler("gl", self.tensor, self.type)
        g = cute.local_tile(x, tiler, tuple(i if isinstance(n, int) else (0, i) for n, i in zip(tiler, (r, c))))
        me = 0 if self.multicast == 1 else cluster_rank()
        return cpasync.tma_partition(self.atom, me, cute.make_layout(self.multicast),
                                     cute.group_modes(tile.tensor, 0, 2), cute.group_modes(g, 0, 2))


def _tiler(what, x, type):
    """A tile's rows and columns as x has them: one number each, or two where x is ``packed`` or in ``row_groups``."""
    found = []
    for name, extent, size in zip(("rows", "columns"), x.shape, (type.rows, type.cols)):
        n = extent[0] if isinstance(extent, tuple) else size
        if not isinstance(n, int) or size % n:
            raise ValueError(f"{what}: x's {name} are {n} by {n} between each other, the tile is {type}; "
                             f"allowed are divisors of its {name}, known when compiled")
        found.append((n, size // n) if isinstance(extent, tuple) else size)
    return tuple(found)


def _addresses(what, x):
    """What TMA would round off in silence: a base, or a stride, that is not a multiple of 16 bytes."""
    bits = x.element_type.width
    if x.iterator.alignment % 16:
        raise ValueError(f"{what}: x is aligned to {x.iterator.alignment} bytes, allowed are multiples of 16")
    col = x.stride[1][0] if isinstance(x.stride[1], tuple) else x.stride[1]
    if not isinstance(col, int) or col != 1:
        raise ValueError(f"{what}: x's stride 1 (columns) is {col}, allowed is 1, known when compiled")
    modes = [(i, *m) for i, m in enumerate(zip(x.shape, x.stride)) if not isinstance(m[0], tuple)]
    modes += [(i, *m) for i, (n, steps) in enumerate(zip(x.shape, x.stride)) if isinstance(n, tuple)
              for j, m in enumerate(zip(n, steps)) if (i, j) != (1, 0)]
    for i, extent, stride in modes:
        one = isinstance(extent, int) and extent == 1
        if i != 1 and not one and cute.get_divisibility(stride) * bits % 128:
            known = stride if isinstance(stride, int) else f"a multiple of {cute.get_divisibility(stride)}"
            raise ValueError(f"{what}: x's stride {i} is {known}, allowed are multiples of {128 // bits} elements, "
                             "known when compiled")


def _descriptor(what, g):
    if not isinstance(g, gl):
        raise TypeError(f"{what}: the global operand is {g}, allowed is a descriptor (gl)")


def prefetch(*descriptors: gl):
    """Bring descriptors near, before their first use. One warp."""
    for g in descriptors:
        _descriptor("prefetch", g)
        cpasync.prefetch_descriptor(g.atom)


def load_async(dst: SharedTile, src: gl, coord, sem: Semaphore):
    """Load the tile ``coord = ([batch,] [depth,] row tile, column tile)``; its bytes complete on ``sem``, where a warp
    has announced them (``Pipe.acquire``, ``expect_bytes``). One whole warp."""
    _descriptor("load_async", src)
    _semaphore("load_async", sem)
    sem = _counted(sem, dst)
    s, g = src._partition("load_async", dst, coord)
    nap("load")
    if src.multicast == 1:
        if poisoned():
            poison(dst.tensor.iterator.toint(), dst.type.bytes)
        cute.copy(src.atom, g, s, tma_bar_ptr=sem.ptr)
    else:
        cute.copy(src.atom, g, s, tma_bar_ptr=sem.ptr, mcast_mask=Int16((1 << src.multicast) - 1))


def _counted(sem, dst):
    """What a load brings counts for the stage that ``Pipe.acquire`` has announced."""
    if not isinstance(sem, Acquired):
        return sem
    if isinstance(dst, SharedTile):
        sem.stage.load(dst.type.bytes)
    return sem.plain()


def store_async(dst: gl, src: SharedTile, coord):
    """Store (or, to a ``gl.add``, add) a shared tile, and commit. One whole warp, after the tile's writers have called
    ``publish`` and met it at a barrier; after ``store_wait`` the tile may be overwritten. Past the tensor's end:
    see ``gl.store``."""
    _descriptor("store_async", dst)
    s, g = dst._partition("store_async", src, coord)
    nap("store")
    cute.copy(dst.atom, s, g)
    cute.arch.cp_async_bulk_commit_group()


def store_wait(n=0, read=True):
    """Wait until at most ``n`` of this thread's stores are still reading shared memory (read=False: are not done).
    n is known when compiled. For the warp that called ``store_async``; others learn it by a barrier behind."""
    if not isinstance(n, int) or n < 0:
        raise ValueError(f"store_wait: n is {n}, allowed are numbers from 0 on, known when compiled")
    if late_stores():
        if n == 0:
            nap("store")
            store_now()
        n = max(n - 1, 0)  # the one that has not left is one of them
    cute.arch.cp_async_bulk_wait_group(n, read=read)


def publish():
    """Make this thread's shared-memory writes visible to TMA and wgmma. Each writer, before the barrier."""
    cute.arch.fence_view_async_shared()


# ---- what TMA's 16 bytes do not let in -----------------------------------------------------------


def copy_async(dst: cute.Tensor, i, src: cute.Tensor, coord):
    """dst[i] = src[coord] for 32-bit elements, one a thread, asynchronous (cp.async)."""
    for name, x in (("dst", dst), ("src", src)):
        if not isinstance(x, cute.Tensor):
            raise TypeError(f"copy_async: {name} is {x}, allowed is a tensor (a tile has .tensor)")
    if src.element_type.width != 32 or dst.element_type.width != 32:
        names = f"src is {type_name(src.element_type)}, dst {type_name(dst.element_type)}"
        raise TypeError(f"copy_async: {names}, allowed are 32-bit types")
    source, to = src.iterator + cute.crd2idx(coord, src.layout), dst.iterator + cute.crd2idx(i, dst.layout)
    if late_copies():
        copy_later(to.toint(), source.toint())
        return
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), dst.element_type, num_bits_per_copy=32)
    one = cute.make_layout(1)
    cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(to, one))


def copy_async_arrive(sem: Semaphore):
    """Arrive, once for each calling thread, when that thread's ``copy_async`` have landed."""
    _semaphore("copy_async_arrive", sem)
    if late_copies():
        nap("load")
        copy_now()
    cute.arch.cp_async_mbarrier_arrive_noinc(sem.ptr)


def _elements(dst, src, threads):
    if not isinstance(dst, SharedTile) or dst.stage is None:
        raise TypeError(f"load_elements: dst must be one shared tile (index the ring), got {dst}")
    if cute.rank(src) != 2:
        raise ValueError(f"load_elements: src has {cute.rank(src)} dimensions, allowed are 2")
    if src.element_type is not dst.type.dtype:
        raise TypeError(f"load_elements: src is {type_name(src.element_type)}, dst is {dst.type}")
    if dst.type.rows * dst.type.cols % threads:
        raise ValueError(f"load_elements: dst is {dst.type}: its elements do not divide among {threads} threads")


@cute.jit
def load_elements(dst: SharedTile, src: cute.Tensor, row0, col0, threads: Constexpr[int], me):
    """dst[r, c] = src[row0 + r, col0 + c], zeros past the end, element by element: any stride, any alignment, slow.

    ``threads`` threads, numbered ``me``, call it together; afterwards each calls ``publish``."""
    _elements(dst, src, threads)
    tile, rows, cols = dst.tensor, dst.type.rows, dst.type.cols
    limit_r, limit_c = cute.size(src, mode=[0]), cute.size(src, mode=[1])
    # Neighbouring threads take neighbours in memory where columns are contiguous; 8 loads are in flight.
    per = math.gcd(rows * cols // threads, 8)
    for i in cutlass.range(rows * cols // threads // per, unroll=1):
        value = cute.make_rmem_tensor((per,), dst.type.dtype)
        for j in cutlass.range_constexpr(per):
            at = (i * per + j) * threads + me
            r, c = at // cols, at % cols
            value[j] = dst.type.dtype(0.0)
            if row0 + r < limit_r and col0 + c < limit_c:
                value[j] = src[row0 + r, col0 + c]
        for j in cutlass.range_constexpr(per):
            at = (i * per + j) * threads + me
            tile[at // cols, at % cols] = value[j]
