"""The ring of filters' spectra of `tkq.fft_conv` on a CPU: its own steps, and the tiles that the kernel's own code
gives a block, by threads of which one at a time goes on, in any order. Semaphores know a phase by its parity alone, and
loads land in any order."""
import contextlib
import random
import threading
from types import SimpleNamespace

from tests.helpers.emulation.wide_ring import Barrier
from tests.helpers.emulation.written import as_written
from tkq.convolution.fft import in_registers, ring

MOST = 200_000  # steps


class Semaphore(Barrier):
    @property
    def ptr(self):
        return SimpleNamespace(toint=lambda: self)


class Block:
    """One of a grid's. spec, config: of the kernel. g: `in_registers.Given` of shapes."""

    def __init__(self, spec, config, g, seed):
        self.spec, self.config, self.g, self.chance = spec, config, g, random.Random(seed)
        self.rings = [ring.SpectraRing(spec, config) for _ in range(4 * config.warpgroups)]
        places = self.rings[0].places
        self.full, self.empty = ([Semaphore(n) for _ in range(places)] for n in (1, len(self.rings)))
        self.there, self.read = [None] * places, [None] * len(self.rings)  # heads: of places, that warps read
        self.flying, self.multiplied = [], []
        self.turns, self.main = [threading.Semaphore(0) for _ in self.rings], threading.Semaphore(0)
        self.failed, self.local = None, threading.local()

    # ---- what the kernel's code calls ----------------------------------------------------------

    def pause(self):
        """Others go on."""
        self.main.release()
        self.turns[self.local.warp].acquire()
        if self.failed:
            raise SystemExit

    def wait(self, semaphore, parity):
        self.pause()
        while semaphore.done & 1 == parity:
            self.pause()

    def arrive(self, semaphore):
        self.read[self.local.warp] = None
        self.pause()
        semaphore.arrive()

    def load(self, place, head, size, semaphore):
        used = [w for w, of in enumerate(self.read) if of is not None and of == self.there[place]]
        assert not used, f"head {head} is loaded where warps {used} read {self.there[place]}"
        self.there[place] = None
        self.flying.append((place, head, semaphore))

    def instead_of_the_dsl(self, monkeypatch):
        place = lambda _, at: SimpleNamespace(iterator=SimpleNamespace(toint=lambda: at[1]))
        self.memory = type("Memory", (), {"__getitem__": place})()
        names = dict(
            Int32=int, Int64=int,
            cutlass=SimpleNamespace(range_constexpr=range, min=min, select_=lambda c, a, b: a if c else b),
            cute=SimpleNamespace(make_rmem_tensor=lambda shape, dtype: [None], ceil_div=lambda a, b: -(-a // b),
                                 arch=SimpleNamespace(elect_one=contextlib.nullcontext,
                                                      block_idx=lambda: (self.at,), grid_dim=lambda: (self.blocks,))),
            tk=SimpleNamespace(warp_id=lambda: self.local.warp, wait=self.wait, arrive=self.arrive,
                               expect_bytes=lambda semaphore, size: None, bulk_load=self.load),
            vectors=SimpleNamespace(run_at=lambda x, at, n: SimpleNamespace(
                iterator=SimpleNamespace(toint=lambda: at[0]))))
        for module in (ring, in_registers):
            for name, value in names.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        for name in ("begin", "ask", "enter", "leave", "next"):
            monkeypatch.setattr(ring.SpectraRing, name, as_written(getattr(ring.SpectraRing, name)))

    # ---- a warp, and all of them ---------------------------------------------------------------

    def tiles(self, warp):
        """As `InRegisters.kernel` goes on: of its warpgroup's tiles (head, tile)."""
        kernel, n, wg, of = in_registers.InRegisters, self.config.warpgroups, warp // 4, self.rings[warp]
        first, end = kernel.part(SimpleNamespace(spec=self.spec), self.g)
        per_head = -(-self.g.u.shape[0] // self.spec.sequences)
        of.memory, of.full, of.empty = self.memory, self.full, self.empty
        of.begin(None, first // per_head, (end - 1) // per_head)
        head, tile = kernel.after(None, first // per_head, first % per_head + wg, per_head)
        for _ in range(wg, end - first, n):
            of.enter(head)
            yield head, tile
            head, tile = kernel.after(None, head, tile + n, per_head)
        of.leave()

    def go(self, warp):
        self.local.warp = warp
        self.turns[warp].acquire()
        with contextlib.suppress(SystemExit):
            try:
                for head, tile in self.tiles(warp):
                    place = self.rings[warp].at[0] % self.rings[warp].places
                    self.read[warp] = head
                    for _ in range(self.chance.randrange(4)):
                        assert self.there[place] == head, f"{self.there[place]} is multiplied for head {head}"
                        self.pause()
                    assert self.there[place] == head, f"{self.there[place]} is multiplied for head {head}"
                    self.multiplied.append((warp % 4, head, tile))
                self.read[warp] = None
            except AssertionError as error:
                self.failed = error
        self.running.discard(warp)
        self.main.release()

    def run(self, at, blocks):
        """The block `at` of so many, until all is done. Returns what its warps multiplied: (warp of a warpgroup, head,
        tile). Raises: AssertionError where something else is multiplied, or nothing goes on."""
        self.at, self.blocks, self.running = at, blocks, set(range(len(self.rings)))
        threads = [threading.Thread(target=self.go, args=(w,), daemon=True) for w in self.running]
        weights, landing = [self.chance.choice((1, 1, 5, 40)) for _ in threads], self.chance.choice((0.005, 0.1, 1.0))
        for thread in threads:
            thread.start()
        for _ in range(MOST):
            if self.flying and self.chance.random() < landing:
                place, head, semaphore = self.flying.pop(self.chance.randrange(len(self.flying)))
                self.there[place] = head
                semaphore.arrive()
            going = sorted(self.running)
            if not going:
                break
            warp = going[0] if self.failed else self.chance.choices(going, [weights[w] for w in going])[0]
            self.turns[warp].release()
            self.main.acquire()
        else:
            self.failed = self.failed or AssertionError("nothing goes on")
            for warp in sorted(self.running):
                self.turns[warp].release()
        for thread in threads:
            thread.join(10)
        if self.failed:
            raise self.failed
        return self.multiplied
