"""What the kernels with channels contiguous share, forward and backward: for the compiler their arguments, the grid, a
thread's place and its sequence, rows of registers."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.config import WARP
from tkq.convolution.sequences import Sequence
from tkq.convolution.taps import row, state_column
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Runs:
    """The part of a kernel that finds a thread's run of tokens."""

    def __init__(self, spec, sequences, walk):
        """walk: the kernel's, through the tokens of a run: (channel, run, batch, the first token's sequence, g, are
        channels normed?)."""
        self.spec, self.sequences, self.walk = spec, sequences, walk

    @cute.jit
    def visit(self, column, part, batch, g):
        """column: of vectors; part: of runs. Of normed channels a warp walks as a whole, as it adds up rows."""
        _, S, C = g.x.shape
        channel, first = column * self.spec.vector, part * g.run
        if first < S:
            of = Sequence(Int32(0), Int32(0), S)
            if const_expr(g.cu is not None):
                of = self.sequences.find(g.cu, batch, first, S)
            if const_expr(self.spec.head):
                if column // WARP * WARP * self.spec.vector < g.normed:  # some of the warp's: the others do without
                    self.walk(channel, part, batch, of, g, True)
                else:
                    if channel < C:
                        self.walk(channel, part, batch, of, g)
            else:
                if channel < C:
                    self.walk(channel, part, batch, of, g)


@cute.jit
def before(kernel, window, i: cutlass.Constexpr, place, at, g):
    """Row i of the window, at a place (batch, token, channel), from the state where the token is before the first one.
    Of packed sequences what is before the sequence is not looked at. at: x's column."""
    batch, t, channel = place
    V = kernel.spec.vector
    if t >= 0:
        put(window, i, vectors.wide(vectors.load(row(g.x, at, t, V))))
    else:
        if const_expr(g.state is None or g.cu is not None):
            put(window, i, [Float32(0.0)] * V)
        else:
            put(window, i, state_column(g.state, (batch, channel), V)(t + kernel.taps.ahead))


def blocks(kernel, x, run):
    """The grid: columns of vectors, runs of tokens, sequences."""
    B, S, C = x.shape
    return [cute.ceil_div(C, WARP * kernel.spec.vector), cute.ceil_div(cute.ceil_div(S, run), kernel.config.warps), B]


def place_of(config):
    """(column of vectors, run, sequence) of a thread."""
    block, part, batch = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
    return block * WARP + tk.lane_id(), part * config.warps + warp, batch


def unpacked(rows, n, vector):
    """n rows of `vector` numbers, as lists."""
    return [[rows[i * vector + e] for e in range(vector)] for i in range(n)]


def put(rows, i, values):
    """Row i of a register tensor."""
    for e, value in enumerate(values):
        rows[i * len(values) + e] = value


def rows_of(spec, B, S, C):
    """(B, S, C) for the compiler, of any strides but the last."""
    v = spec.vector
    return fake.tensor(spec.dtype, (B, S, C), (fake.sym64(divisibility=v), fake.sym64(divisibility=v), 1),
                       align=v * tk.element_type(spec.dtype).width // 8)


def vectors_of(spec, C):
    """(weight, bias) for the compiler."""
    width, align = tk.element_type(spec.weight).width // 8, 16
    if spec.width * spec.vector * width % 16:
        align = width
    bias = spec.bias and fake.tensor(spec.bias, (C,), align=tk.element_type(spec.bias).width // 8)
    return fake.tensor(spec.weight, (C, spec.width), align=align), bias


def packed_of(spec, size, N):
    """(state, cu) for the compiler, the state of any strides. size: (B, S, C)."""
    state = cu = None
    if spec.state:
        strides = tuple(fake.sym64() for _ in range(3))
        align = tk.element_type(spec.state).width // 8
        state = fake.tensor(spec.state, (N, size[2], spec.width - 1), strides, align=align)
    if spec.packed:
        shape = size[:2] if spec.numbers else (fake.sym(),)
        cu = fake.tensor(spec.packed, shape, align=8 if spec.packed == "int64" else 4)
    return state, cu


def normed_of(spec):
    """The number of normed channels for the compiler."""
    return Int32(0) if spec.head else None
