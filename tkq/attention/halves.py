"""Flash attention forward with a window on both sides: each warpgroup goes through the keys that its own rows see."""
from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention import forward
from tkq.attention.halves_config import HalvesConfig
from tkq.attention.halves_consumer import HalvesConsumer
from tkq.attention.halves_producer import HalvesProducer, fields_of
from tkq.attention.spec import AttentionSpec
from tkq.attention.state import Shared


@dataclass(frozen=True)
class HalvesShared(Shared):
    posted: cute.Tensor
    known: tk.Semaphore
    asked: tk.Semaphore


class HalvesForward(forward.AttentionForward):
    """``AttentionForward`` of rows that see a number of keys on either side of their own.

    A block's 128 rows see a key tile of 128 more than each of its two warpgroups' 64 rows need: of a window of 1024
    keys nine tiles, where 64 rows see eight and a half. So a warpgroup computes no scores of the half tile that none
    of its rows sees, and of whole tiles where there are such. What limits these short tasks is how long a warpgroup
    takes for its tiles one after the other, not the tensor cores or what comes out of L2.

      key tiles of the task    t   t-1  t-2 ..  t-7  t-8     (window 1023 before, causal: t is the rows' own)
      warpgroup 0, rows 0-63   ==  ==== ====    ==== ====    of tile t the lower half
      warpgroup 1, rows 64-127 ==== ==== ====   ==== ==      of tile t-8 the upper half

    Roles and pipes are those of ``AttentionForward``: both warpgroups wait for and release each tile, seen or not."""

    def __init__(self, spec: AttentionSpec, config: HalvesConfig):
        if spec.varlen or spec.pack > 1 or not spec.far or not (spec.causal or spec.right):
            raise ValueError(f"HalvesForward: {spec}, needed are limits far left and right, one length, no packing")
        super().__init__(spec, config.check(spec.head_dim, spec.head_dim_v))
        self.producer, self.consumer = HalvesProducer(spec, config), HalvesConsumer(spec, config)

    def shared(self, al: tk.SharedAllocator) -> Shared:
        n = self.config.consumers * self.config.q_stages
        base = replace(super().shared(al), task=al.vector(len(fields_of(self.spec)), n, Int32))
        values = {f.name: getattr(base, f.name) for f in fields(base)}
        posted = al.vector(4, 1, Int32)
        sems = al.semaphores(2)
        return HalvesShared(**values, posted=posted, known=sems[0], asked=sems[1])

    @cute.kernel
    def kernel(self, g):
        c, s = self.config, self.shared(tk.SharedAllocator())
        n = c.consumers * c.q_stages

        def initialise():
            s.k_pipe.init()
            s.v_pipe.init()
            tk.init(s.known, 1)
            tk.init(s.asked, 1)
            for i in cutlass.range_constexpr(n):
                tk.init(s.q_full[i], 1)
                tk.init(s.q_empty[i], 4)

        tk.init_block(initialise, c.cluster)
        tk.specialise(lambda: self.producer.run(g, s), lambda wg: self.consumer.run(g, s, wg), c.consumers, c.registers,
                      2 if c.scout else 1)


def build(spec: AttentionSpec, config: HalvesConfig):
    """As ``forward.build``."""
    return HalvesForward(spec, config), forward.build(spec, config)[1]
