"""As ``trial``, of pairs of blocks."""
from dataclasses import dataclass

import tkq.tile as tk
from tkq.attention import forward
from tkq.attention.pairs import PairConfig, PairConsumer, PairForward, PairProducer
from tkq.attention.trial import Traced, TrialSoftmax


@dataclass(frozen=True)
class TrialPairs(PairConfig):
    off: tuple = ()
    trace: bool = False


class TrialPairProducer(PairProducer):
    def load_slot(self, dst, src, pipe, ring, of, way, p, rank):
        if "loads" not in self.config.off:
            super().load_slot(dst, src, pipe, ring, of, way, p, rank)
            return
        sem = pipe.full[ring.stage]
        pipe.acquire_empty(ring)
        tk.arrive(sem)
        ring.advance()


class TrialPairConsumer(Traced, PairConsumer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.softmax = TrialSoftmax(spec, config)


class TrialPairForward(PairForward):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.producer, self.consumer = TrialPairProducer(spec, config), TrialPairConsumer(spec, config)


def build(spec, config):
    return TrialPairForward(spec, config), forward.build(spec, config)[1]
