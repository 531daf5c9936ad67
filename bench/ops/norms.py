"""The norms' forward against its baselines and copies: plain, with a residual, quantised, per head; CPU time per call.

    python -m bench.ops.norms [--sections calls,forward,residual,quant,heads] [--quick] [--shapes 32768x4096]

Everything is bf16, but for layernorm's vectors, which are float32 as QuACK has them (of a quantising norm, where it has
a bias). Bytes: x and the result; with a residual both sums too; a quantised result is half of bf16's. Results go to
OUT/norms.json after every case; a table of all of them is printed last. Exit status 0 if every bound that could be
decided holds and every result is accurate, 1 if not or if something did not run, 2 without a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.core.shapes import FORWARD_SHAPES, NORM_SHAPES
from bench.ops.foundation import BF16, generator, norm_job
from bench.peers import common, liger_cute, norms
from bench.peers.common import RMS_EPS
from tkq.norms.backward.per_head_ops import heads_backward
from tkq.norms.spec import GROUP
from tkq.reference import norms as reference_norms
from tkq.testing.timing import relative_error

QUICK = ((32768, 1024), (32768, 4096), (16384, 16384), (8192, 131072))
HEADS = ((4, 4096, 32, 128), (4, 4096, 8, 128), (1, 4608, 48, 128), (4, 4096, 32, 64))  # B, S, H, D
BEST_PEER, OF_COPY, QUANT_COST = 0.99, 0.95, 1.05
OF_ADD, OF_ADD_SHORT, LONG = 0.80, 0.62, 2**17  # of heads' gradients, by the rows of one sequence's heads
CALL_US, AUTOGRAD_CALL_US = 9.0, 20.0
SAMPLE_ROWS = 256

common.PEERS.update(norms.PEERS)
for _op, _make in norms.LIGER.items():
    common.PEERS[_op] = {**common.PEERS[_op], "Liger": _make, liger_cute.NAME: liger_cute.PEERS[_op]}


def _randn(i: int, *shape: int, dtype=BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator(i))


def _ends(m: int) -> tuple[slice, slice]:
    return slice(0, SAMPLE_ROWS), slice(m - SAMPLE_ROWS, m)


# ---- the cases ---------------------------------------------------------------------------------------------------


def forward_jobs(shapes) -> Iterator[Job]:
    """Against the best peer; Liger's layernorm needs a bias, and its kernels hold a row of at most 65536 columns."""
    for m, n in shapes:
        for op, with_bias in (("rmsnorm", False), ("layernorm", False), ("layernorm", True)):
            job = norm_job(op, m, n, with_bias)
            has = op == "rmsnorm" or with_bias
            liger = ("Liger",) if n <= 65536 and has else ()
            cute = liger_cute.names(n) if has else ()
            against = ("QuACK", "torch.compile", *liger)
            question = dataclasses.replace(
                job.question, section="forward", bound=Bound(against, BEST_PEER), roof=Bound(("copy",), OF_COPY)
            )
            yield dataclasses.replace(job, question=question, peer_names=(*against, *cute, "copy"))


def residual_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        yield _residual_job(m, n)


def _with_residual(m: int, n: int):
    """What makes the i-th x, residual and weight, and what finds the norm of some rows of their sum."""
    def inputs(i):
        return _randn(3 * i, m, n), _randn(3 * i + 1, m, n), _randn(3 * i + 2, n)

    def wanted(x, residual, weight, rows):
        return reference_norms.norm("rmsnorm", x[rows], weight, None, residual[rows], eps=RMS_EPS)[0]

    return inputs, wanted


def _residual_job(m: int, n: int) -> Job:
    inputs, wanted = _with_residual(m, n)

    def ours(x, residual, weight):
        return tkq.rmsnorm(x, weight, residual=residual, prenorm=True, eps=RMS_EPS)

    def error(name, xrw, output):
        if name == "copy":
            return None
        return max(relative_error(output[0][r], wanted(*xrw, r)) for r in _ends(m))

    liger = ("Liger",) if n <= 65536 else ()
    against = ("QuACK", "torch.compile", *liger)
    op = "rmsnorm + residual"
    question = harness.Question("residual", op, f"M{m} N{n}", "GB/s", 4 * m * n * 2, Bound(against, BEST_PEER),
                                roof=Bound(("copy",), OF_COPY))
    return Job(question, ours, op, (*against, *liger_cute.names(n), "copy"), inputs, error)


