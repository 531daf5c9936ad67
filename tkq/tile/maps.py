"""Elementwise maps, row operations and row reductions of register tiles. Destination first; a destination may be
one of the operands.

Scope: the warpgroup's threads, each with its own elements and when it likes; nothing here waits. Only ``row_max``,
``row_sum`` and ``quad_sum`` exchange values, inside a quad of lanes: whole warps call them."""
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Numeric
from cutlass.cutlass_dsl import T, dsl_user_op

from .assembly import ptx
from .dtypes import HALF, type_name
from .register import ColVec, RegTile, RowVec, rv

_TILES = (RegTile, RowVec, ColVec)
_ANY = (Float32, *HALF)


def _size(x):
    return cute.size(x.tensor)


def _name(x):
    return str(x) if isinstance(x, _TILES) else f"{x!r} ({type(x).__name__})"


def _dtype(x):
    return x.dtype if isinstance(x, RegTile) else Float32


def _same(what, dst, *operands, allowed=_ANY):
    """dst is a tile or vector of an allowed type, and so is each operand, of the same shape; or it is a number."""
    if not isinstance(dst, _TILES) or _dtype(dst) not in allowed:
        names = ", ".join(type_name(t) for t in allowed)
        raise TypeError(f"{what}: dst is {_name(dst)}, allowed are register tiles and vectors of {names}")
    for name, x in zip("abcdefgh", operands):
        if isinstance(x, _TILES) and (type(x) is not type(dst) or _size(x) != _size(dst)):
            raise ValueError(f"{what}: operand {name} is {_name(x)}, dst is {_name(dst)}")
        if isinstance(x, RegTile) and x.dtype is not dst.dtype:
            raise TypeError(f"{what}: operand {name} is {_name(x)}, dst is {_name(dst)}: use copy to convert")
        if not isinstance(x, (*_TILES, int, float, Numeric)):
            raise TypeError(f"{what}: operand {name} is {_name(x)}, allowed are tiles and vectors as dst, and numbers")


def _value(x):
    return x.tensor.load() if isinstance(x, _TILES) else x


def _map(what, dst, f, *operands, allowed=_ANY):
    _same(what, dst, *operands, allowed=allowed)
    dst.tensor.store(f(*[_value(x) for x in operands]).to(_dtype(dst)))


# ---- elementwise: tiles and vectors; a second operand may be a number ----------------------------


def add(dst, a, b):
    """dst = a + b; fp32, bf16, fp16. b: as a, or a number."""
    _map("add", dst, lambda x, y: x + y, a, b)


def sub(dst, a, b):
    """dst = a - b, otherwise as ``add``."""
    _map("sub", dst, lambda x, y: x - y, a, b)


def mul(dst, a, b):
    """dst = a * b, otherwise as ``add``."""
    _map("mul", dst, lambda x, y: x * y, a, b)


def exp2(dst, a):
    """dst = 2 ** a, fp32, by MUFU.EX2: about 2 ulp."""
    _map("exp2", dst, lambda x: cute.math.exp2(x, fastmath=True), a, allowed=(Float32,))


def log2(dst, a):
    """dst = log2(a), fp32, by MUFU.LG2: within 2 ** -22 for a in (0.5, 2), 2 ulp elsewhere."""
    _map("log2", dst, lambda x: cute.math.log2(x, fastmath=True), a, allowed=(Float32,))


def tanh(dst, a):
    """dst = tanh(a), fp32, by MUFU.TANH: a relative error of 2 ** -11, between fp16's and bf16's own."""
    _map("tanh", dst, lambda x: cute.math.tanh(x, fastmath=True), a, allowed=(Float32,))


def apply(dst, f, *operands):
    """dst[i] = f(operands[i], ..), element by element; f takes and returns numbers of the DSL: an activation, say.

    fp32, bf16, fp16; what f returns is converted to dst's type."""
    _same("apply", dst, *operands)
    for i in range(_size(dst)):
        dst.tensor[i] = _dtype(dst)(f(*[x.tensor[i] if isinstance(x, _TILES) else x for x in operands]))


