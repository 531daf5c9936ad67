"""LayerNorm of long rows by blocks that stay, on RowKernel: they read weight and bias once, and not for every row."""
import operator

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from .. import tile as tk
from ..row_kernel import RowKernel
from ..rows.elements import or_neutral
from ..rows.exchange import Slots, across_lanes
from ..rows.monoid import Exchange, Monoid
from ..rows.plan import WARP
from ..rows.spec import RowSpec, Stream
from ..utils import _words, collect, elem_pointer, lanes_used, pack_f32x2, rsqrt, unpack_f32x2, warp_reduce
from .layernorm import LayerNorm
from .build import _arguments
from .kept_plan import SUMS, shape


def build(spec, plan):
    """(kernel, fake arguments), as `build.build` has them, and the number of clusters last."""
    if spec.stats:
        return KeptLayerNormTrained(spec, plan), (*_arguments(spec), Int32(0))
    x, w, b, out, *_, eps, _ = _arguments(spec)
    return KeptLayerNorm(spec, plan), (x, w, b, out, eps, Int32(0))


def _join(a, b):
    """(count, mean, sum of squares about it) of two parts, as in Chan, Golub and LeVeque, "Algorithms for computing the
    sample variance" (1983)."""
    count = a[0] + b[0]
    share, apart = b[0] * cute.arch.rcp_approx(cutlass.max(count, Float32(1))), b[1] - a[1]
    return count, a[1] + apart * share, a[2] + b[2] + apart * apart * a[0] * share


def _given(*tensors):
    return tuple(t for t in tensors if t is not None) or None


class KeptLayerNorm(RowKernel):
    """What `layernorm.LayerNorm` computes. A thread keeps its part of weight and bias in registers from row to row,
    where a block that comes and goes with its row reads them again from L2: 2 bytes of bf16 in and 2 out for 8 of
    float32 weight and bias. Each thread centres its part of a row on that part's own mean before it squares."""

    loads, stores, vectors, parameters, results = ("x",), ("y",), ("weight", "bias"), ("eps",), ("rstd", "mean")
    exchanges = (Exchange(Monoid(_join, (0.0,) * SUMS, symmetric=False)),)
    sums = None

    def __init__(self, spec, plan):
        given = shape(spec)
        vectors = tuple(Stream(name, dtype) for name, dtype in (("weight", spec.weight), ("bias", spec.bias)) if dtype)
        super().__init__(RowSpec(__name__, "KeptLayerNorm", spec.N, (Stream("x", spec.x),), (Stream("y", spec.x),),
                                 vectors, results=self.results if spec.stats else (), vector=given.vector,
                                 bulk=given.bulk, sums=self.sums or given.sums), plan)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW, mB, mO: cute.Tensor, eps: Float32, units: Int32, stream: cuda.CUstream):
        """mX, mO: (M, N). units: the most clusters that run at once."""
        self._launch(mX, mO, _given(mW, mB), None, eps, units, stream)

    def _launch(self, mX, mO, vectors, results, eps, units, stream):
        super().__call__((mX,), (mO,), vectors, None, results, None, None, None, (eps,), units, stream)

    def _accumulate(self, c, k, views, r, total):
        """Two passes over the thread's part, which lies in shared memory."""
        chunks = [(j, c.part.inside(j)) for j in range(self.plan.chunks)]
        count = sum(Float32(self.plan.vector) if inside is True else cutlass.select_(
            inside, Float32(self.plan.vector), Float32(0)) for _, inside in chunks)
        added = sum(self._elements(c, views, j).x for j, _ in chunks).reduce(cute.ReductionOp.ADD, 0.0, 0)
        mean = added * cute.arch.rcp_approx(cutlass.max(count, Float32(1)))
        cute.arch.sync_warp()  # or the compiler keeps the first pass's values
        squares = None
        for j, inside in chunks:
            d = or_neutral(self._elements(c, views, j).x - mean, inside, 0.0)
            squares = d * d if squares is None else squares + d * d
        total[0], total[1] = count, mean
        total[2] = squares.reduce(cute.ReductionOp.ADD, 0.0, 0)

    def row(self, sums, r):
        return dict(mean=sums[1], rstd=rsqrt(sums[2] * (1.0 / self.N) + r.eps))

    def write(self, e, r):
        y = (e.x - r.mean) * r.rstd
        y = y * e.weight if self.has("weight") else y
        return dict(y=y + e.bias if self.has("bias") else y)


