"""`python -m tkq demo`: what tkq does, checked and measured, in one table.

With a Hopper GPU the operations run on inputs of real size beside PyTorch eager and `torch.compile`, each checked
against a float32 reference. Without one the same kernels are cross-compiled for sm_90a and read, and their
operations run through the CPU path, checked in float64. The exit status is 0 only if all checks pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import tkq
from tkq import reference
from tkq.attention.forward.plan import plan as attention_plan
from tkq.attention.forward.spec import AttentionSpec
from tkq.gemm.dense.plan import recipe as gemm_recipe
from tkq.gemm.dense.spec import GemmSpec
from tkq.norms.ops import recipe as norm_recipe
from tkq.norms.spec import NormSpec
from tkq.runtime import Recipe
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.requirements import why_no_compiling
from tkq.testing import sass, timing
from tkq.testing.console import Progress, table
from tkq.testing.timing import relative_error
from tkq.warmup import catalog

BF16 = torch.bfloat16
RMS_EPS, LAYER_EPS = 1e-6, 1e-5
ULP = 2.0**-8  # of bfloat16, relative: what an error may add to twice that of PyTorch


@dataclass(frozen=True)
class Example:
    """An operation on one input: ours and PyTorch's callable of the same inputs, the work of a call, what is right.

    wanted: the oracle, from inputs in float32.
    """

    op: str
    shape: str
    unit: str
    work: float
    ours: Callable
    eager: Callable
    inputs: Callable[[int, str], tuple]
    wanted: Callable


def _sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _attention_by_head(q, k, v, causal):
    """The oracle one head at a time: all score matrices together would fill the memory."""
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            at = slice(b, b + 1), slice(None), slice(h, h + 1)
            out[at] = reference.flash_attn(q[at], k[at], v[at], causal)[0]
    return out


def _normal(*sizes) -> Callable[[int, str], tuple]:
    """Makes the inputs for a seed and a device: normally distributed tensors of these sizes."""

    def inputs(seed, device):
        g = torch.Generator(device).manual_seed(seed)
        return tuple(torch.randn(*size, device=device, dtype=BF16, generator=g) for size in sizes)

    return inputs


def _attention(b, s, h, d, causal) -> Example:
    return Example(
        "flash_attn",
        f"B{b} S{s} H{h} D{d} {'causal' if causal else 'full'}",
        "TFLOP/s",
        4 * b * h * s * s * d * (0.5 if causal else 1),
        lambda q, k, v: tkq.flash_attn(q, k, v, causal=causal),
        lambda q, k, v: _sdpa(q, k, v, causal),
        _normal(*[(b, s, h, d)] * 3),
        lambda q, k, v: _attention_by_head(q, k, v, causal),
    )


def _rmsnorm(m, n) -> Example:
    return Example(
        "rmsnorm",
        f"M{m} N{n}",
        "GB/s",
        2 * m * n * 2,
        lambda x, w: tkq.rmsnorm(x, w, eps=RMS_EPS),
        lambda x, w: F.rms_norm(x, (n,), w, RMS_EPS),
        _normal((m, n), (n,)),
        lambda x, w: reference.rmsnorm(x, w, eps=RMS_EPS),
    )


def _layernorm(m, n) -> Example:
    return Example(
        "layernorm",
        f"M{m} N{n}",
        "GB/s",
        2 * m * n * 2,
        lambda x, w, b: tkq.layernorm(x, w, b, eps=LAYER_EPS),
        lambda x, w, b: F.layer_norm(x, (n,), w, b, LAYER_EPS),
        _normal((m, n), (n,), (n,)),
        lambda x, w, b: reference.layernorm(x, w, b, LAYER_EPS),
    )


def _gemm(m, n, k) -> Example:
    work, inputs = 2 * m * n * k, _normal((m, k), (k, n))
    return Example(
        "gemm", f"M{m} N{n} K{k}", "TFLOP/s", work, lambda a, b: tkq.gemm(a, b), torch.matmul, inputs, torch.matmul
    )


def examples(large: bool) -> list[Example]:
    """The demo's operations, on real sizes or on sizes for a CPU."""
    b, s, h = (4, 4096, 16) if large else (1, 192, 2)
    m, n = (32768, 4096) if large else (64, 4096)
    size = 4096 if large else 256
    return [
        _attention(b, s, h, 128, True),
        _attention(b, s, h, 128, False),
        _rmsnorm(m, n),
        _layernorm(m, n),
        _gemm(size, size, size),
    ]


