"""based against fla and torch.compile: forward, and forward with backward.

    python -m bench.ops.based [--sections calls,forward,training] [--quick] [--shapes 16x4096x16]

bf16, q and k of 16 columns, V 64. Shapes: sequences, their length, heads. The work is the state's update and its read,
4 * 153 * V a token and head, and three times that with the backward. A result is judged by the sum over tokens in
float64, on the first sequence's first and last head. fla's parallel form is not asked for beyond 8192 tokens, where its
time, which grows with the square of the length, is far above the others'. Results go to OUT/based.json after every
case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.rows_common import randn
from bench.peers import based, common
from tkq.reference.based import based as exactly
from tkq.testing.timing import relative_error

D, V, FEATURES = 16, 64, 153
FORWARD = {(16, 1024, 16): 6.4, (16, 4096, 16): 10.5, (2, 8192, 16): 9.9, (1, 32768, 16): 25.0}  # times fla's best
TRAINING = {(16, 1024, 16): 4.0, (16, 4096, 16): 8.0}
QUICK = tuple(FORWARD)[:1]
FLA = "fla parallel", "fla chunks"
LONGEST = 8192  # tokens of fla's parallel form, and for whose sum there is room


def inputs(i, batch, length, heads):
    """q, k, v."""
    return tuple(randn(3 * i + n, batch, length, heads, cols) * size for n, (cols, size) in enumerate(
        ((D, 0.5), (D, 0.5), (V, 1.0))))


def heads_of(x):
    """The first and the last of the first sequence, wide."""
    return x[:1, :, [0, -1]].double()


def forward_error(_, given, found):
    """Of the first tokens, as many as such a sum has room for."""
    tokens = min(found.shape[1], LONGEST)
    return relative_error(heads_of(found)[:, :tokens], exactly(*(heads_of(x)[:, :tokens] for x in given[:3]))[0])


@torch.enable_grad()
def training_error(_, given, found):
    """The largest of o's and the gradients'."""
    leaves = [heads_of(x).requires_grad_() for x in given[:3]]
    o = exactly(*leaves)[0]
    want = o.detach(), *torch.autograd.grad(o, leaves, heads_of(given[3]))
    return max(relative_error(heads_of(mine), exact) for mine, exact in zip(found, want))


def ours(q, k, v):
    return tkq.based(q, k, v)


def jobs(section, shapes) -> Iterator[Job]:
    for shape in shapes:
        def make(i, size=shape):
            given = inputs(i, *size)
            return given if section == "forward" else (*given, randn(9000 + i, *size, V))

        forward = section == "forward"
        op = "based" if forward else "based_training"
        batch, length, heads = shape
        work = (4 if forward else 12) * batch * length * heads * FEATURES * V
        peers = tuple(name for name in based.PEERS[op] if name != FLA[0] or length <= LONGEST)
        least = (FORWARD if forward else TRAINING).get(shape)
        bound = None if least is None else Bound(tuple(name for name in FLA if name in peers), least)
        question = harness.Question(section, "based", f"B{batch} S{length} H{heads} V{V}", "TFLOP/s", work, bound)
        yield Job(question, ours if forward else based.training(ours), op, peers, make,
                  forward_error if forward else training_error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    given = inputs(0, 1, 64, 2)
    found = {"x + x": Call(lambda: given[0] + given[0]), "based tkq": Call(lambda: ours(*given))}
    for name, call in common.find("based", FLA)[0].items():
        found[f"based {name}"] = Call(lambda call=call: call(*given))
    return found


BENCH = Bench(
    "based", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in ("forward", "training")},
    shapes={"forward": tuple(FORWARD), "training": tuple(TRAINING)},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
