"""The ring of attention with wide heads, in steps: who waits for what, with semaphores that know a phase by its parity
alone, loads that land in any order, and roles that are late by chance."""
import random
from dataclasses import dataclass, field

from tkq.attention.wide.config import PARTS, STORE_UNDER


@dataclass
class Barrier:
    """An mbarrier: ``done`` phases, of which a wait sees the last bit."""

    arrivals: int
    left: int = 0
    done: int = 0

    def arrive(self):
        self.left = (self.left or self.arrivals) - 1
        self.done += self.left == 0

    def wait(self, parity):
        while self.done & 1 == parity:
            yield


@dataclass
class Ring:
    """A block's. own, values: slots of a step's products, and of one output warpgroup. tasks: steps of each."""

    stages: int
    own: int
    values: int
    in_flight: int
    known: int
    tasks: list
    chance: random.Random
    data: dict = field(default_factory=dict)
    flying: list = field(default_factory=list)

    def __post_init__(self):
        self.full, self.empty = ([Barrier(1) for _ in range(self.stages)] for _ in range(2))
        self.p_full, self.p_empty, self.p = Barrier(1), Barrier(PARTS), None

    @staticmethod
    def of(config, head_dim, tasks, seed, known=None) -> "Ring":
        return Ring(config.stages, config.key_slots(head_dim), config.value_slots(head_dim), config.scores_in_flight,
                    config.known(head_dim) if known is None else known, tasks, random.Random(seed))

    def order(self):
        """What the producer loads: K of a step before V of the step before."""
        for t, steps in enumerate(self.tasks):
            for i in range(steps + 1):
                if i < steps:
                    yield from (("K", t, i, j) for j in range(self.own))
                if i:
                    yield from (("V", t, i - 1, j) for j in range(PARTS * self.values))

    def produce(self):
        for c, entry in enumerate(self.order()):
            yield from self.empty[c % self.stages].wait(c // self.stages & 1 ^ 1)
            self.flying.append((c % self.stages, entry))
            yield

    def land(self):
        stage, entry = self.flying.pop(self.chance.randrange(len(self.flying)))
        assert stage not in self.data, f"{entry} over {self.data[stage]}"
        self.data[stage] = entry
        self.full[stage].arrive()

    def take(self, c, entry):
        """Wait for a slot, and multiply it."""
        yield from self.full[c % self.stages].wait(c // self.stages & 1)
        found = self.data.get(c % self.stages)
        assert found == entry, f"{found} is multiplied for {entry}"

    def release(self, c):
        del self.data[c % self.stages]
        self.empty[c % self.stages].arrive()

    def pause(self, most):
        for _ in range(self.chance.randrange(most)):
            yield

    def scores(self):
        c = given = 0
        for t, steps in enumerate(self.tasks):
            for i in range(steps):
                for j in range(self.own):
                    yield from self.take(c, ("K", t, i, j))
                    yield
                    if j:
                        self.release(c - 1)
                    c += 1
                    if j == min(self.known, STORE_UNDER):
                        yield from self.p_empty.wait(given & 1 ^ 1)
                    if i and j == STORE_UNDER:
                        self.p = t, i - 1
                    if i and j == self.own - self.in_flight:
                        self.p_full.arrive()
                self.release(c - 1)
                if i:
                    given, c = given + 1, c + PARTS * self.values
                    if not self.in_flight:
                        self.p_full.arrive()
                yield from self.pause(30)
            yield from self.p_empty.wait(given & 1 ^ 1)
            self.p, given, c = (t, steps - 1), given + 1, c + PARTS * self.values
            self.p_full.arrive()

    def outputs(self, part):
        c, taken = part, 0
        for t, steps in enumerate(self.tasks):
            c += self.own
            for i in range(steps):
                c += self.own if i + 1 < steps else 0
                yield from self.p_full.wait(taken & 1)
                for k in range(self.values):
                    yield from self.take(c, ("V", t, i, PARTS * k + part))
                    yield from self.pause(6)
                    assert self.p == (t, i), f"P of {self.p} is multiplied for {(t, i)}"
                    if k:
                        self.release(c - PARTS)
                    c += PARTS
                self.release(c - PARTS)
                self.p_empty.arrive()
                taken += 1
                yield

    def run(self, most=200_000):
        """Until all is done. Raises: AssertionError where something is multiplied that is not what it should be, or
        nothing goes on."""
        roles = [self.produce(), self.scores(), *[self.outputs(part) for part in range(PARTS)]]
        weights, landing = [self.chance.choice((1, 1, 5, 40)) for _ in roles], self.chance.choice((0.02, 0.3, 1.0))
        for _ in range(most):
            if self.flying and self.chance.random() < landing:
                self.land()
            i = self.chance.choices(range(len(roles)), weights)[0]
            if next(roles[i], "over") == "over":
                del roles[i], weights[i]
                if not roles:
                    return
        raise AssertionError("nothing goes on")
