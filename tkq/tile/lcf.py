"""Load, compute, finish: the template for kernels whose main loop is one product a stage, such as GEMM."""
from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from .block import init_block, specialise
from .memory import store_wait
from .mma import mma_wait
from .shared import SharedAllocator, SharedTile


@dataclass(frozen=True)
class Task:
    """An output tile, and how many stages of input it takes."""

    row: Int32
    col: Int32
    iters: Int32


@dataclass(frozen=True)
class StageTiles:
    """What a stage holds of one input: ``n`` tiles by number, a run-time number too."""

    ring: SharedTile
    first: Int32
    n: Constexpr[int]

    def __getitem__(self, i):
        if isinstance(i, int) and not 0 <= i < self.n:
            raise ValueError(f"tile {i} of an input with {self.n} tiles of {self.ring.type} a stage, allowed are 0 to "
                             f"{self.n - 1}: inputs = dict(name=(type, how many))")
        return self.ring[self.first + i]


class LCF:
    """ThunderKittens' load-compute-finish template. A subclass says what a stage of input holds and writes:

      schedule(g)                 the Schedule; ``g.schedule`` where not written. dynamic brings its own mailbox
      task(g, number)             what that number means: a ``Task``, or anything with ``.iters``
      load(g, t, i, x, sem)       producer warp: fill the stage x for iteration i
      start(g, t, wg)             consumer warpgroup: its registers, ready for the task
      compute(g, t, i, x, c, wg)  consumer warpgroup: issue the work on stage x
      finish(g, t, c, s, wg)      consumer warpgroup: write out

    and calls ``run(g)`` in its kernel, launched with blocks of 128 * (consumers + 1) threads and
    ``min_blocks_per_mp=1``. registers: as ``register_split`` takes them. Roles and pipes:

      warp 0 (producer)     acquire stage -> load .. -> next task -> mailbox (dynamic only)
      warpgroups 1..n       wait stage -> compute -> release stage i - lag -> .. -> finish
      full[stage]           1 arrival (the producer's, with the bytes); empty[stage]: 4 x consumers, one a warp

    compute commits one wgmma group; the last ``lag`` stay in flight, so stage i - lag is released after compute(i).
    x["name"][i] is tile i of an input in the stage. Programs with clusters or with more than tiles in a stage
    outgrow the template: write the roles.
    """

    consumers = 2
    stages = 4
    lag = 1
    registers: tuple = ()
    inputs: ClassVar[dict] = {}  # name: tile type, or (tile type, how many)
    scratch: ClassVar[dict] = {}  # likewise, for finish

    @cute.jit
    def run(self, g):
        """The whole kernel: shared memory, pipes, roles, and the tasks one after the other. Every thread calls it.

        Raises:
            ValueError: when traced: consumers or stages below 1, or a lag that is not below stages. A stage is free
                only when the ``lag`` products behind it have been issued: with fewer stages all would wait for ever.
        """
        self._check()
        al = SharedAllocator()
        spec = {k: v if isinstance(v, tuple) else (v, 1) for k, v in self.inputs.items()}
        tiles = {k: al.tile(t, n * self.stages) for k, (t, n) in spec.items()}
        scratch = {k: al.tile(*v) if isinstance(v, tuple) else al.tile(v) for k, v in self.scratch.items()}
        pipe = al.pipe(self.stages, sum(t.bytes * n for t, n in spec.values()), 4 * self.consumers)
        mail = self._mailbox(g, al)

        def stage(r):
            return {k: StageTiles(tiles[k], r.stage * n, n) for k, (t, n) in spec.items()}

        def initialise():
            pipe.init()
            if const_expr(mail is not None):
                mail.init()

        init_block(initialise)
        specialise(lambda: self._produce(g, pipe, mail, stage),
                   lambda wg: self._consume(g, pipe, mail, stage, scratch, wg), self.consumers, self.registers)

    def _check(self):
        for name in ("consumers", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"LCF: {name} is {getattr(self, name)}, allowed is 1 or more")
        if not 0 <= self.lag < self.stages:
            raise ValueError(f"LCF: lag is {self.lag} with {self.stages} stages, allowed are 0 to {self.stages - 1}")

    def schedule(self, g):
        """The ``Schedule``: which tasks a block has, in which order. ``g.schedule`` where a subclass does not say. Each
        role calls it, and ``run`` does to see whether it needs a mailbox: with the same g it says the same."""
        return g.schedule

    def _mailbox(self, g, al):
        return al.mailbox(1, 2, 4 * self.consumers) if self.schedule(g).kind == "dynamic" else None

    @cute.jit
    def _produce(self, g, pipe: Constexpr, mail: Constexpr, stage: Constexpr):
        order = self.schedule(g)
        r = pipe.ring()
        post = mail.ring() if const_expr(mail is not None) else None
        number = order.first()
        while number < order.tasks:
            t = self.task(g, number)
            for i in cutlass.range(t.iters, unroll=1):
                sem = pipe.acquire(r)
                self.load(g, t, i, stage(r), sem)
                r.advance()
            fetched = order.fetch()
            number = order.following(number, fetched)
            if const_expr(mail is not None):
                mail.post(post, number)

    @cute.jit
    def _consume(self, g, pipe: Constexpr, mail: Constexpr, stage: Constexpr, scratch: Constexpr, wg):
        order = self.schedule(g)
        r, done = pipe.ring(), pipe.ring()
        take = mail.ring() if const_expr(mail is not None) else None
        number = order.first()
        while number < order.tasks:
            t = self.task(g, number)
            c = self.start(g, t, wg)
            for i in cutlass.range(t.iters, unroll=1):
                pipe.wait(r)
                self.compute(g, t, i, stage(r), c, wg)
                r.advance()
                mma_wait(self.lag)
                if i >= self.lag:
                    pipe.release(done)
                    done.advance()
            mma_wait(0)
            for _ in cutlass.range_constexpr(self.lag):
                if done.count[0] != r.count[0]:
                    pipe.release(done)
                    done.advance()
            self.finish(g, t, c, scratch, wg)
            if const_expr(mail is not None):
                number = mail.take(take)[0]
            else:
                number = order.following(number)
        store_wait()
