"""grouped_gemm against torch: bf16, float8 by rows and by 1x128, equal and skewed groups; weight gradients.

    python -m bench.ops.grouped_gemm [--sections bf16,row,1x128_128x128,gradient,gradient_row,gradient_1x128,calls]
        [--shapes 8192x4096x4096] [--quick]

16 groups; a shape is M (of all groups) x N x K; of gradients (K, N) is the result of each group. Results go to
OUT/grouped_gemm.json after every case. Exit status as the other benches'.
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
from bench.peers import common, deepgemm
from tkq.reference.grouped import bounds, grouped_gemm
from tkq.testing.timing import relative_error

GROUPS = 16
SHAPES = ((8192, 4096, 4096), (65536, 4096, 2048))
BOUND, CALL_US = 1.05, 14.0
FP8 = torch.float8_e4m3fn


def sizes(m: int, skewed: bool, unit: int = 1) -> list[int]:
    """All groups alike; or most rows in few: one has half of them, one is empty, one has a single row. Multiples of
    ``unit``, as m is and a 16th of it."""
    if not skewed:
        return [m // GROUPS] * GROUPS
    found = [m // 2, 0, unit] + [m // 64 // unit * unit + 3 * i // unit * unit for i in range(GROUPS - 4)]
    return [*found, m - sum(found)]


def _grouped(kind):
    return lambda a, b, offsets, *_: torch._grouped_mm(a, b, offs=offsets)


def _scaled_grouped(kind):
    if kind not in ("row", "gradient_row"):
        raise NotImplementedError("torch has grouped products of scales by rows alone")

    def f(a, b, offsets, sa, sb):
        of_b = sb.view(sb.shape[0], -1) if kind == "row" else sb.view(-1)
        return torch._scaled_grouped_mm(a, b, sa.view(-1), of_b, offs=offsets, out_dtype=torch.bfloat16,
                                        use_fast_accum=True)

    return f


PEERS = {"grouped_gemm": {"torch": _grouped, deepgemm.NAME: deepgemm.grouped},
         "grouped_gemm_fp8": {"torch": _scaled_grouped, deepgemm.NAME: deepgemm.grouped}}
common.PEERS.update(PEERS)


def _float8(x, granularity):
    q, scale = tkq.quantize_fp8(x, granularity)
    return q.view(torch.uint8), scale


def make_inputs(kind, m, n, k, offsets, seed):
    g = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=g)

    if kind == "gradient":  # of weights (k, n): tokens are what is summed over
        return randn(m, k).t(), randn(m, n), offsets
    if kind == "gradient_row":  # each group's own scales, as torch wants them: here the same for all
        (a, sa), (b, sb) = (tkq.quantize_fp8(randn(m, cols).t().contiguous()) for cols in (k, n))
        return a, b.t(), offsets, sa.repeat(GROUPS, 1, 1), sb.t().repeat(GROUPS, 1, 1)
    if kind == "gradient_1x128":
        (_, _, a, sa), (_, _, b, sb) = (tkq.quantize_fp8(randn(m, cols), "1x128", transpose=True) for cols in (k, n))
        return a, b.t(), offsets, sa, sb.t()
    if kind == "bf16":
        return randn(m, k), randn(GROUPS, n, k).transpose(1, 2), offsets
    a, sa = tkq.quantize_fp8(randn(m, k), "row" if kind == "row" else "1x128")
    weights = [_float8(randn(n, k), "row" if kind == "row" else "128x128") for _ in range(GROUPS)]
    b = torch.stack([q for q, _ in weights]).view(FP8).transpose(1, 2)
    return a, b, offsets, sa, torch.stack([s.t().contiguous() for _, s in weights])


def ours(a, b, offsets, sa=None, sb=None):
    return tkq.grouped_gemm(a, b, offsets, scale_a=sa, scale_b=sb)


def jobs(kind: str, shapes) -> Iterator[Job]:
    for m, n, k in shapes:
        for skewed in (False, True):
            # torch stops where groups along K are not units of 16 bytes
            counts = sizes(m, skewed, 16 if kind.startswith("gradient") else 1)
            def inputs(i, m=m, n=n, k=k, counts=counts):
                return make_inputs(kind, m, n, k, torch.tensor(counts, device="cuda").cumsum(0).int(), i)

            def error(name, given, output, m=m):
                a, b, offsets, *scales = given
                if kind.startswith("gradient"):
                    if scales:
                        scales = scales[0][..., :64, :], scales[1]
                    wanted = grouped_gemm(a[:64], b, offsets, *scales, out_dtype=torch.float32)
                    return relative_error(output[:, :64], wanted)
                last, (i, j) = max(enumerate(bounds(offsets, m)), key=lambda x: x[1][1] - x[1][0])
                i = max(i, j - 64)
                one = torch.tensor([j - i], dtype=torch.int32)
                sa, sb = (scales[0][i:j], scales[1][last:last + 1]) if scales else (None, None)
                return relative_error(output[i:j], grouped_gemm(a[i:j], b[last:last + 1], one, sa, sb, torch.float32))

            shape = f"{m}x{n}x{k} {'skewed' if skewed else 'equal'}"
            bound = Bound(("torch",), BOUND) if kind in ("bf16", "row") else None
            question = harness.Question(kind, f"grouped_gemm {kind}", shape, "TFLOP/s", 2 * m * n * k, bound)
            op = "grouped_gemm" if kind in ("bf16", "gradient") else "grouped_gemm_fp8"
            yield Job(question, ours, op, tuple(PEERS[op]), inputs, error, {"kind": kind})


def calls() -> dict[str, Call]:
    """Eager calls on small tensors."""
    x = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([8] * GROUPS, device="cuda").cumsum(0).int()
    found = {"x + x": Call(lambda: x + x)}
    for kind in SECTIONS:
        given = make_inputs(kind, 128, 128, 128, offsets, 0)
        found[f"grouped_gemm {kind} tkq"] = Call(lambda x=given: ours(*x), False, CALL_US)
    return found


def _section(kind):
    return lambda shapes: jobs(kind, shapes)


KINDS = ("bf16", "row", "1x128_128x128", "gradient", "gradient_row", "gradient_1x128")
SECTIONS = {kind: _section(kind) for kind in KINDS}
BENCH = Bench("grouped_gemm", __doc__, SECTIONS, shapes=dict.fromkeys(SECTIONS, SHAPES), quick=SHAPES[:1], calls=calls)

if __name__ == "__main__":
    sys.exit(main(BENCH))
