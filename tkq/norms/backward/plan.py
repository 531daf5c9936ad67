"""Which plan a norm's backward runs with, by how many rows there are. Pure: no torch, no DSL.

`tkq.rows.persistent.plan` knows a row, not how many of them come. For many rows it has what moves most bytes a second;
where an SM has few, what a launch costs besides decides: how soon the first row is there, and how long column
sums take once the last one has been read. So a shape has a plan for each of a few numbers of rows, of which a call
takes the first that has room: a kernel each, compiled when it is first called for, whatever M the calls have.
"""
from __future__ import annotations

from typing import NamedTuple, Optional

from ...rows.persistent.plan import RowPlan, RowShape, plan

MOST_PLANS = 2  # of a shape


class Step(NamedTuple):
    """elements: of one load, that an SM has at most; None: any number."""

    elements: Optional[int]
    plan: RowPlan


# (least and most columns, most elements of an SM, choices), of two loads of 16 bits, by column sums.
# Measured on an H100 (132 SMs) in microseconds with L2 cleared, one column sum, two of them, in brackets the
# plan for many rows (docs/attempts.md): 32768 x 1024 71.7, 72.7 (73.4, 74.5); 16384 x 2048 72.0, 73.2 (71.0, 77.2);
# 1024 x 4096 12.7, 14.6 (13.3, 17.1); 4096 x 4096 38.4, 40.0 (38.5, 42.5); 8192 x 4096 73.0, 74.5 (71.2, 75.4). Where
# they end at 1024 and 4096 columns is of another run.
_ONCE = dict(evict_first=True, streaming=True)  # nothing is read again, so nothing is to stay in L2
_SHORT = dict(cluster=1, per_thread=32, warps=8, stages=2)
_MIDDLE = dict(cluster=1, per_thread=32, warps=8, stages=3)
_WHOLE = dict(cluster=1, per_thread=16, warps=8, stages=4, **_ONCE)
_FEW = {
    1: ((513, 1024, 1 << 20, _SHORT), (1025, 2048, 1 << 17, _MIDDLE), (2049, 4096, 1 << 17, _WHOLE)),
    2: ((513, 1024, 1 << 18, _SHORT), (1025, 2048, 1 << 18, _MIDDLE), (2049, 4096, 1 << 18, _WHOLE)),
}


def steps(shape: RowShape) -> tuple:
    """The plans of a shape, from the one for the fewest rows to the one for any number."""
    found = []
    if shape.bulk and shape.loads == (16, 16):
        for least, most, elements, choices in _FEW.get(shape.columns, ()):
            if least <= shape.N <= most and (p := _fitting(shape, choices)):
                found.append(Step(elements, p))
    return *found, Step(None, plan(shape))


def _fitting(shape, choices):
    try:
        return plan(shape, **choices)
    except ValueError:  # that many stages of such a row do not fit, say
        return None


def limits(shape: RowShape, num_sms: int) -> tuple:
    """(rows up to which it counts, plan) of each step; the last one's are None."""
    return tuple((step.elements and step.elements * num_sms // shape.N, step.plan) for step in steps(shape))


def of_rows(shape: RowShape, rows: int, num_sms: int = 132) -> RowPlan:
    """The plan of a call."""
    return next(p for most, p in limits(shape, num_sms) if most is None or rows <= most)
