"""gated_delta_rule against FlashInfer, FlashQLA and fla: forward, and forward with backward; and of packed sequences.

    python -m bench.ops.gated_delta_rule [--sections calls,forward,training,gates,packed,packed_training] [--quick]
        [--shapes 8x2048x32]

bf16, K = V = 128; a decay and a beta for each token. Shapes: sequences, their length (packed: the tokens of all),
heads of v, of which two share one of q and k; of the first shape also with a decay for each column (KDA), as many
heads of q and k, and fla alone. "gates" is KDA as its layer calls it, forward, beside FlashKDA and fla: l2 norms, the
gate's function with a lower bound and beta's sigmoid included. The work is the state's update and its read, 4 * K * V a
token and head, and three times that with the backward. A result is judged by one triangular system in float64, on the
first (packed: and the last) sequence's first and last head (o), or on its first head of q and k (gradients, of short
sequences). Results go to OUT/gated_delta_rule.json after every case.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops import columns, packed_states
from bench.ops.rows_common import BF16, randn
from bench.peers import common, delta_rule
from tkq.testing.timing import relative_error

DIM = 128
SHAPES = ((8, 2048, 32), (32, 2048, 32), (2, 8192, 32), (1, 32768, 32))
QUICK = SHAPES[:1]
TRAINING = ((8, 2048, 32), (2, 8192, 32), (1, 32768, 32))
JUDGED = 8192  # tokens for whose system there is room
SEGMENTS, FILLED = "FlashInfer, segments", 512  # with so many sequences and heads nothing is won by cutting them
BOUNDS = {"forward": Bound(("FlashInfer", SEGMENTS, "FlashQLA"), 1.03), "training": Bound(("FlashQLA",), 1.3)}
OF_COLUMNS = Bound(("fla",), 4.0)  # with the backward


def inputs(i, batch, length, heads, of_columns=False):
    """q and k of length 1; q, k, v, g, beta, exp(g)."""
    of_keys, of = (heads, (DIM,)) if of_columns else (heads // 2, ())
    q, k = (torch.nn.functional.normalize(randn(3 * i + n, batch, length, of_keys, DIM), dim=-1) for n in (0, 1))
    v = randn(3 * i + 2, batch, length, heads, DIM)
    g = -0.5 * torch.sigmoid(randn(5000 + i, batch, length, heads, *of).float())
    return q, k, v, g, torch.sigmoid(randn(6000 + i, batch, length, heads).float()), g.exp()


def exactly(q, k, v, g, beta):
    """The delta rule as one triangular system, of one sequence and head (S, D), g and beta (S,). g of columns (S, D):
    as one for each chunk."""
    if g.dim() > 1:
        return columns.exactly(q, k, v, g, beta)
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    G = g.cumsum(0)
    decay = (G[:, None] - G).clamp(max=0).exp()
    lower = (beta[:, None] * decay * (k @ k.T)).tril(-1)
    u = torch.linalg.solve_triangular(lower, beta[:, None] * v, upper=False, unitriangular=True)
    return q.shape[1]**-0.5 * (q @ k.T * decay).tril() @ u


def forward_error(_, given, found):
    """Of the first tokens, as many as such a system has room for."""
    worst, q, tokens = 0.0, given[0], min(found.shape[1], JUDGED)
    for h in (0, found.shape[2] - 1):
        shared = h * q.shape[2] // found.shape[2]
        one = [x[0, :tokens, h if x.shape[2] == found.shape[2] else shared] for x in given[:5]]
        worst = max(worst, relative_error(found[0, :tokens, h], exactly(*one)))
    return worst


@torch.enable_grad()
def training_error(_, given, found):
    """The largest of the results', of both heads that share the first of q and k; of long sequences that of o."""
    if found[0].shape[1] > JUDGED:
        return forward_error(None, given, found[0])
    leaves = [x[:1, :, :1 if x.shape[2] < found[0].shape[2] else 2].detach().double().requires_grad_()
              for x in given[:5]]
    o = torch.stack([exactly(*(x[0, :, min(h, x.shape[2] - 1)] for x in leaves)) for h in (0, 1)], 1)
    want = torch.autograd.grad(o, leaves, given[6][0, :, :2].double())
    pairs = [(found[0][:1, :, :2], o.detach()[None]), *((x[:1, :, :y.shape[2]], y) for x, y in zip(found[1:], want))]
    return max(relative_error(x, y) for x, y in pairs)


def ours(q, k, v, g, beta, alpha):
    return tkq.gated_delta_rule(q, k, v, g, beta)


def among(bound: Bound, peers) -> Bound:
    """The same against those of its peers that a case has."""
    return dataclasses.replace(bound, against=tuple(name for name in bound.against if name in peers))


def jobs(section, shapes) -> Iterator[Job]:
    for (batch, length, heads), of_columns in (*((shape, False) for shape in shapes), (shapes[0], True)):
        def make(i, size=(batch, length, heads), of_columns=of_columns):
            given = inputs(i, *size, of_columns)
            return given if section == "forward" else (*given, randn(9000 + i, *size, DIM))

        forward = section == "forward"
        op = ("kda" if of_columns else "gated_delta_rule") + ("" if forward else "_training")
        work = (4 if forward else 12) * batch * length * heads * DIM * DIM
        shape = f"B{batch} S{length} H{heads if of_columns else heads // 2}/{heads} D{DIM}"
        bound = BOUNDS[section] if not of_columns else None if forward else OF_COLUMNS
        peers = tuple(name for name in delta_rule.PEERS[op] if name != SEGMENTS or batch * heads < FILLED)
        question = harness.Question(section, "gated_delta_rule", shape + " decay per column" * of_columns, "TFLOP/s",
                                    work, bound and among(bound, peers))
        yield Job(question, ours if forward else delta_rule.training(ours), op, peers, make,
                  forward_error if forward else training_error)


