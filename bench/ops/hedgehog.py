"""hedgehog beside its linear part alone in fla: forward, and forward with backward.

    python -m bench.ops.hedgehog [--sections calls,forward,training] [--quick] [--shapes 8x2048x32]

bf16, D = 128, maps of 64 columns. Shapes: sequences, their length, heads. The work is the state's update and its read,
4 * 128 * D a token and head, and three times that with the backward: that of the linear part alone. A result is judged
by all pairs of tokens in float32, on the first sequence's first and last head; fla's, which is another one, is not.
Results go to OUT/hedgehog.json after every case.
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
from bench.peers import common, hedgehog
from tkq.reference.hedgehog import hedgehog as exactly
from tkq.testing.timing import relative_error

DIM = 128
SHAPES = ((8, 2048, 32), (2, 8192, 32))
QUICK = SHAPES[:1]
FORWARD = {(8, 2048, 32): 1.43, (2, 8192, 32): 1.36}  # times fla's linear part
JUDGED = 4096  # tokens for whose pairs there is room


def inputs(i, batch, length, heads):
    """q, k, v, q_map, k_map, linear_factor, window_factor."""
    q, k, v = (randn(5 * i + n, batch, length, heads, DIM) for n in range(3))
    maps = (randn(5 * i + n, heads, DIM, DIM // 2) * DIM**-0.5 for n in (3, 4))
    window = torch.linspace(0.1, 0.9, heads, device=q.device)
    return q, k, v, *maps, 1 - window, window


def one(given, h, tokens=None):
    """A head of the first sequence, as one of its own."""
    return [x[:1, slice(tokens), h:h + 1].float() if x.dim() == 4 else x[h:h + 1].float() for x in given[:7]]


def forward_error(name, given, found):
    """Of the first tokens, as many as there is room for."""
    if name == "fla":
        return None
    tokens = min(found.shape[1], JUDGED)
    return max(relative_error(found[:1, :tokens, h:h + 1], exactly(*one(given, h, tokens)))
               for h in (0, found.shape[2] - 1))


@torch.enable_grad()
def training_error(name, given, found):
    """The largest of o's and the gradients' of q, k and v; of long sequences o's."""
    if name == "fla" or found[0].shape[1] > JUDGED:
        return forward_error(name, given, found[0])
    worst = 0.0
    for h in (0, found[0].shape[2] - 1):
        leaves = [x.requires_grad_() for x in one(given, h)]
        o = exactly(*leaves)
        want = o.detach(), *torch.autograd.grad(o, leaves[:3], given[7][:1, :, h:h + 1].float())
        worst = max(worst, *(relative_error(x[:1, :, h:h + 1], y) for x, y in zip(found, want)))
    return worst


def jobs(section, shapes) -> Iterator[Job]:
    for batch, length, heads in shapes:
        def make(i, size=(batch, length, heads)):
            given = inputs(i, *size)
            return given if section == "forward" else (*given, randn(9000 + i, *size, DIM))

        forward = section == "forward"
        op = "hedgehog" if forward else "hedgehog_training"
        work = (4 if forward else 12) * batch * length * heads * DIM * DIM
        least = FORWARD.get((batch, length, heads))
        question = harness.Question(section, "hedgehog", f"B{batch} S{length} H{heads} D{DIM}", "TFLOP/s", work,
                                    Bound(("fla",), least) if forward and least else None)
        yield Job(question, tkq.hedgehog if forward else hedgehog.training(tkq.hedgehog, 7), op,
                  tuple(hedgehog.PEERS[op]), make, forward_error if forward else training_error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    given = inputs(0, 1, 64, 2)
    found = {"x + x": Call(lambda: given[0] + given[0]), "hedgehog tkq": Call(lambda: tkq.hedgehog(*given))}
    for name, call in common.find("hedgehog", ("fla",))[0].items():
        found[f"hedgehog {name}"] = Call(lambda call=call: call(*given))
    return found


BENCH = Bench(
    "hedgehog", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in ("forward", "training")},
    shapes={"forward": SHAPES, "training": SHAPES},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
