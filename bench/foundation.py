"""The foundation's speed against its bounds: attention, norms and gemm beside their peers, and the cost of a call.

    python -m bench.foundation [--sections attention,norms,gemm,calls] [--seconds 280] [--out bench/results/h100]

Results go to OUT/foundation.json after every case; a table of all of them is printed last. Exit status 0 if every bound
that could be decided holds and every result is accurate, 1 if not or if something did not run, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import tkq
from bench import harness, peers
from bench.results import Bound, Cost, Environment, Report
from bench.shapes import NORM_SHAPES
from tkq import reference
from tkq.testing.timing import Effort, relative_error

BF16 = torch.bfloat16
TOKENS, WIDTH = 16384, 2048  # attention: B * S and H * D
LENGTHS = (1024, 4096, 16384)
ATTENTION_BOUNDS = {(128, False): (1.00, 1.00, 1.00), (128, True): (1.10, 1.04, 1.04)}
D64_BOUND, NORM_BOUND, GEMM_BOUND = 0.97, 0.99, 0.96
GEMM_SIZES = (4096, 8192)
CALL_BOUNDS_US = {"rmsnorm": 12.0, "flash_attn": 20.0}
FIRST_CALL_BOUND_US = 50_000.0
NORM_SAMPLE_ROWS = 256


@dataclass(frozen=True)
class Job:
    """One case to run: the question, our call, the peers to find and the inputs."""

    question: harness.Question
    ours: Callable
    peer_op: str
    peer_names: tuple[str, ...]
    make_inputs: Callable[[int], tuple]
    error: Callable[[str, tuple, object], float | None]
    peer_options: dict = dataclasses.field(default_factory=dict)


def _generator(seed: int) -> torch.Generator:
    """A generator of our own: a capture that fails may leave torch's default one unusable."""
    return torch.Generator("cuda").manual_seed(seed)


# ---- the cases ---------------------------------------------------------------------------------------------------


def attention_jobs() -> Iterator[Job]:
    for d in (128, 64):
        for causal in (False, True):
            for i, s in enumerate(LENGTHS):
                yield _attention_job(s, d, causal, ATTENTION_BOUNDS.get((d, causal), (D64_BOUND,) * 3)[i])


def _attention_job(s: int, d: int, causal: bool, at_least: float) -> Job:
    b, h = TOKENS // s, WIDTH // d
    flops = 4 * b * h * s * s * d * (0.5 if causal else 1)

    def inputs(i):
        g = _generator(i)
        return tuple(torch.randn(b, s, h, d, device="cuda", dtype=BF16, generator=g) for _ in range(3))

    def error(_, qkv, output):
        heads = (0, h - 1)
        pairs = [
            (output[:1, :, [x]], reference.flash_attn(*(t[:1, :, [x]].float() for t in qkv), causal)[0]) for x in heads
        ]
        return max(relative_error(o, wanted) for o, wanted in pairs)

    shape = f"B{b} S{s} H{h} D{d} {'causal' if causal else 'full'}"
    question = harness.Question("attention", "flash_attn", shape, "TFLOP/s", flops, Bound(("FA4", "cuDNN"), at_least))

    def ours(q, k, v):
        return tkq.flash_attn(q, k, v, causal=causal)

    return Job(question, ours, "attention", ("FA4", "cuDNN"), inputs, error, {"causal": causal})


def norm_jobs() -> Iterator[Job]:
    for m, n in NORM_SHAPES:
        yield _norm_job("rmsnorm", m, n)
        yield _norm_job("layernorm", m, n)
        yield _norm_job("layernorm", m, n, with_bias=True)


def _norm_job(op: str, m: int, n: int, with_bias: bool = False) -> Job:
    layer = op == "layernorm"

    def inputs(i):
        g = _generator(i)
        x = torch.randn(m, n, device="cuda", dtype=BF16, generator=g)
        vector = torch.float32 if layer else BF16  # QuACK's layernorm takes float32 vectors only, so everyone gets them
        weight = torch.randn(n, device="cuda", dtype=vector, generator=g)
        return x, weight, torch.randn(n, device="cuda", dtype=vector, generator=g) if with_bias else None

    def error(name, xwb, output):
        if name == "copy":
            return None
        x, weight, bias = xwb
        rows = slice(0, NORM_SAMPLE_ROWS), slice(m - NORM_SAMPLE_ROWS, m)
        oracle, eps = (reference.layernorm, peers.LAYER_EPS) if layer else (reference.rmsnorm, peers.RMS_EPS)
        return max(relative_error(output[r], oracle(x[r].float(), weight, bias, eps)) for r in rows)

    def ours(x, weight, bias):
        if layer:
            return tkq.layernorm(x, weight, bias, eps=peers.LAYER_EPS)
        return tkq.rmsnorm(x, weight, bias=bias, eps=peers.RMS_EPS)

    shape = f"M{m} N{n}{' with bias' if with_bias else ''}"
    question = harness.Question("norms", op, shape, "GB/s", 2 * m * n * 2, Bound(("QuACK",), NORM_BOUND))
    return Job(question, ours, op, ("QuACK", "torch.compile", "copy"), inputs, error)


