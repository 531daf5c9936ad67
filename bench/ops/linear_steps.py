"""linear_attn_step, gated_delta_rule_step and ssd_step against fla, FlashInfer and mamba_ssm: one token a sequence.

    python -m bench.ops.linear_steps [--sections calls,gdn,kda,gate,ssd] [--quick] [--shapes 64x32]

bf16, states of float32, K = V = 128; a state space has 64 rows of x and 128 columns. Shapes: sequences, heads of v, of
which in "gdn" two share one of q and k; a state space has them all of one group. The work is the bytes of the states,
read and written once. The roof is a copy of them. A result is judged on a copy of the states, of the first sequence, by
the recurrence in float64. Results go to OUT/linear_steps.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.rows_common import BF16, randn
from bench.peers import common, linear_steps
from tkq.reference import linear_steps as reference
from tkq.testing.timing import relative_error

DIM, ROWS = 128, 64
SHAPES = ((1, 32), (8, 32), (64, 32), (256, 32))
SPACES = ((1, 80), (8, 80), (64, 80), (256, 80))
QUICK = ((64, 32), (64, 80))
AT_LEAST, OF_COPY = 1.0, 0.97


def tokens(i, batch, heads, shared=1):
    """q, k, v of one token."""
    return (*(randn(3 * i + n, batch, 1, heads // shared, DIM) for n in (0, 1)), randn(3 * i + 2, batch, 1, heads, DIM))


def states(i, *shape):
    return randn(7000 + i, *shape).float()


def gdn(i, batch, heads):
    a, b = (randn(seed + i, batch, 1, heads) for seed in (5000, 6000))
    A_log, dt_bias = (randn(seed + i, heads).float() for seed in (8000, 9000))
    g = -A_log.exp() * F.softplus(a.float() + dt_bias)
    return *tokens(i, batch, heads, 2), g, b.float().sigmoid(), a, b, A_log, dt_bias, states(i, batch, heads, DIM, DIM)


def kda(i, batch, heads):
    g, beta = F.logsigmoid(randn(5000 + i, batch, 1, heads, DIM).float()), randn(6000 + i, batch, 1, heads).float()
    return *tokens(i, batch, heads), g, beta.sigmoid(), states(i, batch, heads, DIM, DIM)


def gate(i, batch, heads):
    g = F.logsigmoid(randn(5000 + i, batch, 1, heads).float())
    return *tokens(i, batch, heads), g, states(i, batch, heads, DIM, DIM)


def ssd(i, batch, heads):
    """Expanded as Mamba-2's own step has them."""
    x, dt = randn(2 * i, batch, heads, ROWS), randn(5000 + i, batch, heads, 1).expand(batch, heads, ROWS)
    A = -1 - 15 * torch.sigmoid(randn(8000 + i, heads).float())
    D, bias = (randn(seed + i, heads).float()[:, None].expand(heads, ROWS) for seed in (8500, 9000))
    B, C = (randn(2 * i + n, batch, 1, DIM) for n in (1, 600))
    return x, dt, A[:, None, None].expand(heads, ROWS, DIM), B, C, D, bias, states(i, batch, heads, ROWS, DIM)


def ours_delta(q, k, v, g, beta, *rest):
    return tkq.gated_delta_rule_step(q, k, v, g, beta, rest[-1], None, True)


def ours_ssd(x, dt, A, B, C, D, bias, state):
    return tkq.ssd_step(state, x, dt, A, B, C, D, None, bias, True)


def exact_delta(q, k, v, g, beta, *rest):
    q, k, v, state = (x[:1].double() for x in (q, k, v, rest[-1]))
    return reference.linear_attn_step(q, k, v, g[:1], state, beta=beta[:1], qk_l2norm=True)


def exact_gate(q, k, v, g, state):
    q, k, v, state = (x[:1].double() for x in (q, k, v, state))
    return reference.linear_attn_step(q, k, v, g[:1], state)


def exact_ssd(x, dt, A, B, C, D, bias, state):
    state, x, B, C = (t[:1].double() for t in (state, x, B, C))
    return reference.ssd_step(state, x, dt[:1], A, B, C, D, None, bias, True)


CASES: dict[str, tuple[str, Callable, Callable, Callable]] = {  # section: function, inputs, ours, exactly
    "gdn": ("gated_delta_rule_step", gdn, ours_delta, exact_delta),
    "kda": ("gated_delta_rule_step", kda, ours_delta, exact_delta),
    "gate": ("linear_attn_step", gate, tkq.linear_attn_step, exact_gate),
    "ssd": ("ssd_step", ssd, ours_ssd, exact_ssd),
}


def error_of(section: str) -> Callable:
    """Of a call on a copy of the states: those of the case have been updated by calls before."""
    _, _, ours, exactly = CASES[section]

    def error(name, given, _):
        if name == "copy":
            return None
        call = ours if name == "tkq" else linear_steps.PEERS[f"{section}_step"][name]()
        found = call(*given[:-1], given[-1].clone())
        state = given[-1].mT if name == "FlashInfer" else given[-1]  # it takes the same memory for (V, K)
        return relative_error(found[:1], exactly(*given[:-1], state))

    return error


def jobs(section, shapes) -> Iterator[Job]:
    function, inputs, ours, _ = CASES[section]
    names = tuple(linear_steps.PEERS[f"{section}_step"])
    for batch, heads in shapes:
        def make(i, size=(batch, heads)):
            return inputs(i, *size)

        columns = ROWS if section == "ssd" else DIM
        question = harness.Question(
            section, function if section != "kda" else f"{function} of channels",
            f"B{batch} H{heads} {columns}x{DIM}", "GB/s", 2 * 4 * batch * heads * columns * DIM,
            Bound(names[:-1], AT_LEAST), roof=Bound(names[-1:], OF_COPY))
        yield Job(question, ours, f"{section}_step", names, make, error_of(section))


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    q, k, v = (torch.randn(1, 1, 2, 128, device="cuda", dtype=BF16) / 16 for _ in range(3))
    g, beta, state = -torch.rand(1, 1, 2, device="cuda"), torch.rand(1, 1, 2, device="cuda"), torch.zeros(
        1, 2, 128, 128, device="cuda")
    found = {"x + x": Call(lambda: v + v),
             "gated_delta_rule_step tkq": Call(lambda: tkq.gated_delta_rule_step(q, k, v, g, beta, state, None, True)),
             "linear_attn_step tkq": Call(lambda: tkq.linear_attn_step(q, k, v, g, state))}
    for name, call in common.find("gate_step", ("fla",))[0].items():
        found[f"linear_attn_step {name}"] = Call(lambda call=call: call(q, k, v, g, state))
    return found


BENCH = Bench(
    "linear_steps", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in CASES},
    shapes={section: SPACES if section == "ssd" else SHAPES for section in CASES},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
