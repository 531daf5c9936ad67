"""Flash attention forward that leaves a row's maximum as it is until scores go far beyond it (``halves_light``)."""
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention import forward
from tkq.attention.consumer import Consumer
from tkq.attention.halves_light import LightSoftmax
from tkq.attention.light_config import LightForwardConfig
from tkq.attention.spec import AttentionSpec


class LightConsumer(Consumer):
    """``Consumer``; O is corrected where a maximum of the warp's rows has moved."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.softmax = LightSoftmax(spec, config)

    def step(self, g, s, c, i, sides):
        """As ``Consumer.step``."""
        self.issue(s, c)
        moved = self.softmax.step(g, c, i, sides)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        tk.copy(c.att_mma, c.att)
        self.correct_if(c, moved)

    def correct(self, c, late):
        """Nothing: ``correct_if`` does it."""

    @cute.jit
    def correct_if(self, c, moved):
        if moved:
            tk.mul_row(c.o, c.o, c.correct)


class LightForward(forward.AttentionForward):
    """``AttentionForward`` with ``LightConsumer``."""

    def __init__(self, spec: AttentionSpec, config: LightForwardConfig):
        super().__init__(spec, config.check(spec.head_dim, spec.head_dim_v))
        self.consumer = LightConsumer(spec, config)


def build(spec: AttentionSpec, config: LightForwardConfig):
    """As ``forward.build``."""
    return LightForward(spec, config), forward.build(spec, config)[1]