def gemm_jobs() -> Iterator[Job]:
    for size in GEMM_SIZES:
        for transposed in (False, True):
            yield _gemm_job(size, transposed)


def _gemm_job(size: int, transposed: bool) -> Job:
    def inputs(i):
        g = _generator(i)
        a, b = (torch.randn(size, size, device="cuda", dtype=BF16, generator=g) for _ in range(2))
        return a, b.t() if transposed else b

    def error(_, ab, output):
        rows = slice(0, 256)
        return relative_error(output[rows], ab[0][rows].float() @ ab[1].float())

    shape = f"{size}^3 a @ b{'.t()' if transposed else ''}"
    question = harness.Question("gemm", "gemm", shape, "TFLOP/s", 2 * size**3, Bound(("cuBLAS",), GEMM_BOUND))
    return Job(question, lambda a, b: tkq.gemm(a, b), "gemm", ("cuBLAS",), inputs, error)


JOBS = {"attention": attention_jobs, "norms": norm_jobs, "gemm": gemm_jobs}


# ---- the cost of a call and of starting --------------------------------------------------------------------------


def call_costs() -> dict[str, Callable[[], list[Cost]]]:
    """By name, what measures the host time of an eager call on tiny tensors, for tkq and its peers."""
    x = torch.randn(8, 256, device="cuda", dtype=BF16)
    w = torch.randn(256, device="cuda", dtype=BF16)
    q, k, v = (torch.randn(1, 128, 2, 128, device="cuda", dtype=BF16) for _ in range(3))
    calls = {
        "x + x": lambda: x + x,
        "rmsnorm tkq": lambda: tkq.rmsnorm(x, w),
        "flash_attn tkq": lambda: tkq.flash_attn(q, k, v),
    }
    for name, call in peers.find("rmsnorm", ("torch", "QuACK"))[0].items():
        calls[f"rmsnorm {name}"] = lambda call=call: call(x, w, None)
    for name, call in peers.find("attention", ("torch", "FA4"), causal=False)[0].items():
        calls[f"flash_attn {name}"] = lambda call=call: call(q, k, v)

    def price(name, call):
        bound = CALL_BOUNDS_US.get(name.removesuffix(" tkq")) if name.endswith(" tkq") else None
        return lambda: [harness.cpu_time_per_call(f"CPU per eager call: {name}", call, at_most=bound)]

    return {name: price(name, call) for name, call in calls.items()}


FIRST_CALL = """
import json, sys, time
import torch
begin = time.perf_counter()
import tkq
op = getattr(tkq, sys.argv[1])
imported = time.perf_counter() - begin
shape = (8, 256) if sys.argv[1] == "rmsnorm" else (1, 128, 2, 128)
tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
arguments = (tensors[0], torch.ones(256, device="cuda", dtype=torch.bfloat16)) if sys.argv[1] == "rmsnorm" else tensors
(tensors[0] + tensors[1]).sum().item()
begin = time.perf_counter()
op(*arguments)
torch.cuda.synchronize()
first = time.perf_counter() - begin
print(json.dumps({"import_us": imported * 1e6, "first_us": first * 1e6, "cutlass": "cutlass" in sys.modules}))
"""


def first_call_costs(op: str, processes: int = 3) -> list[Cost]:
    """The first call of a fresh process whose kernel is in the disk cache (`call_costs` put it there)."""
    root = Path(__file__).resolve().parent.parent
    seen = []
    for _ in range(processes):
        command = [sys.executable, "-c", FIRST_CALL, op]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=root)
        if run.returncode:
            raise RuntimeError(f"a new process failed: {run.stderr.strip()[-300:]}")
        seen.append(json.loads(run.stdout.strip().splitlines()[-1]))
    how = "cutlass was imported" if any(s["cutlass"] for s in seen) else "without importing cutlass"
    return [
        _cost(f"first call in a second process: {op}", [s["first_us"] for s in seen], FIRST_CALL_BOUND_US, how),
        _cost(f"import tkq after torch: {op}", [s["import_us"] for s in seen], None, ""),
    ]


