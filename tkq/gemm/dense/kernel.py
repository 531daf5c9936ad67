"""out = f(A @ B) in bf16 or fp16, accumulated in fp32: persistent, its roles apart, TMA in and out."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from ..producer import Producer
from ..wave_sync import WaveSync
from . import operands
from .config import BUFFERS, STEP, Config, has_store_buffers
from .consumer import Consumer
from .epilogue import Epilogue
from .matrices import Matrices
from .spec import GemmSpec
from .state import Globals, Shared, Tiles


class DenseGemm:
    """One warp loads, ``consumers`` warpgroups multiply. Block b of a grid of n takes tiles b, b + n, ..

    Roles:
      warpgroup 0, warp 0   for each tile, for each step of K: acquire a stage, load A's and B's tile into it
      warpgroups 1 ..       64 rows each. For each tile:
                                for each step of K: wait for its stage, wgmma, release the stage before
                                finish the accumulator (epilogue) and round it to 16 bits, in registers
                                issue the next tile's first wgmma; under it, store the rounded tile, subtile by subtile

      time      ->
      producer    |k0 k1 .. kn|k0 k1 ..         as stages come free: it does not know where a tile ends
      consumer 1  |k0 .. kn|finish|k0 + store|k1 .. kn|finish|k0 + store|
      consumer 2    the same, on the same stages of B
      overlapped  |k0 .. kn|finish|k0 + store 0|k1 + store 1|k2 + store 2|k3 + store 3|k4 .. kn|finish|
      deferred    as overlapped, and the activation is not in finish but in its store's step, or in pieces under 2 or 4

    Pipeline, ``stages`` deep:
      full[i]    1 arrival, the producer's, and the bytes of both tiles
      empty[i]   one arrival a consumer warp: 4 x consumers, from each block of the cluster

    Parts:
      matrices   ``Matrices``: which tiles a block takes, and what a stage is loaded with
      producer   ``Producer`` or, with config.wave_sync, ``WaveSync``
      consumer   ``Consumer``: the products, and when a tile is stored
      its epilogue   ``Epilogue``: what becomes of a tile, and its way out

    Gated, the left half of B's tile is columns of the gate and the right half the same columns of up: a thread has both
    in its accumulator, and half a tile is stored.
    """

    def __init__(self, spec: GemmSpec, config: Config):
        self.spec, self.config, self.tiles = spec, config.check(spec), Tiles.of(spec, config)
        matrices = Matrices(spec, config, self.tiles)
        self.producer = WaveSync(matrices, config.wave_sync) if config.wave_sync else Producer(matrices)
        self.consumer = Consumer(spec, config, self.tiles, matrices, Epilogue(spec, config, self.tiles))

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias, c, alpha: Float32, beta: Float32,
                 blocks: Int32, stream: cuda.CUstream):
        """bias: with wave sync, which takes none, the counter: one int32."""
        x, spec, tiles = self.config, self.spec, self.tiles
        out = operands.matrix(out)
        A = operands.matrix(a, spec.transposed[0])
        rows, cols = cute.ceil_div(out.shape[0], x.m * x.cluster), cute.ceil_div(out.shape[1], x.n // tiles.parts)
        batches = Int32(1) if const_expr(not spec.batch) else out.shape[2]
        K = A.shape[0] if const_expr(spec.transposed[0]) else A.shape[1]
        g = Globals(
            a=tk.gl.load(A, tiles.a), b=tk.gl.load(operands.weights(b, spec), tiles.b_part, x.cluster),
            out=self.destination(out),
            inputs=ep.Inputs(operands.column_vector(bias, spec), operands.residual(c, spec), alpha, beta),
            rows=rows, cols=cols, batches=batches, steps=cute.ceil_div(K, STEP))
        grid = tk.blocks_for("static", rows * cols * batches, cutlass.max(blocks, x.cluster), x.cluster)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1],
                              cluster=[x.cluster, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=x.pdl)

    def destination(self, out):
        if self.spec.store != "tma":
            return out
        return tk.gl.add(out, self.tiles.out) if self.spec.accumulate else tk.gl.store(out, self.tiles.out)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: a, b, out, bias, c, alpha, beta, and how many blocks to launch."""
        from ...runtime.compile import fake

        a, b, out, bias, *more = operands.fakes(self.spec)
        if self.config.wave_sync:
            bias = fake.tensor("int32", (1,), (1,), align=4)
        return a, b, out, bias, *more, Int32(1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        x = self.config
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        s = self.shared(tk.SharedAllocator())
        tk.init_block(s.pipe.init, x.cluster)
        if const_expr(x.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tk.specialise(lambda: self.producer.produce(g, s), lambda wg: self.consumer.consume(g, s, wg), x.consumers)
        if const_expr(x.cluster > 1):
            tk.cluster_sync()  # no block exits while another may still write to its shared memory

    def shared(self, al) -> Shared:
        x, tiles = self.config, self.tiles
        a, b = al.tile(tiles.a, x.stages), al.tile(tiles.b, x.stages)
        return Shared(
            a=a, b=b, b_parts=operands.parts_of_tile(b, tiles.b_part, tiles.parts),
            out=al.tile(tiles.out, BUFFERS * x.consumers) if has_store_buffers(self.spec) else None,
            pipe=al.pipe(x.stages, tiles.a.bytes + tiles.b.bytes, 4 * x.consumers, x.cluster))
