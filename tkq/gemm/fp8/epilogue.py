"""What happens to a float8 GEMM's sums on their way out: scales, bias, activation, e4m3. Device code."""
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int16, Uint8, const_expr
from cutlass.cutlass_dsl import T, dsl_user_op

from ... import tile as tk
from ...tile.assembly import ptx
from ..epilogue import registers as ep
from ..epilogue.registers import activation
from .config import (
    Fp8Config,
    few_special_functions,
    prefetches_bias,
    prefetches_scales,
    sums_begin_with_bias,
)
from .matrices import load_row_scales
from .spec import Fp8Spec
from .state import Tiles


def fma_scaled(d: tk.RegTile, a: tk.RegTile, row: tk.RowVec, scales: cute.Tensor):
    """d[i, j] += a[i, j] * row[i] * scales[j]; scales: as many fp32 in shared memory, aligned to 8 bytes."""
    pairs = cute.make_tensor(scales.iterator, cute.make_layout((2, a.cols // 2)))
    to, of = d.rows_view, a.rows_view
    two = cute.make_rmem_tensor((2,), Float32)
    for j in range(a.cols // 8):
        cute.autovec_copy(pairs[None, tk.lane_id() % 4 + 4 * j], two)
        for r in range(2):
            for e in range(2):
                at = r, 2 * j + e
                to[at] = cute.math.fma(of[at], row.tensor[r] * two[e], to[at])


@dsl_user_op
def e4m3_pair(low, high, *, loc=None, ip=None):
    """Two fp32 as e4m3, ``low`` in the lower byte: to nearest even, beyond 448 to 448, NaN to NaN."""
    return Int16(ptx([Float32(low), Float32(high)], "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", loc, ip,
                     T.i16(), pure=True))


def pairs_of(subtiles: tk.SharedTile) -> tk.SharedTile:
    """A ring of 8-bit tiles as one of 16 bits, half as wide."""
    x = subtiles.type
    return subtiles.scratch(tk.st(x.rows, x.cols // 2, Int16, x.swizzle))


def store_e4m3(dst: tk.SharedTile, src: tk.RegTile):
    """dst = src in e4m3; dst: one tile of ``pairs_of``. 2-byte stores: 8 rows of a 128-byte swizzle meet in no bank."""
    view, tile = src.rows_view, dst.tensor
    for r in range(2):
        for j in range(src.cols // 8):
            tile[tk.first_row() + 8 * r, tk.lane_id() % 4 + 4 * j] = e4m3_pair(view[r, 2 * j], view[r, 2 * j + 1])


@cute.jit
def store_e4m3_elements(dst: cute.Tensor, src: tk.RegTile, row0, col0):
    """dst[row0 + i, col0 + j] = src[i, j] in e4m3, inside dst, byte by byte: any stride, any alignment."""
    rows, cols = cute.size(dst, mode=[0]), cute.size(dst, mode=[1])
    bytes, view = cute.recast_tensor(dst, Uint8), src.rows_view
    for r in cutlass.range_constexpr(2):
        row = row0 + tk.first_row() + 8 * r
        if row < rows:
            for j in cutlass.range_constexpr(src.cols // 8):
                col = col0 + tk.first_col() + 8 * j
                both = e4m3_pair(view[r, 2 * j], view[r, 2 * j + 1])
                if col < cols:
                    bytes[row, col] = Uint8(both & Int16(255))
                if col + 1 < cols:
                    bytes[row, col + 1] = Uint8((both >> Int16(8)) & Int16(255))


def activate(part: tk.RegTile, name: Constexpr, out: Constexpr, few_special: Constexpr = False):
    """part = the activation of this name, where there is one, for a result of type ``out``. few_special: with few
    special functions, as far as the result does not show it."""
    if name is not None:
        few = few_special and name == "silu" and out is BFloat16
        tk.apply(part, silu_in_8_bits if few else activation(name, out), part)


# 1 / (1 + u) for u in 0 .. 1: least relative error, u near 1 counting four times as much as u near 0
_SIGMOID = (0.99637623, -0.92270818, 0.62158952, -0.1956757)


def silu_in_8_bits(x):
    """x / (1 + exp(-x)) to 9e-4 of itself above 0, 2.2e-3 to -3, 3.7e-3 to -87, 0 below: for bf16, whose rounding is
    off by up to 4e-3. Eight instructions, one of them special; the exact one has five, two of them, and is quicker
    where an activation has registers: by rows, and in halves (docs/attempts/gemm.md).

    With u = exp(-|x|) it is x times 1 - u / (1 + u) above 0, times u / (1 + u) below. NaN from -inf, as torch's."""
    u = cute.math.exp2(cute.math.abs(x) * Float32(-tk.LOG2E), fastmath=True)
    q = Float32(_SIGMOID[-1])
    for factor in reversed(_SIGMOID[:-1]):
        q = q * u + Float32(factor)
    above = Float32(cutlass.select_(x > Float32(0.0), Float32(1.0), Float32(0.0)))  # one instruction
    return x * cute.math.abs(above - u * q)


# ---- What a consumer of the float8 GEMM does with its sums: scales, bias, activation, and the way out.


OUTPUT_BARRIER = 8  # and one more for each further consumer


class Epilogue:
    """What becomes of a consumer's sums, subtile by subtile: scale, bias, activation, and to memory.

    ``store_buffers`` of a consumer's own in shared memory: its own named barrier twice a subtile (written by all, sent
    by one warp), none where each warp stores its own 16 rows; TMA's own count of stores in flight for using a buffer
    again."""

    def __init__(self, spec: Fp8Spec, config: Fp8Config, tiles: Tiles, operands):
        self.spec, self.config, self.tiles, self.operands = spec, config, tiles, operands
        self.out = tk.element_type(spec.out)

    @cute.jit
    def write(self, g, s: Constexpr, u: Constexpr, t, wg):
        """The tile, subtile by subtile."""
        x, spec = self.config, self.spec
        if const_expr(not prefetches_bias(x)):
            self.load_bias(g, u, t)
        if const_expr(spec.scale_b == "row" and not prefetches_scales(spec, x)):
            load_row_scales(self.operands, g, u, t, wg)
        factor = g.scale_a[0] * g.scale_b[0] if const_expr(spec.scale_b == "tensor") else None
        shrink = cute.arch.rcp_approx(g.out_scale[0]) if const_expr(spec.out == "e4m3") else None
        for i in cutlass.range_constexpr(x.m_subtiles * x.n // self.tiles.store_n):
            self.write_subtile(g, s, u, t, i, wg, factor, shrink)

    def write_subtile(self, g, s, u, t, i, wg, factor, shrink):
        """factor: of scales per tensor. shrink: one over that of e4m3."""
        x, spec = self.config, self.spec
        first, part, at = i * self.tiles.store_n % x.n, self.subtile_of(u, i), self.place(t, i, wg)
        self.scale(g, u, part, factor, i * self.tiles.store_n // x.n, first, t)
        self.add_bias(u, part, first)
        activate(part, spec.activation, self.out, few_special_functions(spec, x))
        if spec.out == "e4m3":
            tk.mul(part, part, shrink)
        if spec.store == "tma":
            self.send(g, s, part, t, at, wg, (i % x.store_buffers, x.stores_in_flight(i, spec.out)))
        elif spec.out == "e4m3":
            store_e4m3_elements(g.c, part, at[0] * 64, at[1] * self.tiles.store_n)
        else:
            tk.store_elements(g.c, part, at[0] * 64, at[1] * self.tiles.store_n)

    def load_bias(self, g, u, t):
        if self.spec.bias is not None:
            ep.load_lane_cols(u.bias, g.bias, t.col * self.config.n)

    def add_bias(self, u, part, first):
        """To columns of the tile from ``first`` on, where their sums did not begin with it."""
        if self.spec.bias is not None and not sums_begin_with_bias(self.config):
            bias = tk.cv(self.tiles.store_n)
            ep.gather(bias, u.bias, first)
            tk.add_col(part, part, bias)

    def subtile_of(self, u, i):
        """Subtile i of a consumer's, as a view of its sums."""
        x = self.config
        w, first = i * self.tiles.store_n // x.n, i * self.tiles.store_n % x.n
        return tk.columns(u.acc[w * x.split + first // x.part], first % x.part, self.tiles.store_n)

    def place(self, t, i, wg):
        """Where it lies in C: (row, column) in subtiles."""
        x = self.config
        each = x.n // self.tiles.store_n
        return t.row * (x.m // 64) + wg * x.m_subtiles + i // each, t.col * each + i % each

    def scale(self, g, u, part, factor, w, first, t):
        if self.spec.scale_b == "tensor":
            tk.mul(part, part, factor)
        elif self.spec.scale_b == "row":
            if prefetches_scales(self.spec, self.config):
                cols = tk.columns(u.cols, first, self.tiles.store_n)
            else:
                cols = tk.cv(self.tiles.store_n)
                tk.load_cols(cols, self.operands.column_scales(g, t), t.col * self.config.n + first, g.n)
            tk.mul_outer(part, part, u.rows[w], cols)

    @cute.jit
    def send(self, g, s: Constexpr, part: Constexpr, t, at, wg, buffers: Constexpr):
        """buffers: (which of the consumer's, how many stores may be under way when it is used again)."""
        buffer, stores_in_flight = buffers
        tk.store_wait(stores_in_flight)
        self.meet(wg)
        number, subtiles = wg * self.config.store_buffers + buffer, s.c.stacked(self.tiles.stores)
        if const_expr(self.spec.out == "e4m3"):
            store_e4m3(pairs_of(subtiles)[number], part)
        else:
            tk.store(subtiles[number], part)
        tk.publish()
        self.meet(wg)
        if const_expr(self.config.store_per_warp):
            warp = tk.warp_id() % 4
            self.operands.store_subtile(g, s.c[4 * number + warp], t, (4 * at[0] + warp, at[1]))
        elif tk.first_warp_of_group():
            self.operands.store_subtile(g, s.c[number], t, at)

    def meet(self, wg):
        """Synchronise the threads that write a store's rows."""
        if self.config.store_per_warp:
            cute.arch.sync_warp()
        else:
            tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
