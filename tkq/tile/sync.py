"""Synchronisation: semaphores, rings, pipes, mailboxes, ping-pong; barriers of a block and of a cluster."""
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Uint32, const_expr

from . import traced
from .naps import nap

WARPGROUP = 128

# ---- barriers ------------------------------------------------------------------------------------


def sync(barrier, threads):
    """Named barrier: the ``threads`` that share it all arrive before one goes on. Whole warps call it.

    barrier: 1 to 15 (0 is the whole block's); threads: a multiple of 32."""
    _named("sync", barrier, threads)
    nap("barrier")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
    nap("barrier")


def sync_arrive(barrier, threads):
    """Arrive at a named barrier and go on: others, in ``sync``, wait for it. Whole warps; threads: of all that arrive
    or wait, a multiple of 32."""
    _named("sync_arrive", barrier, threads)
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


def _named(what, barrier, threads):
    if isinstance(barrier, int) and not 1 <= barrier <= 15:
        raise ValueError(f"{what}: barrier is {barrier}, allowed are 1 to 15")
    if isinstance(threads, int) and (threads <= 0 or threads % 32 or threads > 1024):
        raise ValueError(f"{what}: threads is {threads}, allowed are multiples of 32 up to 1024")
    traced.block_has(what, "threads", threads, threads)


def sync_block():
    """All threads of the block."""
    cute.arch.sync_threads()
    nap("barrier")


def cluster_rank():
    """This block's number in its cluster, the same in all lanes; 0 without one."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def cluster_arrive():
    """Arrive at the cluster's barrier, releasing what this thread wrote. Every thread of every block calls it."""
    nap("cluster")
    cute.arch.cluster_arrive()


def cluster_arrive_relaxed():
    """``cluster_arrive`` without the release: where nothing but initialised semaphores has to be seen."""
    nap("cluster")
    cute.arch.cluster_arrive_relaxed()


def cluster_wait():
    """Wait until every thread of the cluster has arrived."""
    cute.arch.cluster_wait()
    nap("cluster")


def cluster_sync():
    """Arrive and wait: also what a block needs before it leaves while others may still write to it."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


# ---- semaphores ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Semaphore:
    """One mbarrier in shared memory, or an array of them."""

    ptr: cute.Pointer
    made: Constexpr = None  # what the trace knows of it

    def __getitem__(self, i):
        return Semaphore(self.ptr + i, self.made)


@dataclass(frozen=True)
class Acquired(Semaphore):
    """A stage's full semaphore as ``Pipe.acquire`` returns it: loads into it are summed while the kernel is traced.
    Loads by its ``ptr`` are not."""

    stage: Constexpr = None

    def __getattribute__(self, name):
        if name == "ptr" and (stage := object.__getattribute__(self, "stage")) is not None:
            stage.certain = False
        return object.__getattribute__(self, name)

    def plain(self):
        """The semaphore alone, for the tile layer, which counts what it loads."""
        return Semaphore(object.__getattribute__(self, "ptr"), self.made)


MOST_PENDING = (1 << 20) - 1  # arrivals and bytes that a semaphore's phase can count


def _semaphore(what, sem):
    if not isinstance(sem, Semaphore):
        raise TypeError(f"{what}: sem is {sem}, allowed is a Semaphore")
    if what != "init":
        traced.initialised(what, sem.made)


def _count(what, name, n, least=0, most=MOST_PENDING):
    """A number known when traced is in its range."""
    if isinstance(n, int) and not least <= n <= most:
        raise ValueError(f"{what}: {name} is {n}, allowed are {least} to {most}")


def init(sem: Semaphore, arrivals):
    """Set how many arrivals complete a phase, 1 or more. One thread, inside ``init_block``."""
    _semaphore("init", sem)
    _count("init", "arrivals", arrivals, 1)
    if sem.made is not None:
        sem.made.initialised = True
    cute.arch.mbarrier_init(sem.ptr, arrivals)


def wait(sem: Semaphore, phase):
    """Wait until the phase of this parity (0, 1, 0, ..) is complete. Every thread that goes on calls it."""
    _wait("wait", sem, phase)


def _wait(place, sem, phase):
    _semaphore("wait", sem)
    cute.arch.mbarrier_wait(sem.ptr, phase)
    nap(place)


def arrive(sem: Semaphore):
    """One arrival from the calling warp."""
    _arrive("arrive", sem)


def _arrive(place, sem):
    _semaphore("arrive", sem)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(sem.ptr)
    nap(place)


@cute.jit
def arrive_cluster(sem: Semaphore, blocks: Constexpr[int]):
    """One arrival from the calling warp on this semaphore of each of the cluster's ``blocks`` blocks, up to 16. What
    threads have loaded from shared memory has been used before, as ``arrive_at`` says; wgmma's reads, waited for."""
    _semaphore("arrive_cluster", sem)
    _count("arrive_cluster", "blocks", blocks, 1, 16)
    traced.cluster_has("arrive_cluster", "blocks", blocks)
    if cute.arch.lane_idx() < blocks:
        cute.arch.mbarrier_arrive(sem.ptr, cute.arch.lane_idx())


