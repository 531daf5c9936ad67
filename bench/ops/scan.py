"""tkq.scan against fla's hgrn, accelerated_scan and torch: forward, and forward with backward.

    python -m bench.ops.scan [--sections calls,forward,training,time,time_training] [--quick] [--shapes 8x2048x2048]

forward, training: bf16 of contiguous channels, beside hgrn. time, time_training: fp32 of contiguous tokens, beside
accelerated_scan. Shapes: sequences, their length, channels. Factors are from 0.5 to 1. The work is the bytes of a, b
and h, with the backward of eight such tensors. A result is judged by float64, on the first 64 channels of the first
sequence. Results go to OUT/scan.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.rows_common import randn
from bench.peers import common, scan
from tkq.reference.recurrence import scan as exactly
from tkq.reference.recurrence import scan_backward as exact_gradients
from tkq.testing.timing import relative_error

JUDGED = 64
SHAPES = (8, 2048, 2048), (2, 8192, 2048)
AT_LEAST = {"forward": 3.0, "training": 3.0, "time": 0.98, "time_training": 0.98}  # times the best
ROOF = {"forward": 0.95, "training": 0.95, "time": 0.90, "time_training": 0.90}


def ours(a, b):
    return tkq.scan(a, b)


def inputs(i, time, *shape):
    """a, b, dh."""
    B, T, C = shape
    made = [randn(3 * i + j, *((B, C, T) if time else shape)) for j in range(3)]
    made[0] = made[0].sigmoid().add(1).div(2)
    return [x.float().mT if time else x for x in made]


def judged(*tensors):
    return [x[:1, :, :JUDGED].double() for x in tensors]


def error_of(section):
    def forward(name, given, found):
        if name == "copy":
            return None
        return relative_error(found[:1, :, :JUDGED], exactly(*judged(*given[:2]))[0])

    def training(name, given, found):
        """The larger one of h's and db's: hgrn's factors are logarithms."""
        if name == "copy":
            return None
        a, b, dh = judged(*given)
        h = exactly(a, b)[0]
        db = exact_gradients(dh, None, a, h, None, False)[1]
        return max(relative_error(found[i][:1, :, :JUDGED], exact) for i, exact in ((0, h), (2, db)))

    return training if section.endswith("training") else forward


def jobs(section, shapes) -> Iterator[Job]:
    time, train = section.startswith("time"), section.endswith("training")
    op = "scan" + "_time" * time + "_training" * train
    names = tuple(scan.PEERS[op])
    for shape in shapes:
        work = (4 if time else 2) * (8 if train else 3) * shape[0] * shape[1] * shape[2]
        title = "{}x{} C{}".format(*shape) + " fp32" * time
        question = harness.Question(section, "scan", title, "GB/s", work, Bound(names[:-1], AT_LEAST[section]),
                                    roof=Bound(names[-1:], ROOF[section]))
        yield Job(question, scan.training(ours) if train else ours, op, names,
                  lambda i, size=shape: tuple(inputs(i, time, *size)[:3 if train else 2]), error_of(section))


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    a, b, _ = inputs(0, False, 1, 64, 64)
    found = {"x + x": Call(lambda: a + a), "scan tkq": Call(lambda: ours(a, b))}
    for name, call in common.find("scan", ("fla",))[0].items():
        found[f"scan {name}"] = Call(lambda call=call: call(a, b))
    return found


SECTIONS = dict.fromkeys(AT_LEAST, SHAPES)
BENCH = Bench(
    "scan", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in SECTIONS},
    shapes=SECTIONS,
    quick=SHAPES[:1],
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
