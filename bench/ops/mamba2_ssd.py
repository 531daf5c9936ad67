"""mamba2_ssd against mamba_ssm and torch.compile: forward, and forward with backward.

    python -m bench.ops.mamba2_ssd [--sections calls,forward,training] [--quick] [--shapes 8x2048x80x128]

bf16, P 64, all heads share one of B and C. Shapes: sequences, their length, heads, N. With N 128 as Mamba-2's models
are: dt of bf16 with a bias and softplus, A from -16 to -1, D of each head; with N 64 the recurrence alone, d from 0 to
0.1. The work is the state's update and its read, 4 * P * N a token and head, and three times that with the backward. A
result is judged by the sum over tokens in float64, on the first sequence's first and last head (y), or on all heads of
short sequences (gradients). Results go to OUT/mamba2_ssd.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.nn.functional import softplus

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.rows_common import randn
from bench.peers import common, ssd
from tkq.testing.timing import relative_error

P = 64
MODELS = ((8, 2048, 80, 128), (2, 8192, 80, 128), (1, 32768, 80, 128))
PLAIN = {(16, 1024, 16, 64): 3.1, (16, 4096, 16, 64): 3.8, (2, 8192, 80, 64): 2.4}  # times mamba_ssm
SHAPES = (*MODELS, *PLAIN)
TRAINING = MODELS[:2]
QUICK = SHAPES[:1]
BOUND = 3.0  # times mamba_ssm, elsewhere
JUDGED = 8192  # tokens for whose sum there is room
NAMES = "x", "dt", "A", "B", "C", "D", "dt_bias"


def inputs(i, batch, length, heads, N):
    """x, dt, A, B, C, D, dt_bias."""
    x, dt = randn(4 * i, batch, length, heads, P), randn(4 * i + 1, batch, length, heads)
    B, C = (randn(4 * i + n, batch, length, 1, N) for n in (2, 3))
    B = torch.nn.functional.normalize(B, dim=-1)
    steps = torch.linspace(0, 1, heads, device=x.device)
    if N == 64:
        return x, 0.1 * torch.sigmoid(dt), -1 - steps, B, C, None, None
    return x, dt, -1 - 15 * steps, B, C, 0.5 + steps, -4.0 + 2 * steps.flip(0)


def exactly(x, dt, A, B, C, D, dt_bias):
    """The sum over tokens, of one sequence and head: x (S, P), dt (S,), B and C (S, N), numbers."""
    d = dt if dt_bias is None else softplus(dt + dt_bias)
    G = (d * A).cumsum(0)
    y = (C @ B.T * (G[:, None] - G).clamp(max=0).exp()).tril() @ (d[:, None] * x)
    return y if D is None else y + D * x


def one(given, h, tokens=None):
    """A head of the first sequence, wide."""
    x, dt, A, B, C, D, bias = (t if t is None else t.double() for t in given[:7])
    at = slice(tokens)
    return (x[0, at, h], dt[0, at, h], A[h], B[0, at, 0], C[0, at, 0], *(t if t is None else t[h] for t in (D, bias)))


def forward_error(_, given, found):
    """Of the first tokens, as many as such a sum has room for."""
    tokens = min(found.shape[1], JUDGED)
    return max(relative_error(found[0, :tokens, h], exactly(*one(given, h, tokens))) for h in (0, found.shape[2] - 1))


@torch.enable_grad()
def training_error(_, given, found):
    """The largest of y's and the gradients' of x and dt, on the first and the last head; B and C are shared by all."""
    worst = 0.0
    for h in (0, found[0].shape[2] - 1):
        leaves = [t if t is None else t.detach().requires_grad_() for t in one(given, h)]
        y = exactly(*leaves)
        want = y.detach(), *torch.autograd.grad(y, leaves[:2], given[7][0, :, h].double())
        worst = max(worst, *(relative_error(mine[0, :, h], exact) for mine, exact in zip(found, want)))
    return worst


def ours(x, dt, A, B, C, D, dt_bias):
    return tkq.mamba2_ssd(x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_bias is not None)


def jobs(section, shapes) -> Iterator[Job]:
    for batch, length, heads, N in shapes:
        def make(i, size=(batch, length, heads, N)):
            given = inputs(i, *size)
            return given if section == "forward" else (*given, randn(9000 + i, *size[:3], P))

        forward = section == "forward"
        op = "mamba2_ssd" if forward else "mamba2_ssd_training"
        work = (4 if forward else 12) * batch * length * heads * P * N
        bound = Bound(("mamba_ssm",), PLAIN.get((batch, length, heads, N), BOUND))
        question = harness.Question(section, "mamba2_ssd", f"B{batch} S{length} H{heads} P{P} N{N}", "TFLOP/s", work,
                                    bound)
        yield Job(question, ours if forward else ssd.training(ours), op, tuple(ssd.PEERS[op]), make,
                  forward_error if forward else training_error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    given = inputs(0, 1, 64, 2, 128)
    found = {"x + x": Call(lambda: given[0] + given[0]), "mamba2_ssd tkq": Call(lambda: ours(*given))}
    for name, call in common.find("mamba2_ssd", ("mamba_ssm",))[0].items():
        found[f"mamba2_ssd {name}"] = Call(lambda call=call: call(*given))
    return found


BENCH = Bench(
    "mamba2_ssd", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in ("forward", "training")},
    shapes={"forward": SHAPES, "training": TRAINING},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
