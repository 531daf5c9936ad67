"""The tensor cores: d (+)= a @ b with wgmma, asynchronous.

``mm_*`` starts from zero, ``mma_*`` accumulates; ABt says that b is stored transposed, (n, k), AtB that a is, (k, m).
Each call fences, issues and commits one group; waiting is always explicit, with ``mma_wait``. A warpgroup's 128 threads
call them together. Between a call and the wait for it, d, and a where it is in registers, must not be touched, nor a
shared operand overwritten.
"""
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .dtypes import FP8, HALF, type_name
from .naps import poisoned, product_begins, products_end
from .register import ROWS, RegTile
from .shared import SharedTile


def mma_fence():
    """Order this warpgroup's register writes before the wgmma that follow; the mm calls do it themselves."""
    warpgroup.fence()


def mma_commit():
    """Close a group of wgmma; the mm calls do it themselves."""
    warpgroup.commit_group()


def mma_wait(n=0):
    """Wait until at most ``n`` committed groups of this warpgroup are in flight: 0 to 7, known when compiled."""
    if not isinstance(n, int) or not 0 <= n <= 7:
        raise ValueError(f"mma_wait: n is {n}, allowed are 0 to 7")
    products_end(n)
    warpgroup.wait_group(n)


def _part(frag, part, stage):
    """(mma, parts, k, stages) to (mma, 1, k)"""
    x = frag[None, part, None, stage]
    layout = cute.make_layout((x.shape[0], 1, x.shape[1]), stride=(x.stride[0], 0, x.stride[1]))
    return cute.make_tensor(x.iterator, layout)


def _check(what, d, a, b, trans_a, trans_b):
    """Every rule that wgmma has for its operands, each with the operand's name."""
    if not isinstance(d, RegTile) or d.dtype is not Float32:
        raise TypeError(f"{what}: operand d is {d}, allowed is an fp32 register tile")
    if not isinstance(b, SharedTile) or b.stage is None:
        raise TypeError(f"{what}: operand b must be one shared tile (index the ring), got {b}")
    in_registers = isinstance(a, RegTile)
    if not in_registers and (not isinstance(a, SharedTile) or a.stage is None):
        raise TypeError(f"{what}: operand a must be a register tile or one shared tile (index the ring), got {a}")
    a_type, b_type = a if in_registers else a.type, b.type
    allowed = HALF + FP8
    if a_type.dtype not in allowed or b_type.dtype not in allowed:
        name, bad = ("a", a_type) if a_type.dtype not in allowed else ("b", b_type)
        raise TypeError(f"{what}: operand {name} is {bad}, allowed are bf16, fp16, e4m3, e5m2")
    if a_type.dtype is not b_type.dtype and not (a_type.dtype in FP8 and b_type.dtype in FP8):
        names = f"operand a is {type_name(a_type.dtype)} and operand b {type_name(b_type.dtype)}"
        raise TypeError(f"{what}: {names}; only e4m3 and e5m2 mix")
    if a_type.dtype in FP8 and (trans_a or not trans_b):
        raise TypeError(f"{what}: operands of 8 bits must have K contiguous: use mm_ABt or mma_ABt")
    if trans_a and in_registers:
        raise TypeError(f"{what}: operand a is transposed, so it must be in shared memory")
    m, k = (ROWS, a.cols) if in_registers else (a_type.cols, a_type.rows) if trans_a else (a_type.rows, a_type.cols)
    n, b_k = (b_type.rows, b_type.cols) if trans_b else (b_type.cols, b_type.rows)
    if m % ROWS:
        raise ValueError(f"{what}: operand a is {a_type}: its {m} rows are not a multiple of {ROWS}")
    if k != b_k:
        raise ValueError(f"{what}: operand a is {a_type} (K = {k}), operand b is {b_type} (K = {b_k})")
    step = 256 // a_type.dtype.width
    if k % step:
        raise ValueError(f"{what}: K is {k}, allowed for {type_name(a_type.dtype)} are multiples of {step}")
    if d.cols > n or n % d.cols:
        raise ValueError(f"{what}: operand d has {d.cols} columns, operand b is {b_type} and gives {n}")
    panel = b_type.swizzle * 8 // b_type.dtype.width
    if not trans_b and d.cols % panel and panel % d.cols:
        raise ValueError(f"{what}: operand d has {d.cols} columns, which straddle operand b's panels of {panel}")
    return m // ROWS, n // d.cols


