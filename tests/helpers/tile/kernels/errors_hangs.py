"""What would compile and hang, as the tile layer refuses it while it traces: see errors.py.

Each body is (Launch, body(g, tile, load)): a kernel of that launch on x, fp32 (64, 64). ``tile`` is a ring of two tiles
of 64 x 32, ``load`` the descriptor that fills one: 8192 bytes.
"""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk

TYPE = tk.st(64, 32, Float32)


@dataclass(frozen=True)
class Launch:
    body: object
    threads: int = 384
    cluster: int = 1
    loads: int = 1  # blocks that share a load


class Launched:
    """A launch of ``threads`` threads, in clusters of ``cluster`` blocks."""

    def __init__(self, launch):
        self.launch = launch

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: cuda.CUstream):
        one = self.launch
        self.kernel(tk.gl.load(x, TYPE, one.loads)).launch(
            grid=[one.cluster, 1, 1], block=[one.threads, 1, 1], stream=stream, min_blocks_per_mp=1,
            cluster=[one.cluster, 1, 1] if cutlass.const_expr(one.cluster > 1) else None)

    @cute.kernel
    def kernel(self, load: tk.gl):
        self.launch.body(load)


def nothing(*_):
    pass


class Program(tk.LCF):
    """An LCF kernel whose stages hold what ``inputs`` says and load one tile, or two."""

    consumers, stages, inputs = 1, 2, dict(a=(TYPE, 2))

    def __init__(self, loads, schedule):
        self.loads, self.order = loads, schedule

    def schedule(self, g):
        return self.order

    def task(self, g, number):
        return tk.Task(number, number, cutlass.Int32(3))

    def load(self, g, t, i, x, sem):
        for n in range(self.loads):
            tk.load_async(x["a"][n], g, (0, n), sem)

    start = compute = finish = nothing


def producer(bytes, load, **more):
    """A pipe, ``bytes`` a stage, a producer that fills stages by ``load(g, tile, ring, sem)``, a consumer."""

    def body(g):
        al = tk.SharedAllocator()
        tile, pipe = al.tile(TYPE, 2), al.pipe(2, bytes, 4, **more)

        @cute.jit
        def produce():
            r = pipe.ring()
            for _ in cutlass.range(5, unroll=1):
                load(g, tile, r, pipe.acquire(r))
                r.advance()

        @cute.jit
        def consume(wg):
            r = pipe.ring()
            for _ in cutlass.range(5, unroll=1):
                pipe.wait(r)
                pipe.release(r)
                r.advance()

        tk.init_block(pipe.init)
        tk.specialise(produce, consume, 1)

    return Launch(body, 256)


def load(g, tile, r, sem, n=1):
    for _ in range(n):
        tk.load_async(tile[r.stage], g, (0, 0), sem)


def load_raw(g, tile, r, sem):
    """By the semaphore's address: what comes by it is not counted."""
    load(g, tile, r, tk.Semaphore(sem.ptr))
    load(g, tile, r, sem)


@cute.jit
def load_one_of_two(g, tile, r, sem):
    if r.stage == 0:
        load(g, tile, r, sem)
    else:
        load(g, tile, r, sem)


@cute.jit
def load_in_a_loop(g, tile, r, sem):
    for _ in cutlass.range(2, unroll=1):
        load(g, tile, r, sem)


def load_more(g, tile, r, sem):
    tk.expect_bytes(sem, TYPE.bytes)
    load(g, tile, r, sem, 2)


def uses(use, by="pipe"):
    """Something that is used and was not initialised, and beside it another that was."""

    def body(g):
        al = tk.SharedAllocator()
        made = {"pipe": lambda: al.pipe(2, 8192, 4), "mailbox": lambda: al.mailbox(1, 2, 4),
                "semaphores": lambda: al.semaphores(2)}[by]
        thing, other = made(), al.pipe(2, 8192, 4)
        tk.init_block(other.init)
        tk.specialise(lambda: use(thing), nothing, 2)

    return Launch(body)


def barriers(body, threads=128):
    return Launch(lambda g: body(), threads)


def clusters(blocks, of):
    return Launch(lambda g: tk.init_block(nothing, blocks), 128, of)


def pipes(threads=128, stages=2, bytes=16, consumers=1, **more):
    return Launch(lambda g: tk.init_block(tk.SharedAllocator().pipe(stages, bytes, consumers, **more).init), threads)


def one_initialised():
    sem = tk.SharedAllocator().semaphores()
    tk.init(sem, 1)
    return sem


def two_roles(threads):
    roles = tk.Role(nothing, 40, 1, 1), tk.Role(nothing, 232, 2)
    return Launch(lambda g: tk.assign(roles), threads)


