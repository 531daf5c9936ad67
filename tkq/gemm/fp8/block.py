"""A block of the float8 and the grouped GEMM: its shared memory, its pipeline, its roles."""
import cutlass.cute as cute
from cutlass import const_expr

from ... import tile as tk
from ..producer import Producer
from ..wave_sync import WaveSync
from .config import Fp8Config
from .consumer import consumer
from .state import Shared, Tiles


class Block:
    """One producer warp and ``consumers`` warpgroups, whose parts a config chooses.

      operands   ``Matrices`` or ``Groups``: which tiles the block takes, how a stage is loaded, where C goes
      producer   ``Producer``, or ``WaveSync`` with config.wave_sync
      consumer   ``Consumer`` | ``OverlappedConsumer`` | ``OverlappedPromotionConsumer``: when a tile is stored
        mainloop   ``Mainloop`` | ``Promotion`` | ``PipelinedPromotion``: how it is summed up
        epilogue   ``Epilogue``: what becomes of the sums, and their way out

    Pipeline, ``stages`` deep:
      full[i]    1 arrival, the producer's, and the bytes of both tiles; with scales of a step 32 more, each when a
                 lane's 4-byte copies have landed: scales of any order of memory and any M
      empty[i]   one arrival a consumer warp: 4 x consumers, from each block of the cluster
    """

    def __init__(self, spec, config: Fp8Config, tiles: Tiles, operands):
        self.spec, self.config, self.tiles, self.operands = spec, config, tiles, operands
        self.producer = WaveSync(operands, config.wave_sync) if config.wave_sync else Producer(operands)
        self.consumer = consumer(spec, config, tiles, operands)

    @property
    def parts(self) -> str:
        """Their names, for the kernel's in profiles and reports: which it is."""
        c = self.consumer
        return " ".join(type(x).__name__ for x in (self.operands, self.producer, c, c.mainloop))

    @property
    def registers(self) -> tuple:
        """Of producer and consumer, where addresses of scales take some of the producer's; empty: as usual."""
        if not self.spec.per_step or self.config.consumers < 2:
            return ()
        return (56, 224) if self.config.wave_sync else (40, 232)

    def launch(self, kernel, blocks, stream):
        """kernel: of arguments, to be launched."""
        x = self.config
        kernel.launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1], cluster=[x.cluster, 1, 1],
                      stream=stream, min_blocks_per_mp=1, use_pdl=x.pdl)

    @cute.jit
    def run(self, g):
        """All roles."""
        x = self.config
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        s = self.shared(g, tk.SharedAllocator())
        tk.init_block(s.pipe.init, x.cluster)
        if const_expr(x.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tk.specialise(lambda: self.producer.produce(g, s), lambda wg: self.consumer.consume(g, s, wg), x.consumers,
                      self.registers)
        if const_expr(x.cluster > 1):
            tk.cluster_sync()  # no block exits while another may still write to its shared memory

    def shared(self, g, al):
        x, spec, tiles = self.config, self.spec, self.tiles
        s = Shared(
            a=al.tile(tiles.a_part, tiles.a.bytes // tiles.a_part.bytes * x.stages),
            b=al.tile(tiles.b_part, tiles.b.bytes // tiles.b_part.bytes * x.stages),
            c=al.tile(tiles.c, tiles.stores * x.store_buffers * x.consumers) if spec.store == "tma" else None,
            scales=al.vector(x.scales(spec), x.stages) if spec.per_step else None,
            pipe=al.pipe(x.stages, tiles.a.bytes + tiles.b.bytes, 4 * x.consumers, x.cluster,
                         copies=32 if spec.per_step else 0))
        return self.operands.prepare(g, s, al)
