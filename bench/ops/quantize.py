"""quantize_fp8 against torch.compile and a copy of as many bytes.

    python -m bench.ops.quantize [--sections row,1x128,128x128,tensor,transpose,calls] [--shapes 8192x8192] [--quick]

bf16 to e4m3. Bytes: 3 an element, 4 with the transpose; "tensor", and "row" with the transpose, read twice and are
counted so: 5 and 6. Results go to OUT/quantize.json after every case. Exit status as the other benches'.
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
from bench.peers import common
from bench.peers.common import _compiled, copied
from tkq.granularity import BLOCKS
from tkq.reference.fp8 import dequantise, quantize_fp8
from tkq.testing.timing import relative_error

SHAPES = ((8192, 8192), (16384, 4096), (4096, 14336), (32768, 1024), (8192, 28672))
QUICK = SHAPES[:2]
BOUND, CALL_US = 0.9, 14.0


def _row(x):
    scale = (x.abs().amax(1, keepdim=True).float() / 448).clamp_min(2.0**-126)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _blocks(down, right):
    def f(x):
        y = x.view(x.shape[0] // down, down, x.shape[1] // right, right).float()
        scale = (y.abs().amax((1, 3), keepdim=True) / 448).clamp_min(2.0**-126)
        return (y / scale).to(torch.float8_e4m3fn).view(x.shape), scale[:, 0, :, 0]
    return f


GRANULARITIES = "row", "1x128", "128x128", "tensor"


def _torch(granularity):
    f = {"row": _row, "1x128": _blocks(1, 128), "128x128": _blocks(128, 128)}[granularity]
    compiled = _compiled(f)
    return lambda x, bytes: compiled(x)


common.PEERS["quantize"] = {
    "copy": lambda granularity: lambda x, bytes: copied(bytes),
    "torch.compile": _torch,
}


def jobs(granularity: str, transpose: bool, shapes) -> Iterator[Job]:
    per_element = 3 + transpose + 2 * (granularity == "tensor" or (transpose and granularity == "row"))
    for m, n in shapes:
        def inputs(i, m=m, n=n):
            g = torch.Generator("cuda").manual_seed(i)
            x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16, generator=g)
            return x, torch.zeros(m * n * per_element // 2, dtype=torch.uint8, device="cuda")

        def ours(x, bytes):
            return tkq.quantize_fp8(x, granularity, transpose=transpose)

        def error(name, given, output):
            if name == "copy":
                return None
            rows = slice(0, 256)
            wanted = given[0][rows].float()
            if granularity != "tensor":
                wanted = dequantise(*quantize_fp8(wanted, BLOCKS[granularity]))
            of = {"tensor": slice(None), "128x128": slice(2)}.get(granularity, rows)
            scale = output[1][of]
            return relative_error(dequantise(output[0][rows], scale), wanted)

        op = f"quantize {granularity}" + " transpose" * transpose
        names = ("copy", "torch.compile") if granularity != "tensor" and not transpose else ("copy",)
        question = harness.Question("transpose" if transpose else granularity, op, f"{m}x{n}", "GB/s",
                                    per_element * m * n, roof=Bound(("copy",), BOUND))
        yield Job(question, ours, "quantize", names, inputs, error, {"granularity": granularity})


def transposes(shapes) -> Iterator[Job]:
    for granularity in ("row", "1x128", "128x128"):
        yield from jobs(granularity, True, shapes)


def calls() -> dict[str, Call]:
    """Eager calls on small tensors, and on larger ones where x is read twice."""
    x, larger = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((128, 256), (1024, 1024)))
    ours = {f"quantize_fp8 {g}": Call(lambda g=g: tkq.quantize_fp8(x, g), False, CALL_US) for g in GRANULARITIES}
    for name, of in (("", x), (" 1024x1024", larger)):
        ours[f"quantize_fp8 row transpose{name}"] = Call(
            lambda of=of: tkq.quantize_fp8(of, "row", transpose=True), False, CALL_US)
    ours["quantize_fp8 tensor 1024x1024"] = Call(lambda: tkq.quantize_fp8(larger, "tensor"), False, CALL_US)
    return {"x + x": Call(lambda: x + x), **ours}


def _section(granularity):
    return lambda shapes: jobs(granularity, False, shapes)


SECTIONS = {g: _section(g) for g in GRANULARITIES} | {"transpose": transposes}
BENCH = Bench("quantize", __doc__, SECTIONS, shapes=dict.fromkeys(SECTIONS, SHAPES), quick=QUICK, calls=calls)

if __name__ == "__main__":
    sys.exit(main(BENCH))
