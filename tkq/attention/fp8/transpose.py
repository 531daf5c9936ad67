"""V of float8 attention, transposed into a workspace in which tensor cores find each column's keys side by side."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Uint32

from tkq.attention.fp8.spec import KEYS_TOGETHER as KEYS
from tkq.attention.fp8.spec import TransposeSpec
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.float8 import OPERAND_GROUP

LANES, GROUP = 32, OPERAND_GROUP
COLS = 32  # of a warp's keys: whole sectors of memory


class TransposeValues:
    """workspace[b, h, d, i] = v[b, key(i), h, d], or 0 where there is no such key: key(i) is i, in another order among
    each 16, ``tkq.tile.float8.operand_column``, that P of the attention kernel has.

    V whose columns are contiguous: a warp has 128 keys of 32 columns, a quad of lanes 16 of them. A lane loads its four
    keys' columns, 32 bytes each, transposes them four by four, and stores four keys of each column: 128 bytes a
    warp.
    V whose keys are contiguous: a thread puts 16 keys of a column into the other order."""

    THREADS = 256

    def __init__(self, spec: TransposeSpec):
        self.spec = spec

    def fake_arguments(self) -> tuple:
        """Any sizes; strides of whole vectors. The workspace has whole tiles of keys."""
        B, S, H, padded, D = (*(fake.sym() for _ in range(3)), fake.sym(divisibility=KEYS),
                              fake.sym(divisibility=COLS))
        some = lambda n: tuple(fake.sym64(divisibility=16) for _ in range(n))
        strides = (*some(1), 1, *some(2)) if self.spec.keys_contiguous else (*some(3), 1)
        return (fake.tensor("e4m3", (B, S, H, D), strides, align=16),
                fake.tensor("e4m3", (B, H, D, padded), (*some(3), 1), align=16))

    @cute.jit
    def __call__(self, v: cute.Tensor, workspace: cute.Tensor, stream: cuda.CUstream):
        units = self.units(workspace)
        if cutlass.const_expr(not self.spec.keys_contiguous):
            units = units * LANES
        self.kernel(v, workspace).launch(grid=[cute.ceil_div(units, self.THREADS), 1, 1],
                                         block=[self.THREADS, 1, 1], stream=stream)

    def units(self, workspace):
        """Of work: of a warp, or of a thread."""
        B, H, D, padded = workspace.shape
        if self.spec.keys_contiguous:
            return B * H * D * (padded // GROUP)
        return B * H * (D // COLS) * (padded // KEYS)

    @cute.kernel
    def kernel(self, v: cute.Tensor, workspace: cute.Tensor):
        thread = cute.arch.block_idx()[0] * self.THREADS + cute.arch.thread_idx()[0]
        self.thread(thread, v, workspace)

    @cute.jit
    def thread(self, thread: Int32, v: cute.Tensor, workspace: cute.Tensor):
        """What one thread does: the tests run it on a CPU, one after the other."""
        if cutlass.const_expr(self.spec.keys_contiguous):
            if thread < self.units(workspace):
                self.reorder(thread, v, workspace)
        else:
            if thread // LANES < self.units(workspace):
                self.transpose(thread // LANES, thread % LANES, v, workspace)

    @cute.jit
    def transpose(self, unit, lane, v: cute.Tensor, workspace: cute.Tensor):
        """Neighbouring warps have neighbouring columns and heads: together whole rows of memory."""
        _, S, H, D = v.shape
        chunks = D // COLS
        chunk, rest = unit % chunks, unit // chunks
        h, rest = rest % H, rest // H
        tiles = workspace.shape[3] // KEYS
        tile, b = rest % tiles, rest // tiles
        transpose_tile(lane, v, workspace, (b, h, chunk), tile, tile * KEYS, S)

    @cute.jit
    def reorder(self, unit, v: cute.Tensor, workspace: cute.Tensor):
        _, S, H, D = v.shape
        groups = workspace.shape[3] // GROUP
        first, rest = unit % groups * GROUP, unit // groups
        d, rest = rest % D, rest // D
        h, b = rest % H, rest // H
        words = cute.make_rmem_tensor((GROUP // 4,), Uint32)
        words.fill(Uint32(0))
        keys = cute.recast_tensor(words, Float8E4M3FN)
        by_key = vectors.domain_offset_i64((b, first, h, d), v)
        if first + GROUP <= S:
            whole = cute.make_tensor(by_key.iterator, cute.make_layout(GROUP))
            cute.autovec_copy(cute.recast_tensor(whole, Uint32), words)
        else:
            for j in cutlass.range_constexpr(GROUP):
                if first + j < S:
                    keys[j] = by_key[0, j, 0, 0]
        found = cute.make_rmem_tensor((GROUP // 4,), Uint32)
        for c in cutlass.range_constexpr(GROUP // 4):
            near, far = words[c // 2], words[2 + c // 2]  # eight keys on
            found[c] = low_halves(near, far) if c % 2 == 0 else high_halves(near, far)
        cute.autovec_copy(found, words_at(workspace, (b, h, d, first), GROUP // 4))


@cute.jit
def transpose_tile(lane, v: cute.Tensor, workspace: cute.Tensor, of, tile, begin, end):
    """A warp's part of a tile of the workspace: 32 columns of the keys from ``begin`` on, and zeros for those from
    ``end`` on. of: (batch, head, which 32 columns)."""
    b, h, chunk = of
    first = begin + lane // 4 * GROUP
    rows = []
    for j in cutlass.range_constexpr(4):
        # operand_column of the lane's j-th place
        key = first + 8 * (j // 2) + lane % 4 * 2 + j % 2
        words = cute.make_rmem_tensor((COLS // 4,), Uint32)
        words.fill(Uint32(0))
        if key < end:
            cute.autovec_copy(words_at(v, (b, key, h, chunk * COLS), COLS // 4), words)
        rows.append(words)
    store_columns(lane, workspace, of, tile, rows)


def store_columns(lane, workspace, of, tile, rows):
    """Of a lane's four keys, 32 columns each: to where they lie side by side."""
    b, h, chunk = of
    for i in range(COLS // 4):
        columns = transposed([row[i] for row in rows])
        for j in range(4):
            to = words_at(workspace, (b, h, chunk * COLS + 4 * i + j, tile * KEYS + 4 * lane), 1)
            to[0] = columns[j]


def words_at(x, coord, n):
    """n words of x from a coordinate on."""
    run = vectors.run_at(x, coord, 4 * n)
    pointer = cute.recast_ptr(run.iterator.align(min(4 * n, 16)), dtype=Uint32)
    return cute.make_tensor(pointer, cute.make_layout(n))


def transposed(rows):
    """Four words, of the first bytes of four words, of their second ones, and so on."""
    even, odd = Uint32(0x00FF00FF), Uint32(0xFF00FF00)
    pairs = [((a & even) | ((b & even) << 8), ((a & odd) >> 8) | (b & odd)) for a, b in (rows[:2], rows[2:])]
    found = [[low_halves(p, q), high_halves(p, q)] for p, q in zip(*pairs)]
    return [found[0][0], found[1][0], found[0][1], found[1][1]]


def low_halves(a, b):
    """Of two words, side by side."""
    return (a & Uint32(0xFFFF)) | (b << 16)


def high_halves(a, b):
    return (a >> 16) | (b & Uint32(0xFFFF0000))