def quant_jobs(shapes) -> Iterator[Job]:
    for m, n in shapes:
        for way in itertools.product(("rmsnorm", "layernorm"), ("row", "1x128"), (False, True)):
            yield _quant_job(m, n, *way)
        yield _quant_residual_job(m, n)


def _quant_job(m: int, n: int, kind: str, granularity: str, with_bias: bool) -> Job:
    """with_bias: and both vectors in float32."""
    def inputs(i):
        vectors = (torch.float32, torch.float32) if with_bias else (BF16,)
        return _randn(3 * i, m, n), *(_randn(3 * i + j, n, dtype=dtype) for j, dtype in enumerate(vectors, 1))

    def ours(x, weight, bias=None):
        return quantising(x, weight, bias=bias, eps=RMS_EPS, granularity=granularity)

    def error(name, given, output):
        if name == "plain":
            return None
        x, *vectors = given
        width = n if granularity == "row" else GROUP
        return max(
            relative_error(
                output[0][r].float() * output[1][r].repeat_interleave(width, 1)[:, :n],
                reference_norms.norm(kind, x[r], *vectors, eps=RMS_EPS)[0],
            )
            for r in _ends(m)
        )

    quantising, op = getattr(tkq, f"{kind}_quant"), f"{kind}_quant {'+ bias ' * with_bias}{granularity}"
    question = harness.Question("quant", op, f"M{m} N{n}", "GB/s", 3 * m * n, Bound(("plain",), 1 / QUANT_COST))
    return Job(question, ours, op, tuple(norms.PEERS[op]), inputs, error)


def _quant_residual_job(m: int, n: int) -> Job:
    inputs, wanted = _with_residual(m, n)

    def ours(x, residual, weight):
        return tkq.rmsnorm_quant(x, weight, residual=residual, prenorm=True, eps=RMS_EPS)

    def error(name, xrw, output):
        if name == "plain":
            return None
        return max(relative_error(output[0][r].float() * output[1][r], wanted(*xrw, r)) for r in _ends(m))

    op = "rmsnorm_quant + residual"
    question = harness.Question("quant", op, f"M{m} N{n}", "GB/s", 7 * m * n, Bound(("plain",), 1 / QUANT_COST))
    return Job(question, ours, op, ("plain",), inputs, error)


def heads_jobs(_) -> Iterator[Job]:
    """q/k norm on a slice of a packed (B, S, 3, H, D), at shapes of its own."""
    for shape in HEADS:
        yield _heads_job(*shape)
        yield _heads_backward_job(*shape)


def _heads_job(b: int, s: int, h: int, d: int) -> Job:
    def inputs(i):
        return _randn(2 * i, b, s, 3, h, d)[:, :, 1], _randn(2 * i + 1, h, d)

    def error(name, xw, output):
        if name == "copy":
            return None
        x, weight = (t.float() for t in (xw[0][:1], xw[1]))
        return relative_error(output[:1], reference_norms.norm("rmsnorm", x, weight, eps=RMS_EPS)[0])

    op, shape, against = "rmsnorm heads", f"B{b} S{s} H{h} D{d}", ("QuACK", "torch.compile")
    question = harness.Question("heads", op, shape, "GB/s", 2 * b * s * h * d * 2, Bound(against, BEST_PEER))
    return Job(question, lambda x, w: tkq.rmsnorm(x, w, eps=RMS_EPS), op, (*against, "copy"), inputs, error)