@dataclass(frozen=True)
class Errors:
    """Relative errors of an output and of its worst row, of all columns of the last dimension: ours and PyTorch's."""

    ours: float
    eager: float
    our_row: float
    eager_row: float

    @property
    def ok(self) -> bool:
        return passes(self.ours, self.eager) and passes(self.our_row, self.eager_row)

    def __str__(self):
        return (f"error {self.ours:.1e}, PyTorch in bfloat16 has {self.eager:.1e}; worst row {self.our_row:.1e}, "
                f"{self.eager_row:.1e}")


def worst_row(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest ||out - wanted|| / ||wanted|| of a row. NaN where there is one."""
    return ((out.to(wanted.dtype) - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()


def passes(error: float, eager_error: float) -> bool:
    """The rule for an error: at most twice that of PyTorch at the same precision and half a unit in the last place."""
    return error <= 2 * eager_error + ULP / 2


# ---- with a GPU --------------------------------------------------------------------------------------------------

HEAD = ("op (bf16)", "shape", "error", "eager's", "check", "ms", "rate", "vs eager", "vs compile")


def run_on_gpu() -> bool:
    """Run, check, time and print; True if all is right."""
    todo = examples(large=True)
    progress = Progress(2 * len(todo))
    rows, notes, wrong, good = [], [], [], True
    for example in todo:
        try:
            progress.step(f"{example.op} {example.shape}: compiling, or loading from the cache; checking")
            errors = _errors(example, "cuda")
            ok = errors.ok
            if not ok:
                wrong.append(f"{example.op} {example.shape}: {errors}")
            progress.step(f"{example.op} {example.shape}: timing beside eager and torch.compile")
            cells = [f"{errors.ours:.1e}", f"{errors.eager:.1e}", "ok" if ok else "WRONG", *_times(example, notes)]
        except Exception as problem:  # one broken operation must not hide the others
            ok, cells = False, [f"FAILED {type(problem).__name__}: {str(problem)[:80]}", *[""] * 6]
        rows.append((example.op, example.shape, *cells))
        good &= ok
    progress.end()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, tkq {tkq.__version__}\n")
    print(table(HEAD, rows))
    print("\nerror: ||out - ref|| / ||ref||, ref in float32; at most twice eager's + half an ulp passes, of the whole "
          "and of the worst row.")
    print("vs: the other's time / ours, the median of interleaved rounds; above 1 tkq is faster.")
    for text in wrong:
        print(f"PROBLEM {text}")
    for note in notes:
        print(f"n/a: {note}")
    return good


def _errors(example: Example, device: str) -> Errors:
    """Our relative errors and PyTorch's, against our oracle in float32 on a GPU, against PyTorch in float64 on a CPU.

    The CPU path of an operation is the oracle, so there it cannot be the judge."""
    with torch.no_grad():
        inputs = example.inputs(0, device)
        oracle, wide = (example.wanted, torch.float32) if device == "cuda" else (example.eager, torch.float64)
        wanted = oracle(*(x.to(wide) for x in inputs))
        eager = example.eager(*inputs)
        theirs = relative_error(eager, wanted), worst_row(eager, wanted)
        # The block of memory that our output will get holds NaN now: what a kernel leaves unwritten shows.
        eager.fill_(float("nan"))
        del eager
        out = example.ours(*inputs)
        return Errors(relative_error(out, wanted), theirs[0], worst_row(out, wanted), theirs[1])


def _times(example: Example, notes: list[str]) -> list[str]:
    """The measured cells of the table: milliseconds, rate and ratios. Why a peer has none goes to the notes."""
    torch._dynamo.reset()
    compiled = torch.compile(example.eager, dynamic=False)
    candidates = {"tkq": example.ours, "eager": example.eager, "compile": compiled}
    effort = timing.Effort(rounds=7, round_seconds=0.03)
    result = timing.compare(candidates, lambda i: example.inputs(i, "cuda"), effort)
    ours = result["tkq"]
    if not ours.ok:
        raise RuntimeError(ours.note)
    per_ms = {"TFLOP/s": 1e9, "GB/s": 1e6}[example.unit]
    ratios = []
    for peer in ("eager", "compile"):
        ratios.append(f"{timing.ratio(ours, result[peer]):.2f}x" if result[peer].ok else "n/a")
        if not result[peer].ok:
            notes.append(f"{example.op} {example.shape}: {peer}: {result[peer].note}")
    return [f"{ours.median_ms:.3f}", f"{example.work / ours.median_ms / per_ms:.0f} {example.unit}", *ratios]


# ---- without a GPU -----------------------------------------------------------------------------------------------

H100_PROCESSORS = 132


def kernels() -> dict[str, Recipe]:
    """The kernels that the examples take on an H100."""
    found = {}
    for causal in (True, False):
        attention = AttentionSpec("bf16", 128, causal)
        recipe = Recipe("tkq.attention.forward.kernel:AttentionForward", (attention, attention_plan(attention)))
        found[f"flash_attn {'causal' if causal else 'full'}"] = recipe
    found["rmsnorm"] = norm_recipe(NormSpec("rmsnorm", 4096, "bf16", "bf16", vector=8))
    found["layernorm"] = norm_recipe(NormSpec("layernorm", 4096, "bf16", "bf16", "bf16", vector=8))
    found["gemm"] = gemm_recipe(GemmSpec(), 4096, 4096, 4096, H100_PROCESSORS)
    return found


def read_and_run_on_cpu() -> bool:
    """Compile for sm_90a and read the code, run the CPU paths, print; True if all is right."""
    missing = why_no_compiling()
    todo, small = {} if missing else kernels(), examples(large=False)
    progress = Progress(len(todo) + len(small))
    expected = {kernel.recipe: kernel.expectation for kernel in catalog.shipped()}
    rows, problems = [], [f"no kernel was compiled: {missing}"] if missing else []
    for name, recipe in todo.items():
        progress.step(f"{name}: compiling for sm_90a, or loading from the cache")
        try:
            found = sass.report(recipe, instructions=sass.missing() is None)
            wrong = sass.expect_all(found, expected.get(recipe, Expectation()))
            wrong += [] if recipe in expected else ["not in the catalog of shipped kernels"]
            rows += [_code_row(name, kernel, wrong) for kernel in found]
        except Exception as problem:  # one broken kernel must not hide the others
            wrong = [f"{type(problem).__name__}: {str(problem)[:200]}"]
            rows.append((name, "FAILED", *[""] * 6))
        problems += [f"{name}: {text}" for text in wrong]
    results = []
    for example in small:
        progress.step(f"{example.op} {example.shape}: running on the CPU")
        row, wrong = _cpu_row(example)
        results.append(row)
        problems += wrong
    progress.end()
    print("Machine code for sm_90a (shared memory in bytes of a block):\n")
    print(
        table(
            ("kernel (bf16)", "check", "registers", "shared memory", "spills", "tensor core", "TMA", "instructions"),
            rows,
        )
    )
    print("\nThe CPU path of the same operations, against PyTorch in float64 (||out - ref|| / ||ref||):\n")
    print(table(("op (bf16)", "shape", "error", "eager's", "check"), results))
    for text in problems:
        print(f"\nPROBLEM {text}")
    if sass.missing():
        print(f"\nnote: {sass.missing()}")
    print("\nNothing was timed: no kernel ran, because there is no Hopper GPU here.")
    return not problems


def _code_row(name: str, kernel: sass.KernelReport, wrong: list[str]) -> tuple[str, ...]:
    smem = "set by call" if kernel.dynamic_smem is None else str(kernel.smem)
    numbers = [kernel.registers, smem]
    if kernel.opcodes is None:
        numbers += ["n/a"] * 4
    else:
        numbers += [kernel.spill_loads + kernel.spill_stores, kernel.tensor, kernel.tma, kernel.total]
    return name, "WRONG" if wrong else "ok", *map(str, numbers)


def _cpu_row(example: Example) -> tuple[tuple[str, ...], list[str]]:
    """The row of an operation on the CPU and what is wrong with it."""
    named = f"{example.op} {example.shape} on the CPU"
    try:
        errors = _errors(example, "cpu")
    except Exception as problem:  # one broken operation must not hide the others
        return (example.op, example.shape, "", "", "FAILED"), [
            f"{named}: {type(problem).__name__}: {str(problem)[:200]}"
        ]
    row = (example.op, example.shape, f"{errors.ours:.1e}", f"{errors.eager:.1e}", "ok" if errors.ok else "WRONG")
    return row, [] if errors.ok else [f"{named}: {errors}"]


def _hopper() -> tuple[bool, str]:
    """Whether the current device is an sm_90 GPU, and what there is."""
    if not torch.cuda.is_available():
        return False, "PyTorch finds no GPU"
    capability = torch.cuda.get_device_capability()
    return capability == (
        9,
        0,
    ), f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if every check passed, else 1."""
    argparse.ArgumentParser(prog="python -m tkq demo", description=__doc__.split("\n")[0]).parse_args(argv)
    here, what = _hopper()
    if here:
        return 0 if run_on_gpu() else 1
    print(f"{what}, and the kernels need compute capability 9.0: they are compiled and read, not run.\n", flush=True)
    return 0 if read_and_run_on_cpu() else 1


if __name__ == "__main__":
    sys.exit(main())
