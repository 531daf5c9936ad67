"""What the tile layer refuses while it traces. Each case: (body(x), the error, a pattern of its message).

x is fp32 (64, 64) in global memory. HOST bodies run in the host function, the others in the kernel: REGISTERS and
BLOCKS, of errors_registers.py and errors_blocks.py, and MOVES.
"""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN as E4M3
from cutlass import Float32

import tkq.tile as tk

from .common import OneBlock, tensor
from .errors_blocks import BLOCKS, one, sem
from .errors_hangs import HANGS, Launched
from .errors_registers import REGISTERS


def _view(x, *modes):
    return cute.make_tensor(x.iterator, cute.select(x.layout, list(modes)))


def _strided(x, stride, cols=8):
    return cute.make_tensor(x.iterator, cute.make_layout((8, cols), stride=(stride, 1)))


def _heads(x):
    return cute.make_tensor(x.iterator, cute.make_layout((8, 32, 6), stride=(256, 1, 32)))


def _pages(x):
    return cute.make_tensor(x.iterator, cute.make_layout((8, 32, 2, 4), stride=(64, 1, 32, 512)))


HOST = {
    "gl_dtype": (
        lambda x: tk.gl.load(x, tk.st(64, 64)),
        TypeError, "gl.load: x is fp32, the tile is 64 x 64 bf16"),
    "gl_rank": (
        lambda x: tk.gl.load(x[0, None], tk.st(64, 32, Float32)),
        ValueError, "gl.load: x has 1 dimensions"),
    "gl_rows": (
        lambda x: tk.gl.store(x, tk.st(264, 32, Float32)),
        ValueError, "gl.store: the tile is 264 x 32 fp32, allowed are up to 256 rows"),
    "gl_add_fp8": (
        lambda x: tk.gl.add(x, tk.st(64, 32, E4M3)),
        TypeError, "gl.add: the tile is 64 x 32 e4m3"),
    "gl_add_int": (
        lambda x: tk.gl.add(x, tk.st(64, 32, cutlass.Int32)),
        TypeError, "gl.add: the tile is 64 x 32 int32"),
    "gl_store_ends_inside_16_bytes": (
        lambda x: tk.gl.store(_strided(x, 64, 6), tk.st(64, 32, Float32)),
        ValueError, "gl.store: x has 6 columns, allowed for fp32 are multiples of 4"),
    "gl_add_ends_inside_16_bytes": (
        lambda x: tk.gl.add(_strided(x, 64, 63), tk.st(64, 32, Float32)),
        ValueError, "gl.add: x has 63 columns, allowed for fp32 are multiples of 4"),
    "gl_multicast": (
        lambda x: tk.gl.load(x, tk.st(64, 32, Float32), 3),
        ValueError, "gl.load: multicast is 3"),
    "gl_multicast_rows": (
        lambda x: tk.gl.load(x, tk.st(24, 32, Float32), 2),
        ValueError, "gl.load: multicast is 2 for a tile of 24 x 32"),
    "gl_packed": (
        lambda x: tk.gl.load(tk.packed(_heads(x), 3), tk.st(64, 32, Float32)),
        ValueError, "gl.load: x's rows are 3 by .* between each other, the tile is 64 x 32"),
    "packed_rank": (
        lambda x: tk.packed(x, 2),
        ValueError, "packed: x has 2 dimensions, allowed are 3 and 4"),
    "packed_depth": (
        lambda x: tk.packed(_heads(x), 4),
        ValueError, "packed: n is 4, x's depth is 6, allowed are divisors of it"),
    "packed_none": (
        lambda x: tk.packed(_heads(x), 0),
        ValueError, "packed: n is 0, x's depth is 6"),
    "ragged_rank": (
        lambda x: tk.ragged(x),
        ValueError, "ragged: x has 2 dimensions, allowed are 3"),
    "ragged_store_rank": (
        lambda x: tk.ragged_store(x),
        ValueError, "ragged_store: x has 2 dimensions, allowed are 3"),
    "row_groups_rank": (
        lambda x: tk.row_groups(_heads(x), 32),
        ValueError, "row_groups: x has 3 dimensions, allowed are 4"),
    "row_groups_columns": (
        lambda x: tk.row_groups(_pages(x), 24),
        ValueError, "row_groups: x has 32 columns, allowed are multiples of 24"),
    "gl_row_groups_of_a_plain_tensor": (
        lambda x: tk.gl.load(x, tk.st(64, 64, Float32, row_groups=True)),
        ValueError, "gl.load: the tile is 64 x 64 fp32 in groups of 8 rows, x's columns are 64"),
    "gl_plain_tile_of_row_groups": (
        lambda x: tk.gl.load(tk.row_groups(_pages(x), 32), tk.st(8, 32, Float32)),
        ValueError, "gl.load: the tile is 8 x 32 fp32, x's columns are"),
    "part_of_two": (
        lambda x: tk.gl.load(x, tk.st(64, 32, Float32)).part(3),
        ValueError, "part: the descriptor is a gl.load of a tensor that is not ragged"),
    "part_of_a_load": (
        lambda x: tk.gl.load(tk.ragged_store(_heads(x)), tk.st(8, 32, Float32)).part(3),
        ValueError, "part: the descriptor is a gl.load of a tensor that is not ragged"),
    "gl_columns": (
        lambda x: tk.gl.load(_view(x, 1, 0), tk.st(64, 32, Float32)),
        ValueError, r"gl.load: x's stride 1 \(columns\) is 64"),
    "gl_stride": (
        lambda x: tk.gl.store(_strided(x, 10), tk.st(64, 32, Float32)),
        ValueError, "gl.store: x's stride 0 is 10, allowed are multiples of 4"),
    "gl_aligned": (
        lambda x: tk.gl.add(cute.make_tensor(x.iterator + 1, x.layout), tk.st(64, 32, Float32)),
        ValueError, "gl.add: x is aligned to 4 bytes"),
}


