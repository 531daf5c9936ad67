"""LayerNorm of long rows by a persistent kernel, on RowKernel: weight and bias are read once, not for every row."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...rows.persistent.elements import RowElements, or_neutral
from ...rows.persistent.kernel import RowKernel
from ...rows.persistent.monoid import Exchange, Monoid
from ...rows.persistent.spec import RowSpec, Stream
from ...utils import rsqrt
from ..persistent_plan import SUMS, shape
from . import arguments

# ---- (count, mean, sum of squares about it) of the parts of a row, each centred on its own mean before it squares


def _join(a, b):
    """(count, mean, sum of squares about it) of two parts, as in Chan, Golub and LeVeque, "Algorithms for computing the
    sample variance" (1983)."""
    count = a[0] + b[0]
    share, apart = b[0] * cute.arch.rcp_approx(cutlass.max(count, Float32(1))), b[1] - a[1]
    return count, a[1] + apart * share, a[2] + b[2] + apart * apart * a[0] * share


MOMENTS = Exchange(Monoid(_join, (0.0,) * SUMS, symmetric=False))


def moments(elements, c, views, exact=False):
    """Of the thread's part, which lies in shared memory, in two passes. exact: the mean is as good as correctly
    rounded, so that a row of one number has that number as its mean: a float8 scale shows what else would be left of
    it."""
    vector, chunks = Float32(elements.plan.vector), [(j, c.part.inside(j)) for j in range(elements.plan.chunks)]
    count = sum(vector if inside is True else cutlass.select_(inside, vector, Float32(0)) for _, inside in chunks)
    inverse = cute.arch.rcp_approx(cutlass.max(count, Float32(1)))
    added = sum(elements.chunk(c, views, j).x for j, _ in chunks).reduce(cute.ReductionOp.ADD, 0.0, 0)
    mean = added * inverse
    if exact:
        mean = mean + (added - mean * count) * inverse
    cute.arch.sync_warp()  # or the compiler keeps the first pass's values
    squares = None
    for j, inside in chunks:
        d = or_neutral(elements.chunk(c, views, j).x - mean, inside, 0.0)
        squares = d * d if squares is None else squares + d * d
    return count, mean, squares.reduce(cute.ReductionOp.ADD, 0.0, 0)


def given(*tensors):
    return tuple(t for t in tensors if t is not None) or None


class CentredElements(RowElements):
    """Each thread centres its part of a row on that part's own mean before it squares."""

    def accumulate(self, c, k, views, r, total):
        total[0], total[1], total[2] = moments(self, c, views)


class PersistentLayerNorm(RowKernel):
    """What `layernorm.LayerNorm` computes. Persistent: weight and bias stay in registers across rows; a one-pass kernel
    would re-read them from L2 for each row: 8 bytes of float32 weight and bias for 2 bytes of bf16 in and 2 out."""

    loads, stores, vectors, parameters, results = ("x",), ("y",), ("weight", "bias"), ("eps",), ("rstd", "mean")
    exchanges = (MOMENTS,)

    def __init__(self, spec, plan):
        s = shape(spec)
        vectors = tuple(Stream(name, dtype) for name, dtype in (("weight", spec.weight), ("bias", spec.bias)) if dtype)
        super().__init__(RowSpec(__name__, "PersistentLayerNorm", spec.N, (Stream("x", spec.x),),
                                 (Stream("y", spec.x),),
                                 vectors, results=self.results if spec.stats else (), vector=s.vector, bulk=s.bulk,
                                 sums=s.sums), plan, CentredElements)
        self.norm_spec = spec

    def fake_arguments(self):
        """Compiled for what `arguments.plain` has, and the number of clusters."""
        return (*arguments.plain(self.norm_spec), Int32(0))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW, mB, mO: cute.Tensor, eps: Float32, units: Int32, stream: cuda.CUstream):
        """mX, mO: (M, N). units: the most clusters that run at once."""
        self.launch_rows(mX, mO, given(mW, mB), None, eps, units, stream)

    def launch_rows(self, mX, mO, vectors, results, eps, units, stream):
        super().__call__(mX, None, (mO,), vectors, None, results, None, None, None, (eps,), units, stream)

    def row(self, sums, r):
        return dict(mean=sums[1], rstd=rsqrt(sums[2] * (1.0 / self.N) + r.eps))

    def write(self, e, r):
        y = (e.x - r.mean) * r.rstd
        y = y * e.weight if self.has("weight") else y
        return dict(y=y + e.bias if self.has("bias") else y)


class WithStatistics:
    """A PersistentLayerNorm with the arguments of a spec with options, of which it takes rstd and mean (M,)."""

    def __init__(self, spec, plan):
        self.norm = PersistentLayerNorm(spec, plan)

    def fake_arguments(self):
        """Compiled for what `arguments.with_options` has, and the number of clusters."""
        return (*arguments.with_options(self.norm.norm_spec), Int32(0))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW, mB, mO: cute.Tensor, mR, mT, mRstd: cute.Tensor, mMean: cute.Tensor,
                 mScale, eps: Float32, offset, units: Int32, stream: cuda.CUstream):
        self.norm.launch_rows(mX, mO, given(mW, mB), (mRstd, mMean), eps, units, stream)