def _heads_backward_job(b: int, s: int, h: int, d: int) -> Job:
    def inputs(i):
        dy, x, weight = _randn(3 * i, b, s, h, d), _randn(3 * i + 1, b, s, h, d), _randn(3 * i + 2, h, d)
        return dy, x, weight, torch.rsqrt(x.float().square().mean(-1) + RMS_EPS).flatten()

    def ours(dy, x, weight, rstd):
        rows = (-1, h, d)
        dx, dweight, _, _ = heads_backward(
            "rmsnorm", dy.view(rows), x.view(rows), weight, rstd, dresidual_out=None, weight_offset=0.0,
            needs=(True, True, False), dx_dtype=BF16, dresidual_dtype=None, dbias_dtype=None,
        )
        return dx.view(x.shape), dweight

    def error(name, inputs_, output):
        if name == "add":
            return None
        dy, x, weight, rstd = inputs_
        wanted = reference_norms.norm_backward("rmsnorm", dy, x, weight, rstd, needs=(True, True, False))
        return max(relative_error(o, w.float()) for o, w in zip(output, wanted))

    op = "rmsnorm heads backward"
    shape = f"B{b} S{s} H{h} D{d}"
    question = harness.Question("heads", op, shape, "GB/s", 3 * b * s * h * d * 2, Bound(("torch.compile",), 1.0),
                                roof=Bound(("add",), OF_ADD if h * s >= LONG else OF_ADD_SHORT))
    return Job(question, ours, op, ("torch.compile", "add"), inputs, error)


# ---- the cost of a call ------------------------------------------------------------------------------------------


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    x, w, f = _randn(0, 8, 256), _randn(1, 256), _randn(2, 256, dtype=torch.float32)
    wide, q, wh = x.view(2, 4, 256), _randn(3, 2, 4, 3, 8, 128)[:, :, 1], _randn(4, 8, 128)
    xr, wr, qr = (t.clone().requires_grad_() for t in (x, w, q))
    found = {
        "x + x": Call(lambda: x + x),
        "x + x, recorded": Call(lambda: xr + xr, True),
        "rmsnorm tkq": Call(lambda: tkq.rmsnorm(x, w), at_most=CALL_US),
        "layernorm tkq": Call(lambda: tkq.layernorm(x, f, f), at_most=CALL_US),
        "rmsnorm tkq, three dimensions": Call(lambda: tkq.rmsnorm(wide, w), at_most=CALL_US),
        "rmsnorm tkq, residual and prenorm": Call(lambda: tkq.rmsnorm(x, w, residual=x, prenorm=True), at_most=CALL_US),
        "rmsnorm tkq, heads": Call(lambda: tkq.rmsnorm(q, wh), at_most=CALL_US),
        "rmsnorm_quant tkq": Call(lambda: tkq.rmsnorm_quant(x, w), at_most=CALL_US),
        "layernorm_quant tkq": Call(lambda: tkq.layernorm_quant(x, w, w), at_most=CALL_US),
        "rmsnorm tkq, recorded": Call(lambda: tkq.rmsnorm(xr, wr), True, AUTOGRAD_CALL_US),
        "layernorm tkq, recorded": Call(lambda: tkq.layernorm(xr, wr, wr), True, AUTOGRAD_CALL_US),
        "rmsnorm tkq, heads, recorded": Call(lambda: tkq.rmsnorm(qr, wh), True, AUTOGRAD_CALL_US),
        "layernorm tkq, residual, recorded": Call(
            lambda: tkq.layernorm(xr, wr, residual=xr, prenorm=True), True, AUTOGRAD_CALL_US),
        "rmsnorm tkq, residual and prenorm, recorded": Call(
            lambda: tkq.rmsnorm(xr, wr, residual=xr, prenorm=True), True, AUTOGRAD_CALL_US),
    }
    for name, call in common.find("rmsnorm", ("torch", "QuACK", "Liger"))[0].items():
        found[f"rmsnorm {name}"] = Call(lambda call=call: call(x, w, None))
        found[f"rmsnorm {name}, recorded"] = Call(lambda call=call: call(xr, wr, None), True)
    return found


BENCH = Bench(
    "norms", __doc__,
    {"forward": forward_jobs, "residual": residual_jobs, "quant": quant_jobs, "heads": heads_jobs},
    shapes={"forward": FORWARD_SHAPES, "residual": FORWARD_SHAPES, "quant": NORM_SHAPES},
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
