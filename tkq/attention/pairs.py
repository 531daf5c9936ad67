"""Flash attention forward with a limit on the left: pairs of blocks that share the key tiles that both see."""
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention import forward
from tkq.attention.launch import Numbers, Operands, Sequences
from tkq.attention.plan import AttentionConfig
from tkq.attention.producer import Producer
from tkq.attention.ranges import key_range
from tkq.attention.spec import AttentionSpec
from tkq.attention.state import Fields, extent, field_names
from tkq.attention.window_consumer import HALF, WindowConsumer, WindowState
from tkq.attention.window_ranges import ROWS, cut_of


@dataclass(frozen=True)
class PairConfig(AttentionConfig):
    """cluster: 2, or 1 for blocks by themselves. halves: a consumer goes through the key tiles that its own 64 rows
    see, and leaves out the half of its first or last one that none of them sees."""

    bridge: bool = False
    registers: tuple = (40, 232)
    halves: bool = False

    def check(self, head_dim: int, head_dim_v: int) -> "PairConfig":
        """As ``AttentionConfig.check``."""
        if (self.kv, self.consumers) != (128, 2) or self.bridge or self.cluster > 2 or self.schedule == "single":
            raise ValueError(f"{self}: allowed are kv 128, 2 consumers, no bridge, cluster 1 or 2, persistent blocks")
        return super().check(head_dim, head_dim_v)


@dataclass(frozen=True)
class PairGlobals(forward.Globals):
    k_own: Any = None  # k and v, for one block alone
    v_own: Any = None


class Way(NamedTuple):
    """A block's way through key tiles: top, top - 1 .. of ``slots`` of them. there: the one that is this block's alone
    is a tile that it sees (1) or no tile at all (0)."""

    top: Any
    slots: Any
    there: Any


class PairForward(forward.AttentionForward):
    """``AttentionForward`` of rows that see a number of keys before their own: two blocks have 128 rows each, one below
    the other, and the tiles that both see come once out of L2, for both. Each has one tile more that only it sees: the
    second block its last one, the first its first. So that both have the same stages at hand, the second block's comes
    while the first is at that of the task before:

      slots          0          1          2      ..  s        0'         1'
      second block   last tile  shared     shared ..  shared   last tile' shared' ..
      first block    (nothing)  shared     shared ..  shared   first tile shared' ..

    Where there is no such tile, the slot is empty, and the consumers let it pass (``before``, ``after``). Pipes and
    roles are those of ``AttentionForward``; the task after this one is told three tiles before its end."""

    def __init__(self, spec: AttentionSpec, config: PairConfig):
        if spec.varlen or spec.pack > 1 or not spec.far or not (spec.causal or spec.right):
            raise ValueError(f"PairForward: {spec}, needed are limits far left and right, one length, no packing")
        super().__init__(spec, config.check(spec.head_dim, spec.head_dim_v))
        self.producer, self.consumer = PairProducer(spec, config), PairConsumer(spec, config)

    @cute.jit
    def __call__(self, operands: Operands, sequences: Optional[Sequences], counter: cute.Tensor, numbers: Numbers,
                 stream: cuda.CUstream):
        spec, c = self.spec, self.config
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in operands[:4]]
        tasks, number = self.tasks(q, k, sequences, numbers)
        capped = const_expr(spec.softcap)
        own = [tk.gl.load(x, t) for x, t in ((k, self.tiles.k), (v, self.tiles.v))]
        both = own
        if const_expr(c.cluster > 1):
            both = [tk.gl.load(x, t, c.cluster) for x, t in ((k, self.tiles.k), (v, self.tiles.v))]
        g = PairGlobals(
            q=tk.gl.load(q, self.tiles.q), k=both[0], v=both[1], k_own=own[0], v_own=own[1], o=self.output(o),
            lse=operands.lse, sinks=operands.sinks, tasks=tasks,
            schedule=tk.Schedule(number, c.schedule, c.cluster, counter), left=numbers.left,
            right=numbers.right if const_expr(spec.right) else None,
            scale=(numbers.softcap if capped else numbers.scale) * tk.LOG2E,
            cap=numbers.scale / numbers.softcap if capped else None)
        blocks = tk.blocks_for(c.schedule, number, numbers.processors, c.cluster)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[tk.WARPGROUP * (c.consumers + 1), 1, 1],
                              cluster=[c.cluster, 1, 1] if const_expr(c.cluster > 1) else None, stream=stream,
                              min_blocks_per_mp=1)

    def shared(self, al: tk.SharedAllocator):
        s = super().shared(al)
        return replace(s, task=al.vector(len(pair_fields(self.spec)), self.config.consumers * self.config.q_stages,
                                         Int32))