HANGS = {
    "block_without_a_producer": (
        Launch(lambda g: tk.specialise(nothing, nothing, 2), 256),
        ValueError, "specialise: the kernel is launched with blocks of 256 threads, allowed are 384: 128 of the "
                    "producer's warpgroup and 128 of each of 2 consumers"),
    "block_with_one_too_many": (
        Launch(lambda g: tk.specialise(nothing, nothing, 1), 384),
        ValueError, "specialise: the kernel is launched with blocks of 384 threads, allowed are 256"),
    "block_without_a_role": (
        two_roles(256),
        ValueError, "assign: the kernel is launched with blocks of 256 threads, allowed are 384: the roles have 3"),
    "block_of_a_template": (
        Launch(lambda g: Program(2, tk.Schedule(3)).run(g), 128),
        ValueError, "specialise: the kernel is launched with blocks of 128 threads, allowed are 256"),
    "pipe_not_initialised": (
        uses(lambda pipe: pipe.acquire(pipe.ring())),
        ValueError, "wait: the semaphore of SharedAllocator.pipe was not initialised: call its init.. inside "
                    "init_block, before the roles begin"),
    "pipe_not_initialised_to_wait": (
        uses(lambda pipe: pipe.wait(pipe.ring())),
        ValueError, "wait: the semaphore of SharedAllocator.pipe was not initialised"),
    "pipe_not_initialised_to_release": (
        uses(lambda pipe: pipe.release(pipe.ring())),
        ValueError, "arrive: the semaphore of SharedAllocator.pipe was not initialised"),
    "mailbox_not_initialised": (
        uses(lambda mail: mail.post(mail.ring(), 3), "mailbox"),
        ValueError, "wait: the semaphore of SharedAllocator.mailbox was not initialised: call its init"),
    "semaphore_not_initialised": (
        uses(lambda sems: tk.expect_bytes(sems[1], 16), "semaphores"),
        ValueError, "expect_bytes: the semaphore of SharedAllocator.semaphores was not initialised: call tk.init"),
    "bytes_of_one_tile_too_few": (
        producer(2 * TYPE.bytes, load),
        ValueError, "Pipe.acquire: bytes is 16384 a stage, but 1 loads into the stage bring 8192: pass "
                    "SharedAllocator.pipe the sum of the tiles' bytes"),
    "bytes_of_one_tile_too_many": (
        producer(TYPE.bytes, lambda *given: load(*given, n=2)),
        ValueError, "Pipe.acquire: bytes is 8192 a stage, but 2 loads into the stage bring 16384"),
    "bytes_of_elements": (
        producer(64 * 32, load),
        ValueError, "Pipe.acquire: bytes is 2048 a stage, but 1 loads into the stage bring 8192"),
    "bytes_of_none": (
        producer(0, load),
        ValueError, "Pipe.acquire: bytes is 0 a stage, but 1 loads into the stage bring 8192"),
    "bytes_announced_twice": (
        producer(2 * TYPE.bytes, load_more),
        ValueError, "Pipe.acquire: bytes is 24576 a stage, but 2 loads into the stage bring 16384"),
    "bytes_of_a_template": (
        Launch(lambda g: Program(1, tk.Schedule(3)).run(g), 256),
        ValueError, "Pipe.acquire: bytes is 16384 a stage, but 1 loads into the stage bring 8192"),
    "barrier_of_more_than_the_block": (
        barriers(lambda: tk.sync(3, 256)),
        ValueError, "sync: threads is 256, which are more threads than the 128 of a block"),
    "turns_of_more_than_the_block": (
        barriers(lambda: tk.PingPong(2, tk.warpgroup_id()).take()),
        ValueError, "sync: threads is 256, which are more threads than the 128 of a block"),
    "pipe_consumers_beyond_the_block": (
        pipes(consumers=8),
        ValueError, "Pipe.init: consumers is 8 warps, which are more threads than the 128 of a block"),
    "pipe_producers_beyond_the_block": (
        pipes(producers=5),
        ValueError, "Pipe.init: producers is 5 warps, which are more threads than the 128 of a block"),
    "pipe_copies_beyond_the_block": (
        pipes(copies=160),
        ValueError, "Pipe.init: copies is 160, which are more threads than the 128 of a block"),
    "mailbox_consumers_beyond_the_block": (
        Launch(lambda g: tk.init_block(tk.SharedAllocator().mailbox(1, 2, 12).init), 256),
        ValueError, "Mailbox.init: consumers is 12 warps, which are more threads than the 256 of a block"),
    "cluster_that_is_not_launched": (
        clusters(2, 1),
        ValueError, "init_block: cluster is 2, but the kernel is launched with clusters of 1"),
    "cluster_of_another_size": (
        clusters(2, 4),
        ValueError, "init_block: cluster is 2, but the kernel is launched with clusters of 4"),
    "arrive_at_more_blocks_than_there_are": (
        Launch(lambda g: tk.arrive_cluster(one_initialised(), 4), 128, 2),
        ValueError, "arrive_cluster: blocks is 4, but the kernel is launched with clusters of 2"),
    "pipe_of_a_cluster_that_is_not_there": (
        pipes(cluster=2),
        ValueError, "Pipe.init: cluster is 2, but the kernel is launched with clusters of 1"),
}
# What is not certain, and what is right: it compiles.
FINE = {
    "one_load": producer(TYPE.bytes, load), "two_loads": producer(2 * TYPE.bytes, lambda *given: load(*given, n=2)),
    "by_address": producer(2 * TYPE.bytes, load_raw), "a_branch": producer(TYPE.bytes, load_one_of_two),
    "a_loop": producer(2 * TYPE.bytes, load_in_a_loop), "more_announced": producer(TYPE.bytes, load_more),
    "a_template": Launch(lambda g: Program(2, tk.Schedule(3)).run(g), 256), "roles": two_roles(384),
    "a_cluster": clusters(2, 2), "consumers_of_a_block": pipes(consumers=4),
    "some_of_a_cluster": Launch(lambda g: tk.arrive_cluster(one_initialised(), 2), 128, 4),
}


def build(case):
    from .common import tensor

    return Launched(FINE[case]), (tensor("fp32", 64, 64),)