# ---- as Kimi's layer calls it ----------------------------------------------------------------------------------------


def layer_inputs(i, batch, length, heads):
    """q, k, v, g before its function, beta before its sigmoid, A_log, dt_bias."""
    q, k, v, g = (randn(4 * i + n, batch, length, heads, DIM) for n in range(4))
    A_log = torch.linspace(0, 1.5, heads, device=q.device)
    return q, k, v, g, randn(6000 + i, batch, length, heads), A_log, 0.1 * randn(7000, heads, DIM).float()


def ours_of_layer(q, k, v, g, beta, A_log, dt_bias):
    return tkq.gated_delta_rule(q, k, v, g, beta.float().sigmoid(), use_qk_l2norm_in_kernel=True, A_log=A_log,
                                dt_bias=dt_bias, use_gate_in_kernel=True, gate_lower_bound=delta_rule.LOWEST)


def layer_error(_, given, found):
    """Of the first tokens, as many as there is time for."""
    q, k, v, g, beta, A_log, dt_bias = given
    worst, tokens = 0.0, min(found.shape[1], 2048)
    for h in (0, found.shape[2] - 1):
        q_, k_, v_, g_, beta_ = (x[0, :tokens, h].double() for x in (q, k, v, g, beta))
        decays = delta_rule.LOWEST * (A_log[h].double().exp() * (g_ + dt_bias[h].double())).sigmoid()
        q_, k_ = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q_, k_))
        worst = max(worst, relative_error(found[0, :tokens, h], exactly(q_, k_, v_, decays, beta_.sigmoid())))
    return worst


def layer_jobs(section, shapes) -> Iterator[Job]:
    for batch, length, heads in shapes:
        question = harness.Question(section, "gated_delta_rule", f"B{batch} S{length} H{heads} D{DIM} gates of a layer",
                                    "TFLOP/s", 4 * batch * length * heads * DIM * DIM, Bound(("FlashKDA",), 2.0))
        yield Job(question, ours_of_layer, "kda_gates", tuple(delta_rule.PEERS["kda_gates"]),
                  lambda i, size=(batch, length, heads): layer_inputs(i, *size), layer_error)


# ---- packed sequences ------------------------------------------------------------------------------------------------


def packed_error(_, given, found):
    """As a sequence of its own, the first and the last one; found: o, and gradients where they are there."""
    *tensors, cu = given[:7]
    worst = 0.0
    for at in packed_states.judged(cu):
        one = [x[:, at] for x in tensors]
        if isinstance(found, torch.Tensor):
            worst = max(worst, forward_error(None, one, found[:, at]))
        else:
            worst = max(worst, training_error(None, (*one, given[7][:, at]), [x[:, at] for x in found]))
    return worst


def packed(q, k, v, g, beta, alpha, cu):
    return tkq.gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu)


def packed_jobs(section, shapes) -> Iterator[Job]:
    for count, tokens, heads in shapes:
        forward = section == "packed"

        def make(i, size=(count, tokens, heads), forward=forward):
            tensors = inputs(i, 1, *size[1:])
            given = *tensors, packed_states.cu_seqlens(*size[:2], tensors[0].device)
            return given if forward else (*given, randn(9000 + i, 1, *size[1:], DIM))

        op = "gated_delta_rule_packed" if forward else "gated_delta_rule_packed_training"
        work = (4 if forward else 12) * tokens * heads * DIM * DIM
        peers = tuple(delta_rule.PEERS[op])
        question = harness.Question(section, "gated_delta_rule", f"{count} in S{tokens} H{heads // 2}/{heads} D{DIM}",
                                    "TFLOP/s", work, among(BOUNDS["forward" if forward else "training"], peers))
        yield Job(question, packed if forward else delta_rule.packed_training(packed), op, peers, make, packed_error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    q, k, v = (torch.randn(1, 64, 2, 128, device="cuda", dtype=BF16) / 16 for _ in range(3))
    g, beta = -torch.rand(1, 64, 2, device="cuda"), torch.rand(1, 64, 2, device="cuda")
    found = {"x + x": Call(lambda: v + v),
             "gated_delta_rule tkq": Call(lambda: tkq.gated_delta_rule(q, k, v, g, beta))}
    for name, call in common.find("gated_delta_rule", ("fla",))[0].items():
        found[f"gated_delta_rule {name}"] = Call(lambda call=call: call(q, k, v, g, beta, None))
    return found


BENCH = Bench(
    "gated_delta_rule", __doc__,
    {section: lambda shapes, section=section, of=of: of(section, shapes) for section, of in (
        ("forward", jobs), ("training", jobs), ("gates", layer_jobs), ("packed", packed_jobs),
        ("packed_training", packed_jobs))},
    shapes={"forward": SHAPES, "training": TRAINING, "gates": TRAINING,
            **dict.fromkeys(("packed", "packed_training"), packed_states.SHAPES)},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
