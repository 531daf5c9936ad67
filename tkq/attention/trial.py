"""Trials, results wrong on purpose: kernels of windows with parts left out, or with a trace of their waits. Not shipped.

off: "mask" none is applied; "k", "v", "q": not loaded, the tile counts as there at once; "same": all K and V tiles are
the first one of the first head; "store": O is not
stored; "finish": nor made; "softmax": S goes into P as it is. trace: events of each warpgroup into lse, see RECORDS."""
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.attention import forward, window
from tkq.attention.consumer import Consumer
from tkq.attention.plan import AttentionConfig
from tkq.attention.producer import Producer
from tkq.attention.softmax import Softmax
from tkq.attention.window_config import WindowConfig
from tkq.attention.window_consumer import WindowConsumer
from tkq.attention.window_producer import WindowProducer

RECORDS = 976  # words of a warpgroup: smid, nanoseconds at begin and end, clock at begin and end, events; then events
HEAD = 8


@dataclass(frozen=True)
class TrialConfig(AttentionConfig):
    off: tuple = ()
    trace: bool = False


@dataclass(frozen=True)
class TrialStrips(WindowConfig):
    off: tuple = ()
    trace: bool = False


@cute.jit
def put(lse: cute.Tensor, at, value):
    if tk.thread_in_warpgroup() == 0:
        lse[at] = Int32(value).bitcast(Float32)


@cute.jit
def record(lse: cute.Tensor, base, count: cute.Tensor, code: cutlass.Constexpr[int]):
    if tk.thread_in_warpgroup() == 0:
        n = count[0]
        if n < RECORDS:
            lse[base + n] = (((Int32(cute.arch.clock()) & Int32(0x7FFFFFF)) << 4) | Int32(code)).bitcast(Float32)
        count[0] = n + 1


class TracePipe(tk.Pipe):
    def wait(self, r):
        self.note(self.codes[0])
        super().wait(r)
        self.note(self.codes[1])


def traced(pipe, note, codes):
    new = TracePipe(pipe.full, pipe.empty, pipe.stages, pipe.bytes, pipe.consumers, pipe.cluster, pipe.producers)
    object.__setattr__(new, "note", note)
    object.__setattr__(new, "codes", codes)
    return new


class Traced:
    def run(self, g, s, wg):
        if not self.config.trace:
            return super().run(g, s, wg)
        flat = cute.make_tensor(g.lse.iterator, cute.make_layout(264 * RECORDS))
        base = (cute.arch.block_idx()[0] * 2 + wg) * RECORDS
        self.count = cute.make_rmem_tensor((1,), Int32)
        self.count[0] = Int32(HEAD)
        self.note = lambda code: record(flat, base, self.count, code)
        s = replace(s, k_pipe=traced(s.k_pipe, self.note, (6, 7)), v_pipe=traced(s.v_pipe, self.note, (8, 9)))
        put(flat, base, cute.arch.smid())
        put(flat, base + 1, cute.arch.globaltimer_lo())
        put(flat, base + 3, cute.arch.clock())
        super().run(g, s, wg)
        put(flat, base + 2, cute.arch.globaltimer_lo())
        put(flat, base + 4, cute.arch.clock())
        put(flat, base + 5, self.count[0])

    def next_task(self, s, c):
        if not self.config.trace:
            return super().next_task(s, c)
        self.note(1)
        blocks = super().next_task(s, c)
        self.note(2)
        return blocks

    def release(self, pipe, ring):
        super().release(pipe, ring)
        if self.config.trace:
            self.note(10 if pipe.codes[0] == 6 else 11)

    def finish(self, g, s, c):
        if "finish" in self.config.off:
            return
        if self.config.trace:
            self.note(12)
        super().finish(g, s, c)
        if self.config.trace:
            self.note(13)

    def store_lse(self, g, t, lse, row):
        if not self.config.trace:
            super().store_lse(g, t, lse, row)


class TrialSoftmax(Softmax):
    def step(self, g, c, i, sides):
        if "softmax" in self.config.off:
            return
        super().step(g, c, i, 0 if "mask" in self.config.off else sides)


class Loads:
    """Of either producer."""

    def load(self, dst, src, pipe, ring, of, block):
        off, name = self.config.off, "k" if pipe is self.pipes[0] else "v"
        if pipe is not self.pipes[0] and pipe is not self.pipes[1]:
            raise AssertionError("which pipe?")
        if name in off:
            sem = pipe.full[ring.stage]
            pipe.acquire_empty(ring)
            tk.arrive(sem)
            ring.advance()
            return
        if "same" in off:
            of, block = (Int32(0), Int32(0)), Int32(0)
        super().load(dst, src, pipe, ring, of, block)

    def run(self, g, s):
        self.pipes = s.k_pipe, s.v_pipe
        super().run(g, s)


class TrialProducer(Loads, Producer):
    def load_q(self, g, s, ring, t, seen):
        if "q" not in self.config.off:
            return super().load_q(g, s, ring, t, seen)
        known = {**t._asdict(), **vars(seen)}
        for w in range(self.config.consumers):
            i = self.acquire_q(s, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    s.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive(s.q_full[i].ptr)
        ring.advance()


class TrialStripsProducer(Loads, WindowProducer):
    pass


class TrialConsumer(Traced, Consumer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.softmax = TrialSoftmax(spec, config)

    def store_o_async(self, g, s, c, row_tile):
        if "store" not in self.config.off:
            super().store_o_async(g, s, c, row_tile)
            return
        tk.sync(8 + c.wg, tk.WARPGROUP)
        tk.store(s.o[c.wg], c.o)


class TrialStripsConsumer(Traced, WindowConsumer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.softmax = TrialSoftmax(spec, config)


class TrialForward(forward.AttentionForward):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.producer, self.consumer = TrialProducer(spec, config), TrialConsumer(spec, config)


class TrialWindow(window.WindowForward):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.producer, self.consumer = TrialStripsProducer(spec, config), TrialStripsConsumer(spec, config)


def build(spec, config):
    return TrialForward(spec, config), forward.build(spec, config)[1]


def build_strips(spec, config):
    return TrialWindow(spec, config), forward.build(spec, config)[1]
