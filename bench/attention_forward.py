"""Attention's forward pass beside FA4's and cuDNN's.

    python -m bench.attention_forward [--sections dense,varlen,window,gqa,calls] [--quick | --shapes 1024,4096]
                                      [--dims 64,128,256] [--out bench/results/h100]

dense: B * S = 16384, H * D = 2048, full and causal. varlen: lengths from 1 to 8192 in 16384 tokens. window: 1024 keys
at S 16384, beside the time that its share of the FLOPs predicts. gqa: 32 heads of Q and 8 of K and V, beside 32 of
both. calls: what an eager call costs the host. A result is judged against the formula in float32 on two heads. Exit
status 0 if each bound holds, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import attention_peers, harness
from bench.attention_peers import Call
from bench.results import Bound, Environment, Report, geometric_mean
from tkq import reference
from tkq.testing.timing import Effort, relative_error

TOKENS, WIDTH = 16384, 2048  # B * S and H * D
LENGTHS, DIMS = (1024, 2048, 4096, 8192, 16384), (64, 128, 256)
QUICK = (1024, 4096, 16384)
DENSE_BOUND, MEAN_BOUND, VARLEN_BOUND, WINDOW_SLACK, GQA_BOUND, CALL_US = 1.00, 1.06, 1.05, 1.15, 1.00, 14.0
OTHER_PROBLEMS = ("all keys", "32/32")  # candidates that compute something else, which ours is set beside
MIXED = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1)
MANY = tuple(32 + 97 * i % 449 for i in range(64))  # 64 sequences of 32 to 480 tokens


@dataclasses.dataclass(frozen=True)
class Job:
    """One case: what is called, its inputs, its work, what it is judged by, and candidates beside the peers."""

    section: str
    shape: str
    call: Call
    make_inputs: Callable[[int], tuple]
    flops: float
    bound: Bound | None
    error: Callable
    ours: dict = dataclasses.field(default_factory=dict)


def dense_error(call: Call):
    """The relative error of the first sequence's first and last head."""
    left, right = (-1 if n is None else n for n in call.window)

    def of(name, given, found):
        if name in OTHER_PROBLEMS:
            return None
        q, k, v = given[:3]
        group, worst = q.shape[2] // k.shape[2], 0.0
        for h in (0, q.shape[2] - 1):
            one = q[:1, :, [h]].float(), *(x[:1, :, [h // group]].float() for x in (k, v))
            worst = max(worst, relative_error(found[:1, :, [h]], reference.flash_attn(*one, call.causal, None, left,
                                                                                      right)[0]))
        return worst

    return of


def varlen_error(call: Call, lengths):
    """The relative error of the first and last head."""

    def of(_, given, found):
        q, k, v, cu = given
        heads = [0, q.shape[1] - 1]
        group = q.shape[1] // k.shape[1]
        one = q[:, heads].float(), *(x[:, [h // group for h in heads]].float() for x in (k, v))
        return relative_error(found[:, heads], reference.flash_attn_varlen(*one, cu, cu, causal=call.causal)[0])

    return of


# ---- the cases -----------------------------------------------------------------------------------


def dense(lengths, dims) -> Iterator[Job]:
    for dim in dims:
        for causal in (False, True):
            for s in lengths:
                b, h, call = TOKENS // s, WIDTH // dim, Call(causal)
                flops = 4 * b * h * dim * attention_peers.pairs(s, causal)
                yield Job("dense", f"B{b} S{s} H{h} D{dim} {'causal' if causal else 'full'}", call,
                          attention_peers.inputs(b, s, h, h, dim, dim), flops, Bound(("FA4", "cuDNN"), DENSE_BOUND),
                          dense_error(call))


def varlen(dims) -> Iterator[Job]:
    for dim in dims:
        for name, lengths in (("mixed 1..8192", MIXED), ("64 of 32..480", MANY), ("16 of 1024", (1024,) * 16)):
            for causal in (False, True):
                h, call = WIDTH // dim, Call(causal, max_seqlen=max(lengths))
                flops = 4 * h * dim * sum(attention_peers.pairs(n, causal) for n in lengths)
                yield Job("varlen", f"{name} H{h} D{dim} {'causal' if causal else 'full'}", call,
                          attention_peers.varlen_inputs(lengths, h, h, dim), flops, Bound(("FA4",), VARLEN_BOUND),
                          varlen_error(call, lengths))


def window(dims) -> Iterator[Job]:
    s = 16384
    for dim in dims:
        for left, right in ((1023, 0), (512, 511)):
            h, call = WIDTH // dim, Call(window=(left, right))
            pairs = attention_peers.pairs(s, False, left, right)
            full = attention_peers.ours(Call())
            yield Job("window", f"S{s} H{h} D{dim} window ({left}, {right})", call,
                      attention_peers.inputs(1, s, h, h, dim, dim), 4 * h * dim * pairs,
                      Bound(OTHER_PROBLEMS[:1], s * s / pairs / WINDOW_SLACK), dense_error(call),
                      {OTHER_PROBLEMS[0]: full})


def gqa(lengths) -> Iterator[Job]:
    """32 heads of 128 columns: K and V of 8, beside K and V of 32."""
    for causal in (False, True):
        for s in lengths:
            b, call = TOKENS // s, Call(causal)
            both = attention_peers.inputs(b, s, 32, 32, 128, 128)

            def make(i, both=both):
                q, k, v = both(i)
                return q, k[:, :, :8].contiguous(), v[:, :, :8].contiguous(), k, v

            alone = attention_peers.ours(call)
            yield Job("gqa", f"B{b} S{s} H32/8 D128 {'causal' if causal else 'full'}", call, make,
                      4 * b * 32 * 128 * attention_peers.pairs(s, causal), Bound(OTHER_PROBLEMS[1:], GQA_BOUND),
                      dense_error(call),
                      {OTHER_PROBLEMS[1]: lambda q, k, v, k_all, v_all, alone=alone: alone(q, k_all, v_all)})


def calls() -> dict[str, harness.Call]:
    """Eager calls on tiny tensors."""
    import tkq

    q, k, v = (torch.randn(1, 128, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 100, 128], device="cuda", dtype=torch.int32)
    flat = [x[0] for x in (q, k, v)]
    return {
        "x + x": harness.Call(lambda: q + q),
        "flash_attn": harness.Call(lambda: tkq.flash_attn(q, k, v, causal=True), at_most=CALL_US),
        "flash_attn, window and lse": harness.Call(
            lambda: tkq.flash_attn(q, k, v, window_size=(64, 0), return_lse=True), at_most=CALL_US),
        "flash_attn_varlen": harness.Call(
            lambda: tkq.flash_attn_varlen(*flat, cu, cu, 128, 128, causal=True), at_most=CALL_US),
    }


# ---- running -------------------------------------------------------------------------------------


def run(job: Job, names, effort, monitor):
    found, missing = attention_peers.find(job.call, names)
    question = harness.Question("attention_forward", job.section, job.shape, "TFLOP/s", job.flops, job.bound, missing)
    candidates = {"tkq": attention_peers.ours(job.call), **job.ours, **found}
    return harness.compare(question, candidates, job.make_inputs, effort, error=job.error, monitor=monitor)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.attention_forward", description=__doc__.split("\n")[0])
    p.add_argument("--sections", default="dense,varlen,window,gqa,calls")
    p.add_argument("--quick", action="store_true", help=f"lengths {QUICK} only, short turns")
    p.add_argument("--shapes", default="", help=f"lengths, of {LENGTHS}")
    p.add_argument("--dims", default="", help=f"of {DIMS}; without: all of them for dense, 128 for the others")
    p.add_argument("--match", default="", help="only cases whose shape contains this text")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--round-seconds", type=float, default=0.04)
    p.add_argument("--seconds", type=float, default=280, help="start no case after so long")
    p.add_argument("--without", default="", help="peers to leave out")
    p.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.attention_forward times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    lengths = tuple(map(int, args.shapes.split(","))) if args.shapes else QUICK if args.quick else LENGTHS
    dims = tuple(map(int, args.dims.split(","))) if args.dims else ()
    sections = args.sections.split(",")
    jobs = {"dense": lambda: dense(lengths, dims or DIMS), "varlen": lambda: varlen(dims or (128,)),
            "window": lambda: window(dims or (128,)), "gqa": lambda: gqa(lengths)}
    if unknown := sorted(set(sections) - {*jobs, "calls"}):
        p.error(f"--sections: unknown {unknown}; allowed {[*jobs, 'calls']}")
    seconds = 0.02 if args.quick else args.round_seconds
    effort = Effort(7 if args.quick else args.rounds, seconds, warmup_seconds=6 * seconds)
    names = [name for name in attention_peers.PEERS if name not in args.without.split(",")]
    monitor = harness.Monitor()
    report = Report(Environment.here(monitor.driver))
    deadline = time.monotonic() + args.seconds
    if "calls" in sections:
        report.costs += harness.cpu_times({f"CPU per eager call: {name}": call for name, call in calls().items()})
    for job in (job for s in sections if s in jobs for job in jobs[s]() if args.match in job.shape):
        if time.monotonic() > deadline:
            report.problems.append(f"{job.section} {job.shape}: not run, the time is up")
            continue
        try:
            case = run(job, names, effort, monitor)
        except Exception as problem:  # out of memory, say: the others can still run
            report.problems.append(f"{job.section} {job.shape}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        report.cases.append(case)
        report.save(args.out / "attention_forward.json")
        print("\n".join(harness.case_lines(case)), flush=True)
    return _verdict(report)


def _verdict(report) -> int:
    print("\n" + harness.summary(report.cases))
    print("\n".join(harness.cost_lines(report.costs)))
    best = [case.against_best()[1] for case in report.cases if case.op == "dense" and case.against_best()]
    if best:
        print(f"dense: geometric mean over {len(best)} shapes: {geometric_mean(best):.3f}, bound {MEAN_BOUND}")
    print("\n".join(f"PROBLEM {x}" for x in report.problems))
    wrong = [x for x in (*report.cases, *report.costs) if x.holds() is False]
    wrong += [case for case in report.cases if case.accurate() is False]
    return 1 if wrong or report.problems or (best and geometric_mean(best) < MEAN_BOUND) else 0


if __name__ == "__main__":
    sys.exit(main())