def _mma(what, d, a, b, accumulate, trans_a=False, trans_b=False, a_part=None, b_part=None, k=None):
    parts = _check(what, d, a, b, trans_a, trans_b)
    a_part, b_part = _which(what, "a_part", a_part, parts[0]), _which(what, "b_part", b_part, parts[1])
    from_regs = isinstance(a, RegTile)
    dtype = a.dtype if from_regs else a.type.dtype
    where = warpgroup.OperandSource.RMEM if from_regs else warpgroup.OperandSource.SMEM
    a_major = OperandMajorMode.MN if trans_a else OperandMajorMode.K
    b_major = OperandMajorMode.K if trans_b else OperandMajorMode.MN
    if dtype in FP8:
        op = warpgroup.MmaF8Op(dtype, b.type.dtype, Float32, (ROWS, d.cols, 32), where, a_major, b_major)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, d.cols, 16), where, a_major, b_major)
    thr = cute.make_tiled_mma(cute.make_mma_atom(op)).get_slice(0)
    # Fragments of the whole ring, then the stage: the descriptors' bases leave the loop.
    frag_b = _part(thr.make_fragment_B(thr.partition_B(b.staged if trans_b else b.staged_T)), b_part, b.stage)
    frag_a = a.tensor if from_regs else _part(
        thr.make_fragment_A(thr.partition_A(a.staged_T if trans_a else a.staged)), a_part, a.stage)
    mma_fence()
    atom = cute.make_mma_atom(op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for step in _steps(what, k, cute.size(frag_b, mode=[2]), 256 // dtype.width):
        cute.gemm(atom, d.tensor, frag_a[None, None, step], frag_b[None, None, step], d.tensor)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    mma_commit()
    if poisoned():
        product_begins(*(x.tensor.iterator.toint() for x in (a, b) if isinstance(x, SharedTile)))


def _which(what, name, part, n):
    """Which of an operand's n parts: it has to be said where there are several."""
    if part is None and n > 1:
        raise ValueError(f"{what}: {name} is not given, and the operand has {n} parts: which is multiplied?")
    if isinstance(part, int) and not 0 <= part < n:
        raise ValueError(f"{what}: {name} is {part}, allowed are 0 to {n - 1}")
    return 0 if part is None else part


def _steps(what, k, steps, width):
    """Which of the steps along K: all of them, or those between two numbers k."""
    if k is not None and (not isinstance(k, (tuple, list)) or len(k) != 2):
        raise TypeError(f"{what}: k is {k}, allowed is a pair (first, end)")
    first, end = (0, steps * width) if k is None else k
    if first % width or end % width or not 0 <= first < end <= steps * width:
        raise ValueError(f"{what}: k is {k}, allowed are multiples of {width} from 0 to {steps * width}")
    return range(first // width, end // width)


def mm_ABt(d, a, b, **parts):
    """d = a @ b.T. d: 64 x n fp32 registers; a: (64, k) in shared memory or registers; b: (n, k) shared.

    a_part=, b_part=: which 64 rows of a taller a, which d.cols rows of a taller b. k=(first, end): only that of K. A
    warpgroup together; d is there after ``mma_wait``."""
    _mma("mm_ABt", d, a, b, False, trans_b=True, **parts)


def mma_ABt(d, a, b, **parts):
    """d += a @ b.T, otherwise as ``mm_ABt``."""
    _mma("mma_ABt", d, a, b, True, trans_b=True, **parts)


def mm_AB(d, a, b, **parts):
    """d = a @ b. a: (64, k) in shared memory or registers; b: (k, n) shared. 16-bit types."""
    _mma("mm_AB", d, a, b, False, **parts)


def mma_AB(d, a, b, **parts):
    """d += a @ b, otherwise as ``mm_AB``."""
    _mma("mma_AB", d, a, b, True, **parts)


def mm_AtB(d, a, b, **parts):
    """d = a.T @ b. a: (k, 64), b: (k, n), both shared. 16-bit types."""
    _mma("mm_AtB", d, a, b, False, trans_a=True, **parts)


def mma_AtB(d, a, b, **parts):
    """d += a.T @ b, otherwise as ``mm_AtB``."""
    _mma("mma_AtB", d, a, b, True, trans_a=True, **parts)


def mm_AtBt(d, a, b, **parts):
    """d = a.T @ b.T. a: (k, 64), b: (n, k), both shared. 16-bit types."""
    _mma("mm_AtBt", d, a, b, False, trans_a=True, trans_b=True, **parts)


def mma_AtBt(d, a, b, **parts):
    """d += a.T @ b.T, otherwise as ``mm_AtBt``."""
    _mma("mma_AtBt", d, a, b, True, trans_a=True, trans_b=True, **parts)
