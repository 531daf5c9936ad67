"""What the warpgroups of attention's backward read of a tile's rows, and where P and dS of it lie."""
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.backward.spec import BackwardSpec


def stats_of(s, ring, which, tile, first=0, count=None):
    """Row ``which`` of the statistics of ring's tile of ``tile`` queries, as a value for each query: of ``count``
    queries from ``first``, or of all."""
    n = count or tile
    v = tk.cv(n)
    row = cute.make_tensor(s.stats[None, ring.stage].iterator + (which * tile + first), cute.make_layout((n,)))
    tk.load_shared_cols(v, row)
    return v


def slope(spec: BackwardSpec, c):
    """Of ``probabilities``: in registers that are there."""
    return c.ds if spec.softcap else c.p