def arrive_at(sem: Semaphore, block):
    """One arrival from the calling warp on this semaphore of the cluster's block ``block``, once what the warp reads
    before has been read: by itself an arrival at another block overtakes loads that wait for shared memory."""
    _semaphore("arrive_at", sem)
    cute.arch.fence_acq_rel_cta()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(sem.ptr, block)


def expect_bytes(sem: Semaphore, bytes):
    """One arrival from the calling warp, and ``bytes`` of TMA or bulk copies still to come: up to 2^20 - 1."""
    _semaphore("expect_bytes", sem)
    _count("expect_bytes", "bytes", bytes)
    if isinstance(sem, Acquired):
        sem.stage.announce(bytes)
        sem = sem.plain()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(sem.ptr, bytes)


def store_remote(dst: cute.Pointer, values, sem: Semaphore, block):
    """1, 2 or 4 fp32 values to the place ``dst`` of the cluster's block ``block``, counted in bytes by its ``sem``.

    dst, sem: this block's own addresses of the place and the semaphore, which the other block has at the same offset;
    dst is aligned to all the values together. The calling thread; the receiver calls ``expect_bytes``."""
    _semaphore("store_remote", sem)
    if not isinstance(values, (list, tuple)) or not all(isinstance(x, Float32) for x in values):
        raise TypeError(f"store_remote: values is {values}, allowed is a list of Float32")
    if len(values) not in (1, 2, 4):
        raise ValueError(f"store_remote: {len(values)} values, allowed are 1, 2 and 4")
    words = tuple(x.bitcast(Int32) for x in values)
    words = words if len(words) > 1 else words[0]
    cute.arch.store_async_dsmem(cute.recast_ptr(dst, dtype=Int32), words, sem.ptr, block)


# ---- rings and pipes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """A position in a ring of stages. The counter sits in a register behind the handle, so a ring advances in
    run-time loops without being carried through them."""

    count: cute.Tensor
    stages: Constexpr[int]

    @property
    def stage(self):
        """Which stage, 0 to stages - 1."""
        return Int32(self.count[0] % self.stages) if self.stages > 1 else Int32(0)

    @property
    def phase(self):
        """The parity that a consumer waits for; a producer waits for the other one."""
        return Int32((self.count[0] // self.stages) & 1)

    def advance(self):
        """To the next stage."""
        self.count[0] = self.count[0] + Uint32(1)


def ring(stages, start=0) -> Ring:
    """A position at ``start`` in a ring of ``stages`` stages."""
    if stages < 1:
        raise ValueError(f"ring: stages is {stages}, allowed is 1 or more")
    r = Ring(cute.make_rmem_tensor((1,), Uint32), stages)
    r.count[0] = Uint32(start)
    return r


@dataclass(frozen=True)
class Pipe:
    """A full and an empty semaphore for each stage of a ring that producers fill and consumers drain.

    bytes: what TMA brings a stage; 0 where threads write it themselves.
    consumers: how many *warps* of a block release a stage. cluster: how many blocks share what the pipe brings;
    each of their consumer warps releases the stage in all of them. producers: how many warps announce a stage.
    copies: how many threads add to a stage with ``copy_async``.
    """

    full: Semaphore
    empty: Semaphore
    stages: int
    bytes: int
    consumers: int
    cluster: int = 1
    producers: int = 1
    copies: int = 0

    def __post_init__(self):
        for name in ("stages", "consumers", "cluster", "producers"):
            if getattr(self, name) < 1:
                raise ValueError(f"Pipe: {name} is {getattr(self, name)}, allowed is 1 or more")
        for name in ("bytes", "copies"):
            _count("Pipe", name, getattr(self, name))

    def init(self):
        """Set the counts. One thread, inside ``init_block``."""
        for name in ("consumers", "producers"):
            traced.block_has("Pipe.init", name, f"{getattr(self, name)} warps", 32 * getattr(self, name))
        traced.block_has("Pipe.init", "copies", self.copies, self.copies)
        traced.cluster_is("Pipe.init", "cluster", self.cluster)
        for i in range(self.stages):
            init(self.full[i], self.producers + self.copies)
            init(self.empty[i], self.consumers * self.cluster)

    def ring(self) -> Ring:
        """A position at the first stage, for one role: each producer and consumer has its own."""
        return ring(self.stages)

    def acquire(self, r: Ring) -> Semaphore:
        """Producer: wait until the stage is free, announce its bytes, return the semaphore to load into. A warp."""
        sem = self.full[r.stage]
        self.acquire_empty(r)
        expect_bytes(sem, self.bytes)
        return Acquired(sem.ptr, sem.made, traced.Stage(self.bytes)) if self.producers == 1 else sem

    def acquire_empty(self, r: Ring):
        """Producer that writes with its own stores: wait until the stage is free; ``commit`` announces it later."""
        _wait("producer", self.empty[r.stage], r.phase ^ 1)

    def commit(self, r: Ring):
        """Producer that writes with its own stores (and has ``publish``\\ ed them): one warp's part is there."""
        nap("producer")
        cute.arch.sync_warp()
        arrive(self.full[r.stage])

    def wait(self, r: Ring):
        """Consumer: wait until the stage is full. Every thread that reads it."""
        _wait("consumer", self.full[r.stage], r.phase)

    def release(self, r: Ring):
        """Consumer: one warp has done with the stage. Each of ``consumers`` warps, once a stage."""
        if self.cluster == 1:
            _arrive("consumer", self.empty[r.stage])
        else:
            arrive_cluster(self.empty[r.stage], self.cluster)
            nap("consumer")