def _cost(name, values, at_most, note) -> Cost:
    ordered = sorted(values)
    return Cost(name, ordered[len(ordered) // 2], ordered[0], ordered[-1], len(ordered), at_most, note)


# ---- running -----------------------------------------------------------------------------------------------------


class Run:
    """A report that grows, within a time budget."""

    def __init__(self, path: Path, seconds: float, effort: Effort, without: tuple[str, ...] = ()):
        self._path, self._effort, self._without = path, effort, without
        self._deadline = time.monotonic() + seconds
        self._monitor = harness.Monitor()
        self.report = Report(Environment.here(self._monitor.driver))

    def effort(self, cases_left: int, candidates: int) -> Effort:
        """The effort asked for, or shorter turns if the time left would not do: half of a case is making inputs."""
        share = (self._deadline - time.monotonic()) / cases_left
        laps = self._effort.rounds + 3
        turn = min(self._effort.round_seconds, max(0.01, 0.5 * share / laps / candidates))
        return dataclasses.replace(self._effort, round_seconds=turn, warmup_seconds=3 * candidates * turn)

    def case(self, job: Job, cases_left: int) -> None:
        q = job.question
        if time.monotonic() > self._deadline:
            self.problem(f"{q.op} {q.shape}: not run, the time is up")
            return
        names = tuple(name for name in job.peer_names if name not in self._without)
        found, missing = peers.find(job.peer_op, names, **job.peer_options)
        left_out = {name: "left out (--without)" for name in job.peer_names if name in self._without}
        question = dataclasses.replace(q, missing={**missing, **left_out})
        candidates = {"tkq": job.ours, **found}
        effort = self.effort(cases_left, len(candidates))
        try:
            case = harness.compare(
                question, candidates, job.make_inputs, effort, error=job.error, monitor=self._monitor
            )
        except Exception as problem:  # out of memory for the inputs, say: the other cases can still run
            self.problem(f"{q.op} {q.shape}: {type(problem).__name__}: {str(problem)[:300]}")
            return
        self.report.cases.append(case)
        self.report.save(self._path)
        print("\n".join(harness.case_lines(case)), flush=True)

    def costs(self, name: str, measure: Callable[[], list[Cost]]) -> None:
        try:
            costs = measure()
        except Exception as problem:
            self.problem(f"cost of {name}: {type(problem).__name__}: {str(problem)[:400]}")
            return
        self.report.costs += costs
        self.report.save(self._path)
        for cost in costs:
            print(f"{cost.name:58s} {cost.median_us:10.1f} us ({cost.least_us:.1f} to {cost.most_us:.1f})", flush=True)

    def problem(self, text: str) -> None:
        print(f"PROBLEM {text}", flush=True)
        self.report.problems.append(text)
        self.report.save(self._path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.foundation", description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default="calls,gemm,attention,norms", help="which to run, in this order")
    parser.add_argument("--seconds", type=float, default=280, help="start no case after so long; costs always run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--round-seconds", type=float, default=0.04, help="one candidate's turn; 2 shows sustained speed"
    )
    parser.add_argument("--no-graphs", action="store_true", help="time eager calls behind a backlog, no CUDA graphs")
    parser.add_argument("--without", default="", help="peers to leave out: torch.compile compiles for minutes")
    parser.add_argument("--match", default="", help="only cases whose operation and shape contain this text")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h100"))
    options = parser.parse_args(argv)
    sections = options.sections.split(",")
    if unknown := sorted(set(sections) - {*JOBS, "calls"}):
        parser.error(f"--sections: unknown {unknown}; allowed {[*JOBS, 'calls']}")
    if not torch.cuda.is_available():
        print("bench.foundation times kernels: it needs a GPU, and PyTorch finds none here.")
        return 2
    effort = Effort(options.rounds, options.round_seconds, graphs=not options.no_graphs)
    without = tuple(filter(None, options.without.split(",")))
    run = Run(options.out / "foundation.json", options.seconds, effort, without)
    e = run.report.environment
    print(f"{e.device}, driver {e.driver}, {', '.join(f'{k} {v}' for k, v in e.versions.items() if v)}", flush=True)
    jobs = [
        j for s in sections if s in JOBS for j in JOBS[s]() if options.match in f"{j.question.op} {j.question.shape}"
    ]
    left = len(jobs)
    for section in sections:
        if section == "calls":
            for name, measure in call_costs().items():
                run.costs(name, measure)
            for op in CALL_BOUNDS_US:
                run.costs(f"starting: {op}", lambda op=op: first_call_costs(op))
        for job in [j for j in jobs if j.question.section == section]:
            run.case(job, left)
            left -= 1
    report = run.report
    print("\n" + harness.summary(report.cases, report.costs))
    print("\n".join(f"PROBLEM {p}" for p in report.problems))
    missed = [x for x in (*report.cases, *report.costs) if x.holds() is False]
    wrong = [case for case in report.cases if case.accurate() is False]
    return 1 if missed or wrong or report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