COLUMN = "column"  # an operand of apply_narrow: the element's column, counted from the thread's ``first_col``


def apply_narrow(dst, f, *operands):
    """dst[i, j] = f(a[i, j], ..), computed in fp32 and rounded; dst is a tile of bf16 or fp16: an A operand. Or a tuple
    of such tiles, of which f gives as many values.

    f takes and returns fp32. Operands: fp32 tiles and tiles of dst's type, as wide as dst; row and column vectors, of
    which f gets the element's row's or column's value; ``COLUMN``; numbers. Two elements are finished before the next
    two begin, so that few results live in fp32."""
    several = isinstance(dst, tuple)
    to, dst = dst if several else (dst,), dst[0] if several else dst
    check_narrow("apply_narrow", to, operands)
    pairs = [cute.recast_tensor(d.tensor, Int32) for d in to]
    for i in range(dst.cols // 4):
        two = [f(*[element(x, 2 * i + e) for x in operands]) for e in range(2)]
        for k, pair in enumerate(pairs):
            pair[i] = _cvt2(*[x[k] if several else x for x in two], dst.dtype)


def check_narrow(what, to, operands):
    """Operands of `apply_narrow`, and of what computes a part of its elements. to: all its destinations.

    Raises:
        TypeError, ValueError: one of them is none that it takes, or of another width.
    """
    if not all(isinstance(d, RegTile) and d.dtype in HALF for d in to):
        names = ", ".join(map(_name, to))
        raise TypeError(f"{what}: dst is {names}, allowed are register tiles of bf16 and fp16")
    dst = to[0]
    for name, x in (*zip("abcdefgh", operands), *(("of dst", d) for d in to)):
        if isinstance(x, (RegTile, ColVec)) and x.cols != dst.cols:
            raise ValueError(f"{what}: operand {name} is {_name(x)}, dst is {dst}")
        if isinstance(x, RegTile) and x.dtype not in (Float32, dst.dtype):
            raise TypeError(f"{what}: operand {name} is {x}, dst is {dst}: allowed are fp32 and dst's type")
    for name, x in zip("abcdefgh", operands):
        if not isinstance(x, (*_TILES, int, float, Numeric)) and x is not COLUMN:
            raise TypeError(f"{what}: operand {name} is {_name(x)}, allowed are tiles, vectors, COLUMN, numbers")


def element(x, i):
    """What belongs to element i of a register tile, as fp32."""
    if isinstance(x, RegTile):
        if x.dtype is BFloat16:  # from its pair: from an element by itself, early, the assembler makes 32 bits of each
            pair = cute.recast_tensor(x.tensor, Int32)[i // 2]
            return (pair & Int32(-65536) if i % 2 else pair << Int32(16)).bitcast(Float32)
        return Float32(x.tensor[i])
    if isinstance(x, RowVec):
        return x.tensor[i // 2 % 2]
    if isinstance(x, ColVec):
        return x.tensor[i // 4 * 2 + i % 2]
    return 8 * (i // 4) + i % 2 if x is COLUMN else x


# ---- with a value a row, a value a column: fp32 ----------------------------------------------------


def _tiles(what, dst, a):
    for name, x in (("dst", dst), ("a", a)):
        if not isinstance(x, RegTile) or x.dtype is not Float32:
            raise TypeError(f"{what}: operand {name} is {_name(x)}, allowed is an fp32 register tile")
    _same(what, dst, a)


def _row(what, name, v):
    if not isinstance(v, RowVec):
        raise TypeError(f"{what}: operand {name} is {_name(v)}, allowed is a row vector (rv)")


def _map_rows(what, dst, a, v, f):
    _tiles(what, dst, a)
    _row(what, "v", v)
    d, s = dst.rows_view, a.rows_view
    for r in range(2):
        d[r, None].store(f(s[r, None].load(), v.tensor[r]))


def add_row(dst, a, v):
    """dst[i, j] = a[i, j] + v[i]"""
    _map_rows("add_row", dst, a, v, lambda x, y: x + y)


def sub_row(dst, a, v):
    """dst[i, j] = a[i, j] - v[i]"""
    _map_rows("sub_row", dst, a, v, lambda x, y: x - y)


def mul_row(dst, a, v):
    """dst[i, j] = a[i, j] * v[i]"""
    _map_rows("mul_row", dst, a, v, lambda x, y: x * y)


def div_row(dst, a, v):
    """dst[i, j] = a[i, j] / v[i], by one approximate reciprocal a row (1 ulp)."""
    _row("div_row", "v", v)
    inv = rv()
    for r in range(2):
        inv.tensor[r] = cute.arch.rcp_approx(v.tensor[r])
    _map_rows("div_row", dst, a, inv, lambda x, y: x * y)


def _map_cols(what, dst, a, v, f):
    _tiles(what, dst, a)
    if not isinstance(v, ColVec):
        raise TypeError(f"{what}: operand v is {_name(v)}, allowed is a column vector (cv)")
    if v.cols != a.cols:
        raise ValueError(f"{what}: operand v is {_name(v)}, operand a is {a}")
    d, s = dst.rows_view, a.rows_view
    for r in range(2):
        for j in range(a.cols // 4):
            d[r, j] = f(s[r, j], v.tensor[j])


def add_col(dst, a, v):
    """dst[i, j] = a[i, j] + v[j]"""
    _map_cols("add_col", dst, a, v, lambda x, y: x + y)


def mul_col(dst, a, v):
    """dst[i, j] = a[i, j] * v[j]"""
    _map_cols("mul_col", dst, a, v, lambda x, y: x * y)


def mul_outer(dst, a, row, col):
    """dst[i, j] = a[i, j] * col[j] * row[i]"""
    mul_col(dst, a, col)
    mul_row(dst, dst, row)


def decay_outer(dst, a, row, col):
    """dst[i, j] = a[i, j] * 2 ** (row[i] - col[j]): a decay between rows and columns."""
    _tiles("decay_outer", dst, a)
    _row("decay_outer", "row", row)
    if not isinstance(col, ColVec) or col.cols != a.cols:
        raise ValueError(f"decay_outer: operand col is {_name(col)}, operand a is {a}")
    d, s = dst.rows_view, a.rows_view
    for r in range(2):
        for j in range(a.cols // 4):
            d[r, j] = s[r, j] * cute.math.exp2(row.tensor[r] - col.tensor[j], fastmath=True)


def fma_outer(dst, a, row, block):
    """dst[i, j] += a[i, j] * row[i] * block[j // width]: ``block`` is a list of cols / width numbers, the same in all
    threads. Promotes a block-scaled product into its sum."""
    _tiles("fma_outer", dst, a)
    _row("fma_outer", "row", row)
    if not isinstance(block, (list, tuple)):
        raise TypeError(f"fma_outer: block is {_name(block)}, allowed is a list of numbers")
    if not block or a.cols // 8 % len(block):
        raise ValueError(f"fma_outer: block has {len(block)} values, operand a is {a}, allowed: divisors of cols / 8")
    d, s = dst.rows_view, a.rows_view
    width = a.cols // len(block)
    for r in range(2):
        scale = [row.tensor[r] * x for x in block]
        for j in range(a.cols // 4):
            d[r, j] = cute.math.fma(s[r, j], scale[(8 * (j // 2)) // width], d[r, j])


# ---- row reductions ------------------------------------------------------------------------------


def _reduce_rows(what, dst, a, v, f, chains=2):
    """chains: how many results are accumulated apart, to shorten the chain of dependent instructions."""
    _row(what, "dst", dst)
    if not isinstance(a, RegTile) or a.dtype is not Float32:
        raise TypeError(f"{what}: operand a is {_name(a)}, allowed is an fp32 register tile")
    if v is not None:
        _row(what, "v", v)
    s = a.rows_view
    for r in range(2):
        acc = [s[r, j] for j in range(chains)]
        for j in range(chains, a.cols // 4):
            acc[j % chains] = f(acc[j % chains], s[r, j])
        while len(acc) > 1:
            acc = [f(acc[i], acc[i + 1]) for i in range(0, len(acc), 2)]
        dst.tensor[r] = acc[0] if v is None else f(v.tensor[r], acc[0])


def _quad(dst, f):
    for r in range(2):
        x = dst.tensor[r]
        for offset in (1, 2):
            x = f(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
        dst.tensor[r] = x


def row_max(dst, a, v=None):
    """dst[i] = max(v[i], the row's elements). NaN is dropped, as by fmaxf. Whole warps."""
    _reduce_rows("row_max", dst, a, v, cute.arch.fmax)
    _quad(dst, cute.arch.fmax)


def row_sum(dst, a, v=None):
    """dst[i] = v[i] + the sum of the row. Whole warps."""
    if v is not None:
        _row("row_sum", "v", v)
    _reduce_rows("row_sum", dst, a, None, lambda x, y: x + y)
    quad_sum(dst)
    if v is not None:
        add(dst, dst, v)


def row_sum_partial(dst, a, v=None):
    """Each thread's own part of ``row_sum``, v included; ``quad_sum`` finishes it, once, after the loop."""
    _reduce_rows("row_sum_partial", dst, a, v, lambda x, y: x + y)


def quad_sum(dst):
    """Sum a row vector over the four lanes that share its rows. Whole warps."""
    _row("quad_sum", "dst", dst)
    _quad(dst, lambda x, y: x + y)


@cute.jit
def finite_or_zero(dst: RowVec, src: RowVec):
    """dst = src, but 0 for -inf: the maximum of a row that is masked all over."""
    _row("finite_or_zero", "dst", dst)
    _row("finite_or_zero", "src", src)
    for r in cutlass.range_constexpr(2):
        x = src.tensor[r]
        dst.tensor[r] = Float32(0.0) if x == -Float32.inf else x


# ---- copies --------------------------------------------------------------------------------------


def copy(dst, src, again=False):
    """dst = src, converting between dtypes (to nearest even). A tile of fp32 becomes one of 16 bits, that is an
    accumulator an A operand, and back: the two hold the same elements in the same order.

    again: fp32 to 16 bits is computed here, whatever was computed before: of two copies of one tile the compiler would
    make one, whose registers are in use from the first to the second. "assembler": nor does the assembler find the one
    before, at an instruction more for each pair."""
    if not isinstance(src, _TILES) or type(dst) is not type(src) or _size(dst) != _size(src):
        raise ValueError(f"copy: src is {_name(src)}, dst is {_name(dst)}")
    if not isinstance(dst, RegTile) or dst.dtype == src.dtype:
        dst.tensor.store(src.tensor.load())
    elif src.dtype is Float32 and dst.dtype in HALF:
        # Outright pairs: the DSL's own conversion does not always find them.
        s, d = src.tensor, cute.recast_tensor(dst.tensor, Int32)
        for i in range(cute.size(d)):
            d[i] = _cvt2(s[2 * i], s[2 * i + 1], dst.dtype, again)
    elif dst.dtype is Float32 and src.dtype in HALF:
        for i in range(_size(dst)):
            dst.tensor[i] = Float32(src.tensor[i])
    else:
        names = f"{type_name(src.dtype)} to {type_name(dst.dtype)}"
        raise TypeError(f"copy: from {names}, allowed are fp32 to bf16 or fp16, and back, and the same types")


@dsl_user_op
def _cvt2(lo, hi, dtype, again=False, *, loc=None, ip=None):
    name = "bf16x2" if dtype is HALF[0] else "f16x2"
    if again == "assembler":
        return Int32(ptx([Float32(lo), Float32(hi)],
                         f"{{ .reg .b32 t; cvt.rn.{name}.f32 t, $1, $2; prmt.b32 $0, t, t, 0x1032; }}", "=r,f,f", loc,
                         ip, T.i32()))
    return Int32(ptx([Float32(lo), Float32(hi)], f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", loc, ip, T.i32(),
                     pure=not again))