class Host:
    """body(x) in the host function, and an empty kernel."""

    def __init__(self, body):
        self.body = body

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        self.body(x)
        self.kernel().launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self):
        pass


class Move:
    """body(load, tile, semaphore, store) in a kernel: what load_async and store_async refuse."""

    def __init__(self, body):
        self.body = body

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        type = tk.st(64, 32, Float32)
        self.kernel(tk.gl.load(x, type), tk.gl.store(x, type)).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, load: tk.gl, store: tk.gl):
        self.body(load, tk.SharedAllocator().tile(tk.st(64, 32, Float32)), sem(), store)


MOVES = {
    "load_ring": (
        lambda g, t, s, d: tk.load_async(t, g, (0, 0), s),
        TypeError, "load_async: the shared operand must be one tile"),
    "load_coord": (
        lambda g, t, s, d: tk.load_async(t[0], g, (0, 0, 0), s),
        ValueError, "load_async: coord has 3 numbers, the global tensor has 2"),
    "store_coord": (
        lambda g, t, s, d: tk.store_async(d, t[0], (0,)),
        ValueError, "store_async: coord has 1 numbers"),
    "load_type": (
        lambda g, t, s, d: tk.load_async(one(32, 32, Float32), g, (0, 0), s),
        TypeError, "load_async: the shared tile is 32 x 32 fp32, the descriptor moves 64 x 32 fp32"),
    "load_a_store": (
        lambda g, t, s, d: tk.load_async(t[0], d, (0, 0), s),
        TypeError, "load_async: the descriptor is a gl.store, allowed is gl.load"),
    "store_a_load": (
        lambda g, t, s, d: tk.store_async(g, t[0], (0, 0)),
        TypeError, "store_async: the descriptor is a gl.load, allowed is gl.store and gl.add"),
    "load_sem": (
        lambda g, t, s, d: tk.load_async(t[0], g, (0, 0), None),
        TypeError, "load_async: sem is None, allowed is a Semaphore"),
    "store_src": (
        lambda g, t, s, d: tk.store_async(t[0], t[0], (0, 0)),
        TypeError, "store_async: the global operand is .*allowed is a descriptor"),
}
GROUPS = {"kernel": ({**REGISTERS, **BLOCKS}, OneBlock), "host": (HOST, Host), "move": (MOVES, Move),
          "hang": (HANGS, Launched)}


def build(group, case):
    bodies, kernel = GROUPS[group]
    x = tensor("fp32", 64, 64)
    return kernel(bodies[case][0]), (x, None) if kernel is OneBlock else (x,)
