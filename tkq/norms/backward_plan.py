"""Which plan a norm's backward runs with, by how many rows there are. Pure but for `launcher`: no torch, no DSL.

`tkq.rows.plan` knows a row, not how many of them come. For many rows it has what moves most bytes a second; where a
processor has few, what a launch costs besides decides: how soon the first row is there, and how long column sums take
once the last one has been read. So a shape has a plan for each of a few numbers of rows, of which a call takes the
first that has room: a kernel each, compiled when it is first called for, whatever M the calls have.
"""
from __future__ import annotations

from typing import NamedTuple, Optional

from ..rows import launch
from ..rows.plan import RowPlan, RowShape, plan
from ..rows.spec import RowSpec
from ..runtime import arch, rehearsal

MOST_PLANS = 2  # of a shape


class Step(NamedTuple):
    """elements: of one load, that a processor has at most; None: any number."""

    elements: Optional[int]
    plan: RowPlan


# (least and most columns, most elements of a processor, choices), of two loads of 16 bits, by column sums.
# Measured on an H100 (132 processors) in microseconds, beside the plan for many rows (docs/attempts.md):
# 1024 columns, one column sum: 32768 rows 70.7 (71.6), 131072 rows 275.0 (276.1); two of them: 32768 rows 72.1 (73.4),
# 65536 rows 140.6 (140.7), 131072 rows 283.7 (278.3); 262144 rows of both gain by that other plan; 4096 columns, one
# column sum: 1024 rows 12.8 (13.3), 4096 rows 37.9 (38.4), 8192 rows 71.8 (71.2); two of them: 1024 rows 14.7 (17.0),
# 8192 rows 74.4 (75.2), 16384 rows 143.1 (140.8).
_ONCE = dict(cluster=1, evict_first=True, streaming=True)  # nothing is read again, so nothing is to stay in L2
_SHORT = dict(per_thread=32, warps=4, stages=3, **_ONCE)
_WHOLE = dict(per_thread=16, warps=8, stages=4, **_ONCE)
_FEW = {
    1: ((513, 1024, 1 << 20, _SHORT), (2049, 4096, 1 << 17, _WHOLE)),
    2: ((513, 1024, 1 << 18, _SHORT), (2049, 4096, 1 << 18, _WHOLE)),
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
    except ValueError:  # the row has too many bytes for so many stages, say
        return None


def limits(shape: RowShape, processors: int) -> tuple:
    """(rows up to which it counts, plan) of each step; the last one's are None."""
    return tuple((step.elements and step.elements * processors // shape.N, step.plan) for step in steps(shape))


def of_rows(shape: RowShape, rows: int, processors: int = 132) -> RowPlan:
    """The plan of a call."""
    return next(p for most, p in limits(shape, processors) if most is None or rows <= most)


class ByRows:
    """A launcher that takes the one of its launchers that is for so many rows. makes: (rows, function that makes one)
    of each."""

    def __init__(self, makes: tuple):
        self.most = [most for most, _ in makes]
        self.makes = [make for _, make in makes]
        self.made = [None] * len(makes)

    def make_all(self) -> None:
        for i, make in enumerate(self.makes):
            self.made[i] = make()

    def __call__(self, loads, *others) -> None:
        rows, i = loads[0].shape[0], 0
        while self.most[i] is not None and rows > self.most[i]:
            i += 1
        run = self.made[i]
        if run is None:
            run = self.made[i] = self.makes[i]()
        run(loads, *others)


def launcher(spec: RowSpec, device):
    """What launches a spec's calls."""
    found = limits(spec.shape, arch.processors(device))
    makes = tuple((most, lambda p=p: launch.launcher(spec, device, p)) for most, p in found)
    if len(makes) == 1:
        return makes[0][1]()
    arch.require_hopper(device)
    run = ByRows(makes)
    if rehearsal.under_way():  # a bundle has the kernels of all rows
        run.make_all()
    return run