def pair_fields(spec) -> tuple:
    return (*field_names(spec), "before", "after", "cut")


def rank_of(config):
    return tk.cluster_rank() if config.cluster > 1 else Int32(0)


class PairProducer(Producer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = pair_fields(spec)

    @cute.jit
    def run(self, g, s):
        c = self.config
        tk.prefetch(g.q, g.k, g.v, *[g.o] * (not c.o_direct))
        if const_expr(c.cluster > 1):
            tk.prefetch(g.k_own, g.v_own)
        rank = rank_of(c)
        start = Int32(0)
        if const_expr(c.cluster > 1):  # the first block begins with an empty slot
            start = 1 - rank
            if rank == 0:
                tk.arrive(s.k_pipe.full[0])
                tk.arrive(s.v_pipe.full[0])
        k_ring, v_ring, q_ring = tk.ring(c.stages, start), tk.ring(c.stages, start), tk.ring(c.q_stages)
        told = tk.ring(1)
        schedule = g.schedule
        number = schedule.first()
        while number < schedule.tasks:
            t = g.tasks.find(number)
            way = self.way(g, t, rank)
            of = t.batch_k, t.head // g.tasks.heads_per_kv
            self.load_slot(s.k, (g.k, g.k_own), s.k_pipe, k_ring, of, way, Int32(0), rank)
            self.load_rows(g, s, q_ring, t, way, rank)
            following, fetched = number, Int32(0)
            ask = way.slots - 3  # of a pair: early, as it takes a while to tell the other block
            for p in cutlass.range(1, way.slots, unroll=1):
                self.load_slot(s.k, (g.k, g.k_own), s.k_pipe, k_ring, of, way, p, rank)
                self.load_slot(s.v, (g.v, g.v_own), s.v_pipe, v_ring, of, way, p - 1, rank)
                if const_expr(c.cluster > 1):
                    if p == ask:
                        fetched = schedule.fetch()
                    if p == ask + 1:
                        if ask > 0:
                            following = schedule.following(number, fetched, lambda found: self.tell(s, found, told))
            if const_expr(c.cluster > 1):
                if ask <= 0:
                    fetched = schedule.fetch()
                    following = schedule.following(number, fetched, lambda found: self.tell(s, found, told))
                self.load_slot(s.v, (g.v, g.v_own), s.v_pipe, v_ring, of, way, way.slots - 1, rank)
                number = following
            else:
                fetched = schedule.fetch()
                self.load_slot(s.v, (g.v, g.v_own), s.v_pipe, v_ring, of, way, way.slots - 1, rank)
                number = schedule.following(number, fetched)
        self.close(s, q_ring)

    def extent(self, g, rows):
        return replace(extent(self.spec, self.config, g, g.tasks.rows_q, g.tasks.rows_k), tile_rows=rows)

    def way(self, g, t, rank) -> Way:
        e = self.extent(g, self.config.rows)
        if self.config.cluster == 1:
            r = key_range(e, t.tile * e.tile_rows)
            return Way(r.first + r.blocks - 1, r.blocks, Int32(1))
        upper, lower = [key_range(e, (2 * t.tile + i) * e.tile_rows) for i in range(2)]
        end = upper.first + upper.blocks
        above = lower.first + lower.blocks - end  # 1 where the second block sees a tile behind the shared ones
        below = lower.first - upper.first
        return Way(end - 1 + rank, end - lower.first + 1, below + rank * (above - below))

    @cute.jit
    def load_slot(self, dst, src, pipe, ring, of, way, p, rank):
        """Slot p of the way: for both blocks, half of it by each; or this block's own; or nothing."""
        both, own = src
        sem, at = pipe.full[ring.stage], (*of, way.top - p, 0)
        pipe.acquire_empty(ring)
        if const_expr(self.config.cluster == 1):
            tk.expect_bytes(sem, pipe.bytes)
            tk.load_async(dst[ring.stage], own, at, sem)
        else:
            alone = (1 - rank) * (way.slots - 1)
            if p != alone:
                tk.expect_bytes(sem, pipe.bytes)
                tk.load_async(dst[ring.stage], both, at, sem)
            elif way.there > 0:
                tk.expect_bytes(sem, pipe.bytes)
                tk.load_async(dst[ring.stage], own, at, sem)
            else:
                tk.arrive(sem)
        ring.advance()

    @cute.jit
    def load_rows(self, g, s, ring, t, way, rank):
        """Each consumer's task and Q tile."""
        c = self.config
        tile = t.tile * c.cluster + rank
        for w in cutlass.range_constexpr(c.consumers):
            e, row = self.extent(g, ROWS if const_expr(c.halves) else c.rows), tile * c.rows
            row = row + w * ROWS if const_expr(c.halves) else row
            r = key_range(e, row)
            known = {**t._asdict(), "tile": tile, **vars(r), "before": way.top - (r.first + r.blocks - 1),
                     "after": r.first - (way.top - way.slots + 1), "cut": cut_of(e, r, row) if c.halves else 0}
            i = self.acquire_q(s, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    s.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive_and_expect_tx(s.q_full[i].ptr, self.tiles.q.bytes)
            tk.load_async(s.q[i], g.q, (t.batch, t.head, tile * c.consumers + w, 0), s.q_full[i])
        ring.advance()


class PairConsumer(WindowConsumer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = pair_fields(spec)

    @cute.jit
    def run(self, g, s, wg):
        config, kv = self.config, self.config.kv
        c = WindowState(
            att=tk.rt_fl(kv), att_mma=tk.rt(kv, self.tiles.q.dtype), o=tk.rt_fl(self.spec.head_dim_v), max=tk.rv(),
            norm=tk.rv(), correct=tk.rv(), max_scaled=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
            task=Fields.new(self.fields), last=Fields.new(self.fields), k=s.k_pipe.ring(), v=s.v_pipe.ring(),
            q=tk.ring(config.q_stages), turns=tk.Turns(config.consumers, wg, enabled=config.turns), wg=wg,
            half=tk.rt_fl(HALF))
        c.turns.start()
        if const_expr(config.cluster > 1):
            if tk.cluster_rank() == 0:  # its empty slot
                s.k_pipe.wait(c.k)
                self.release(s.k_pipe, c.k)
                s.v_pipe.wait(c.v)
                self.release(s.v_pipe, c.v)
        blocks = self.next_task(s, c)
        while blocks > 0:
            self.let_pass(s, c, c.task["before"])
            self.begin(g, s, c)
            tk.zero(c.o)
            self.steps(g, s, c)
            tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            self.end(s, c)
            self.finish(g, s, c)
            self.let_pass(s, c, c.last["after"])
            blocks = self.next_task(s, c)
        tk.store_wait()

    @cute.jit
    def let_pass(self, s, c, tiles):
        for _ in cutlass.range(tiles, unroll=1):
            c.turns.take()  # as many turns for either consumer
            c.turns.give()
            s.k_pipe.wait(c.k)
            self.release(s.k_pipe, c.k)
            s.v_pipe.wait(c.v)
            self.release(s.v_pipe, c.v)

    def pair(self, s, c, seen, before):
        s.k_pipe.wait(c.k)
        c.turns.take()
        self.scores(s, c, seen)
        self.correct(c, late=True)
        s.v_pipe.wait(c.v)
        self.sum(s, c, before)
        c.turns.give()
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)


def build(spec: AttentionSpec, config: PairConfig):
    """As ``forward.build``."""
    return PairForward(spec, config), forward.build(spec, config)[1]