@dataclass(frozen=True)
class Mailbox:
    """Ints that a producer warp hands to consumer warps through shared memory: how a dynamically scheduled tile
    travels. A ring of slots, each with a full (1 arrival) and an empty (``consumers`` arrivals) semaphore."""

    slots: cute.Tensor  # (fields, stages) int32
    full: Semaphore
    empty: Semaphore
    fields: int
    stages: int
    consumers: int

    def __post_init__(self):
        for name in ("fields", "stages", "consumers"):
            if getattr(self, name) < 1:
                raise ValueError(f"Mailbox: {name} is {getattr(self, name)}, allowed is 1 or more")

    def init(self):
        """One thread, inside ``init_block``."""
        traced.block_has("Mailbox.init", "consumers", f"{self.consumers} warps", 32 * self.consumers)
        for i in range(self.stages):
            init(self.full[i], 1)
            init(self.empty[i], self.consumers)

    def ring(self) -> Ring:
        """A position at the first slot: one for the producer, one for each consumer."""
        return ring(self.stages)

    def post(self, r: Ring, *values):
        """Producer warp: wait for a free slot, write ``values``, hand them over, move on."""
        if len(values) != self.fields:
            raise ValueError(f"post: {len(values)} values, the mailbox has {self.fields} fields")
        wait(self.empty[r.stage], r.phase ^ 1)
        with cute.arch.elect_one():
            for f, value in enumerate(values):
                self.slots[f, r.stage] = Int32(value)
            cute.arch.mbarrier_arrive(self.full[r.stage].ptr)
        r.advance()

    def take(self, r: Ring):
        """Consumer warp: wait for the next values, return them (the same in all lanes), move on."""
        values = self.read(r)
        self.release(r)
        r.advance()
        return values

    def read(self, r: Ring):
        """Consumer warp: ``take`` in steps, wait for the next values and return them; then ``release``, and move on."""
        wait(self.full[r.stage], r.phase)
        return [cute.arch.make_warp_uniform(self.slots[f, r.stage]) for f in range(self.fields)]

    def release(self, r: Ring):
        """Consumer warp: the slot that was read is free."""
        cute.arch.sync_warp()
        arrive(self.empty[r.stage])


@dataclass(frozen=True)
class PingPong:
    """Ping-pong: warpgroups issue their tensor-core work in turns, so that one's softmax overlaps another's products.

    groups: how many take part; me: which one this is. Named barriers ``barrier`` .. ``barrier + groups - 1`` are
    used. ``start`` once, then ``take`` .. ``give`` around each issue."""

    groups: Constexpr[int]
    me: Int32
    enabled: Constexpr[bool] = True
    barrier: Constexpr[int] = 2

    def __post_init__(self):
        if self.groups < 1 or not 1 <= self.barrier <= 16 - self.groups:
            raise ValueError(f"PingPong: groups is {self.groups} from barrier {self.barrier}, allowed are 1 to 15")

    @cute.jit
    def start(self):
        """Hand group 0 the first turn. Every thread of the groups, once."""
        if const_expr(self.enabled and self.groups > 1):
            if self.me == 0:
                sync_arrive(self.barrier, 2 * WARPGROUP)

    def take(self):
        """Wait for this warpgroup's turn. The warpgroup together."""
        if self.enabled and self.groups > 1:
            sync(self.barrier + self.me, 2 * WARPGROUP)

    @cute.jit
    def give(self):
        """Hand the turn on. The warpgroup together; as often as ``take``. The assembler moves what it can across it."""
        if const_expr(self.enabled and self.groups > 1):
            following = Int32(0) if self.me == self.groups - 1 else self.me + 1
            sync_arrive(self.barrier + following, 2 * WARPGROUP)