class KeptLayerNormTrained(KeptLayerNorm):
    """The same, with the arguments of a spec with options, of which it takes rstd and mean (M,)."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW, mB, mO: cute.Tensor, mR, mT, mRstd: cute.Tensor, mMean: cute.Tensor,
                 mScale, eps: Float32, offset, units: Int32, stream: cuda.CUstream):
        self._launch(mX, mO, _given(mW, mB), (mRstd, mMean), eps, units, stream)


# ---- experiment -------------------------------------------------------------------------------------------------


def build_even(spec, plan):
    x, w, b, out, *_, eps, _ = _arguments(spec)
    return KeptEven(spec, plan), (x, w, b, out, eps, Int32(0))


def _join_even(a, b):
    """(mean, variance) of two parts of as many elements."""
    apart = (b[0] - a[0]) * 0.5
    return (a[0] + b[0]) * 0.5, (a[1] + b[1]) * 0.5 + apart * apart


class TreeSlots(Slots):
    def collect(self, r, part):
        p = self.plan
        tk.wait(self.met[r.stage * p.groups + part.group], r.phase)
        lanes = min(p.width, WARP)
        first = tk.lane_id() % lanes if lanes < WARP else tk.lane_id()
        parts = [self._read(r, part, first + i if i else first) for i in range(0, max(p.width, lanes), WARP)]
        while len(parts) > 1:
            parts = [self.monoid.combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return across_lanes(parts[0], self.monoid, lanes)


class KeptEven(KeptLayerNorm):
    exchanges = (Exchange(Monoid(_join_even, (0.0, 0.0))),)
    sums = (2,)

    @cute.jit
    def compute(self, c: Constexpr):
        c.slots = [TreeSlots(s.data, s.met, s.plan, s.monoid) for s in c.slots]
        RowKernel.compute(self, c)

    def _accumulate(self, c, k, views, r, total):
        inverse = 1.0 / self.plan.per_thread
        added = sum(self._elements(c, views, j).x for j in range(self.plan.chunks)).reduce(cute.ReductionOp.ADD, 0.0, 0)
        mean = added * inverse
        cute.arch.sync_warp()  # or the compiler keeps the first pass's values
        squares = None
        for j in range(self.plan.chunks):
            d = self._elements(c, views, j).x - mean
            squares = d * d if squares is None else squares + d * d
        total[0], total[1] = mean, squares.reduce(cute.ReductionOp.ADD, 0.0, 0) * inverse

    def row(self, sums, r):
        return dict(mean=sums[0], rstd=rsqrt(sums[1] + r.eps))


def build_together(spec, config):
    x, w, b, out, *_, eps, _ = _arguments(spec)
    return LayerNormTogether(spec, config), (x, w, b, out, eps)


@cute.jit
def _send(val, buffer: cute.Tensor, mbar_ptr: cute.Pointer):
    rows, (warps_per_row, cluster_n) = buffer.shape
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, col = warp // warps_per_row, warp % warps_per_row
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(mbar_ptr, rows * warps_per_row * cluster_n * 8)
    if lane < cluster_n:
        mine = elem_pointer(buffer, (row, (col, cute.arch.block_idx_in_cluster())))
        cute.arch.store_async_dsmem(cute.recast_ptr(mine, dtype=Int32), _words(val), mbar_ptr, lane)


class LayerNormTogether(LayerNorm):
    def statistics(self, row, eps, first):
        self.first = first
        mean, squares = super().statistics(row, eps, first)
        return mean, squares, row, eps

    def _join(self, mean, squares, row):
        _send(pack_f32x2(mean, squares), row.buffer, row.mbar_ptr)
        return mean, squares

    def _finish(self, g, parts, mine, statistics, affine):
        found = []
        for _, _, row, eps in statistics:
            cute.arch.mbarrier_wait(row.mbar_ptr, 0)
            mean, squares = self._joined(row)
            found.append((mean, rsqrt(squares * (1.0 / self.N) + eps)))
        super()._finish(g, parts, mine, found, affine)

    def _joined(self, row):
        warps, blocks = row.buffer.shape[1]
        parts = collect(row.buffer, Int64(0))
        means, sums, counts = [], [], []
        for i in range(cute.size(parts)):
            m, s = unpack_f32x2(parts[i])
            slot = (tk.lane_id() + i * WARP) % (warps * blocks)
            means.append(m)
            sums.append(s)
            counts.append(self._count(slot % warps, slot // warps))
        lanes = lanes_used(warps * blocks)
        about = cute.arch.shuffle_sync(means[0], 0)
        weighted = [c * (m - about) for c, m in zip(counts, means, strict=True)]
        mean = about + warp_reduce(sum(weighted[1:], weighted[0]), operator.add, lanes) * (1.0 / self.N)
        spread = [s + c * (m - mean) * (m - mean) for s, c, m in zip(sums, counts, means, strict=True)]
        return mean, warp_reduce(sum(spread[1:], spread[0]), operator.add, lanes)
