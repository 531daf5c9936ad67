"""After attention's backward: dQ from the fp32 accumulator."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

import tkq.tile as tk
from tkq.attention.backward_plan import BackwardConfig
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.ranges import ceil_div


class BackwardPost:
    """dq = scale * acc, rounded. One warpgroup a part of 64 rows x ``dq_cols``."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.config, self.parts = config, config.dq_parts(spec.width)
        self.out = tk.st(64, config.dq_cols, tk.element_type(spec.dtype))

    @cute.jit
    def __call__(self, acc: cute.Tensor, dq: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """acc: (tiles of all heads, floats of a tile), dq (B, Sq, H, D)."""
        tiles, heads, batches = ceil_div(dq.shape[1], self.config.tile), dq.shape[2], dq.shape[0]
        dq = cute.make_tensor(dq.iterator, cute.select(dq.layout, [1, 3, 2, 0]))
        self.kernel(acc, tk.gl.store(dq, self.out), tiles, heads, scale).launch(
            grid=[tiles * heads * batches, 1, 1], block=[tk.WARPGROUP * self.parts[0] * self.parts[1], 1, 1],
            stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, acc: cute.Tensor, dq: tk.gl, tiles: Int32, heads: Int32, scale: Float32):
        rows, cols = self.parts
        n, part = Int32(cute.arch.block_idx()[0]), tk.warpgroup_id()
        out = tk.SharedAllocator().tile(self.out, rows * cols)[part]
        x = tk.rt_fl(self.config.dq_cols)
        cute.arch.griddepcontrol_wait()
        load_part(x, acc[Int64(n), None], part)
        tk.mul(x, x, scale)
        tk.store(out, x)
        tk.publish()
        tk.sync(1 + part, tk.WARPGROUP)
        if tk.first_warp_of_group():
            all_heads, m = n // tiles, n % tiles
            tk.store_async(dq, out, (all_heads // heads, all_heads % heads, m * rows + part // cols, part % cols))
            tk.store_wait()


def load_part(x, tile, part):
    """x, 64 rows of dQ, from part ``part`` of an accumulator's tile: in each part, 16 bytes of every thread side by
    side, then the next 16. From L2, where it was added up."""
    quads = x.cols // 8
    mine = cute.make_tensor(x.tensor.iterator, cute.make_layout((4, quads)))
    start = (tile.iterator + part * (x.cols * 64)).align(16)
    theirs = cute.make_tensor(start, cute.make_layout((4, tk.WARPGROUP, quads)))
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=128,
                               load_cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
    for j in range(quads):
        cute.copy(atom, theirs[None, tk.thread_in_warpgroup(), j], mine[None, j])
