"""linear_attn against fla and torch.compile: forward, and forward with backward; and of packed sequences.

    python -m bench.ops.linear_attention [--sections calls,forward,training,packed,packed_training] [--quick]
        [--shapes 8x2048x32]

bf16, K = V = 128. Shapes: sequences, their length (packed: the tokens of all), heads; decays of heads (lightning
attention), of tokens, and of columns (GLA: of the first shape, against fla alone). The work is the state's update and
its read, 4 * K * V a token and head, and three times that with the backward. A result is judged by the sum over keys in
float32, on the first (packed: and the last) sequence's first and last head. Results go to OUT/linear_attention.json
after every case.
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
from bench.ops import columns, packed_states
from bench.ops.rows_common import BF16, randn
from bench.peers import common
from bench.peers.linear_attention import packed_training, training
from tkq.testing.timing import relative_error

DIM = 128
SHAPES = ((8, 2048, 32), (2, 8192, 64))
QUICK = SHAPES[:1]
GATES = ("head", "token", "column")
FORWARD = {"head": 1.8, "token": 1.9, "column": 3.5}  # times fla
TRAINING = {"head": 2.5, "token": 2.5, "column": 3.5}
PEERS = {"head": ("fla", "torch.compile"), "token": ("fla", "torch.compile"), "column": ("fla",)}


def inputs(i, batch, length, heads, gate):
    """q and k of length 1; q, k, v, g."""
    q, k = (torch.nn.functional.normalize(randn(3 * i + n, batch, length, heads, DIM), dim=-1) for n in (0, 1))
    v = randn(3 * i + 2, batch, length, heads, DIM)
    if gate == "head":
        return q, k, v, -torch.logspace(-1, -8, heads, base=2, device=v.device)
    of = (DIM,) if gate == "column" else ()
    return q, k, v, -0.5 * torch.sigmoid(randn(5000 + i, batch, length, heads, *of).float())


def exactly(q, k, v, g):
    """The sum over keys, of one sequence and head (S, D), g (S,) or (S, D)."""
    if g.dim() > 1:
        return columns.exactly(q, k, v, g)
    G = g.double().cumsum(0)
    decay = (G[:, None] - G).clamp(max=0).exp().tril().to(q.dtype)
    return q.shape[1]**-0.5 * (q @ k.T * decay) @ v


def one(x, h):
    """A head of the first sequence; of logarithms, a number for each token."""
    return x[0, :, h].float() if x.dim() > 1 else x[h].float()


def forward_error(_, given, found):
    worst = 0.0
    for h in (0, found.shape[2] - 1):
        q, k, v, g = (one(x, h) for x in given)
        worst = max(worst, relative_error(found[0, :, h], exactly(q, k, v, g if g.dim() else g.expand(len(q)))))
    return worst


@torch.enable_grad()
def training_error(_, given, found):
    """The largest of the results'."""
    worst, g = 0.0, given[3]
    for h in (0, found[0].shape[2] - 1):
        leaves = [one(x, h).requires_grad_() for x in given[:4 if g.dim() > 1 else 3]]
        o = exactly(*leaves[:3], leaves[3] if g.dim() > 1 else one(g, h).expand(len(leaves[0])))
        want = o.detach(), *torch.autograd.grad(o, leaves, one(given[4], h).to(o.dtype))
        worst = max(worst, *(relative_error(one(x, h), y) for x, y in zip(found, want)))
    return worst


def jobs(section, shapes) -> Iterator[Job]:
    for n, (batch, length, heads) in enumerate(shapes):
        for gate in GATES if n == 0 else GATES[:2]:
            def make(i, size=(batch, length, heads), gate=gate):
                given = inputs(i, *size, gate)
                return given if section == "forward" else (*given, randn(9000 + i, *size, DIM))

            forward = section == "forward"
            work = (4 if forward else 12) * batch * length * heads * DIM * DIM
            bound = Bound(("fla",), (FORWARD if forward else TRAINING)[gate])
            question = harness.Question(section, "linear_attn", f"B{batch} S{length} H{heads} D{DIM} decay per {gate}",
                                        "TFLOP/s", work, bound)
            op = "gla" if gate == "column" else "linear_attn"
            yield Job(question, tkq.linear_attn if forward else training(tkq.linear_attn),
                      op if forward else f"{op}_training", PEERS[gate], make,
                      forward_error if forward else training_error)


def packed_error(_, given, found):
    """As a sequence of its own, the first and the last one; found: o, and gradients where they are there."""
    *tensors, cu = given[:5]
    worst = 0.0
    for at in packed_states.judged(cu):
        one_of = [x[:, at] for x in tensors]
        if isinstance(found, torch.Tensor):
            worst = max(worst, forward_error(None, one_of, found[:, at]))
        else:
            worst = max(worst, training_error(None, (*one_of, given[5][:, at]), [x[:, at] for x in found]))
    return worst


def packed(q, k, v, g, cu):
    return tkq.linear_attn(q, k, v, g, cu_seqlens=cu)


def packed_jobs(section, shapes) -> Iterator[Job]:
    for count, tokens, heads in shapes:
        forward = section == "packed"

        def make(i, size=(count, tokens, heads), forward=forward):
            tensors = inputs(i, 1, *size[1:], "token")
            given = *tensors, packed_states.cu_seqlens(*size[:2], tensors[0].device)
            return given if forward else (*given, randn(9000 + i, 1, *size[1:], DIM))

        work = (4 if forward else 12) * tokens * heads * DIM * DIM
        bound = Bound(("fla",), (FORWARD if forward else TRAINING)["token"])
        question = harness.Question(section, "linear_attn", f"{count} in S{tokens} H{heads} D{DIM} decay per token",
                                    "TFLOP/s", work, bound)
        op = "linear_attn_packed" if forward else "linear_attn_packed_training"
        yield Job(question, packed if forward else packed_training(packed), op, ("fla",), make, packed_error)


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=BF16) for _ in range(3))
    r, g = v.clone().requires_grad_(), -torch.rand(1, 64, 2, device="cuda")
    found = {
        "x + x": Call(lambda: v + v),
        "linear_attn tkq": Call(lambda: tkq.linear_attn(q, k, v, g)),
        "linear_attn tkq, recorded": Call(lambda: tkq.linear_attn(q, k, r, g), True),
    }
    for name, call in common.find("linear_attn", ("fla",))[0].items():
        found[f"linear_attn {name}"] = Call(lambda call=call: call(q, k, v, g))
    return found


BENCH = Bench(
    "linear_attention", __doc__,
    {section: lambda shapes, section=section, of=of: of(section, shapes) for section, of in (
        ("forward", jobs), ("training", jobs), ("packed", packed_jobs), ("packed_training", packed_jobs))},
    shapes={"forward": SHAPES, "training": SHAPES,
            **dict.fromkeys(("packed", "packed_training"), packed_states.SHAPES)},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
