"""States that a launch leaves on its way: the part of `LinearAttention` that knows of checkpoints."""
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.products import StateProducts
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime.compile import fake


class Checkpoints:
    """The state behind each g.every chunks that are full, of each sequence by itself, to (B, rows, HO, K, V): where the
    sequence begins with token f, the j-th of them, from 1 on, to row f / (64 every) + j - 1. Those of two sequences are
    never in one row, and none is behind the last one, S / (64 every): j of them need as many tokens."""

    def __init__(self, spec: LinearSpec, products: StateProducts):
        self.spec, self.there, self.products = spec, spec.checkpoints is not None, products

    def fake_operands(self, B, HO):
        """(the tensor, every) for the compiler; None without them."""
        if not self.there:
            return None, None
        shape = B, fake.sym(), HO, self.spec.head_dim, self.spec.value_dim
        return fake.tensor(self.spec.checkpoints, shape, tuple(fake.sym64() for _ in shape), align=4), Int32(1)

    @cute.jit
    def put(self, g, t, state: tk.RegTile, i, row0):
        """state is that behind the i-th chunk."""
        if const_expr(self.there):
            done = i + 1
            if done % g.every == 0 and done * CHUNK <= g.tokens:
                of_head = g.checkpoints[t.batch, done // g.every - 1, t.head, None, None]
                to = cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0]))
                self.products.store(to, state, row0)
