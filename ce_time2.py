"""Scratch: cross entropy's forward of short rows: trial variants, the plan's and QuACK's, timed in turns.

    TKQ_CACHE_DIR=/tmp/cache-ce python3 ce_time.py --precompile    compile only; needs no GPU
    OUT=folder TKQ_CACHE_DIR=... python3 ce_time.py                time; writes OUT/ce2.json

First losses alone (as tkq.cross_entropy without gradients, and bench/cross_entropy.py), then with what a backward needs
(QuACK: return_lse), then, as an extra, loss and gradient at once ("fused": the same late load of the target).
"""
import argparse
import json
import os
import statistics
import time
from pathlib import Path

from bench import tuning
from ce_trial import Trial as T
from tkq.losses import plan
from tkq.losses.launch import recipe as shipped
from tkq.losses.spec import CrossEntropySpec
from tkq.runtime import Recipe

M, SIZES, FUSED = 32768, (1024, 2048, 4096, 8192, 16384), ()

SHARED = dict(load="shared", pick=True)
SHAPES = {1024: (32, 128), 2048: (64, 128), 4096: (128, 128), 8192: (256, 256), 16384: (512, 512)}
VARIANTS = {N: {
    "early": (T(*shape), 0), "late, past L1": (T(*shape, early=False, past=True), 0),
    "early, past L1": (T(*shape, past=True), 0), "early, past L1, pdl": (T(*shape, past=True, pdl=2), 0),
    "lean, past L1": (T(*shape, lean=True, past=True), 0),
    "lean, past L1, pdl": (T(*shape, lean=True, past=True, pdl=2), 0)} for N, shape in SHAPES.items()}
VARIANTS[1024] |= {"lean 64/128, past L1": (T(64, 128, lean=True, past=True), 0), "early 64/128, past L1": (T(64, 128, past=True), 0)}
VARIANTS[2048] |= {"lean 128/128, past L1": (T(128, 128, lean=True, past=True), 0), "lean 32/128, past L1": (T(32, 128, lean=True, past=True), 0)}
KEPT = {N: ("early, past L1", "lean, past L1", "early, past L1, pdl") for N in SHAPES}


def spec(N, keep, kind="forward"):
    return CrossEntropySpec(kind, N, "bf16", vector=8, keep=keep)


def recipe(N, keep, name, kind="forward"):
    s = spec(N, keep, kind)
    if name == "planned":
        return shipped(s)
    if kind == "fused" or name == "planned, early":
        return Recipe("ce_trial:early", (s, plan.plan(s)))
    return Recipe("ce_trial:build", (s, VARIANTS[N][name][0]))


def names(N, keep, kind="forward"):
    if kind == "fused":
        return "planned", "planned, early"
    return "planned", *(KEPT[N] if keep else VARIANTS[N])


def cases():
    yield from (("forward", N, False) for N in SIZES)
    yield from (("forward", N, True) for N in SIZES[:2])
    yield from (("fused", N, True) for N in FUSED)


def recipes():
    return [recipe(N, keep, name, kind) for kind, N, keep in cases() for name in names(N, keep, kind)]


# ---- on the GPU ------------------------------------------------------------------------------------------------------


def candidate(kind, N, keep, name):
    import torch

    from tkq import runtime

    run = runtime.function(recipe(N, keep, name, kind))

    def call(x, t):
        rows = x.shape[0]
        loss = torch.empty(rows, dtype=torch.float32, device=x.device)
        saved = torch.empty(2 * rows + 2, dtype=torch.float32, device=x.device) if keep else None
        gradient = torch.empty_like(x) if kind == "fused" else None
        run(x, t, None, loss, saved, None, gradient, -100, 0.0, 0.0, 0.0)
        return loss if not keep else (loss, gradient if kind == "fused" else saved)

    return call


def quack(kind, keep):
    from quack.cross_entropy import cross_entropy_fwd

    if kind == "fused":
        return lambda x, t: cross_entropy_fwd(x, t, return_dx=True)
    return (lambda x, t: cross_entropy_fwd(x, t, return_lse=True)) if keep else lambda x, t: cross_entropy_fwd(x, t)


def odd_rows(N):
    """517 rows with what is rare: ignored and unknown targets, infinities, large logits, target at either end."""
    import torch

    from bench.row_bench import randn, targets

    x, t = randn(77, 517, N), targets(77, 517, N)
    x[5:40] *= 1000
    x[40:60] += 3000
    x[60, :] = -torch.inf
    x[61, 3:] = -torch.inf
    x[62, 7] = torch.inf
    x[63, 9] = torch.nan
    x[64, 1:] = -torch.inf
    t[70:80], t[80], t[81], t[82], t[83] = -100, N, -1, 0, N - 1
    t[61], t[64] = 1, 0
    return x, t


def wrong_at(N, call, plain):
    """How far a variant is from the shipped kernel on rare rows, beside max(1, |loss|); NaN where they differ in kind."""
    import torch

    x, t = odd_rows(N)
    a, b = (f(x, t) for f in (call, plain))
    a, b = (y[0] if isinstance(y, tuple) else y for y in (a, b))
    same = (a.isnan() == b.isnan()) & (a.isinf() == b.isinf())
    if not bool(same.all()):
        return f"differs in kind at {torch.nonzero(~same).flatten().tolist()[:8]}"
    ok = b.isfinite()
    return ((a - b)[ok].abs() / b[ok].abs().clamp(min=1)).max().item()


def measure(kind, N, keep, effort):
    import torch
    import torch.nn.functional as F

    import tkq
    from bench.row_bench import randn, targets
    from tkq.testing import timing

    calls, notes = {}, {}

    def add(name, make):
        try:
            calls[name] = make()
        except Exception as problem:
            notes[name] = f"{type(problem).__name__}: {str(problem)[:200]}"

    add("QuACK", lambda: quack(kind, keep))
    if not keep:
        add("tkq", lambda: lambda x, t: tkq.cross_entropy(x, t, reduction="none"))
    for name in names(N, keep, kind):
        add(name, lambda name=name: candidate(kind, N, keep, name))
    rare = {}
    for name in calls:
        if name not in ("QuACK", "tkq", "planned") and "planned" in calls:
            try:
                rare[name] = wrong_at(N, calls[name], calls["planned"])
                torch.cuda.synchronize()
            except Exception as problem:
                notes[name] = f"rare rows: {type(problem).__name__}: {str(problem)[:200]}"

    def error(name, inputs, output):
        x, t = inputs
        found = output[0] if isinstance(output, tuple) else output
        worst = (found - F.cross_entropy(x.float(), t, reduction="none")).abs().max().item()
        if isinstance(output, tuple) and kind == "forward":
            lse = torch.logsumexp(x.float(), -1)
            kept = output[1] if name == "QuACK" else output[1][:2 * len(x)].view(-1, 2).sum(1)
            worst = max(worst, (kept - lse).abs().max().item())
        if kind == "fused":
            wanted = torch.softmax(x[:256].float(), -1)
            wanted[torch.arange(256, device="cuda"), t[:256]] -= 1
            worst = max(worst, (output[1][:256].float() - wanted).abs().max().item() / 256)  # bf16 has 2^-9 of 1
        return worst

    done = timing.compare(calls, lambda i: (randn(i, M, N), targets(i, M, N)), effort, error=error)
    peer = done["QuACK"] if "QuACK" in calls and done["QuACK"].ok else None
    moved = M * N * (4 if kind == "fused" else 2)
    print(f"\n{kind} M {M} N {N} {'with what a backward needs' if keep else 'losses alone'}")
    rows = []
    for t in sorted(done.timings, key=lambda t: t.median_ms if t.ok else 9):
        if not t.ok:
            print(f"  {t.name:24s} FAILED {t.note}")
            continue
        us = t.median_ms * 1e3
        of = timing.ratio(t, peer) if peer else float("nan")
        guess = VARIANTS[N][t.name][1] if kind == "forward" and not keep and t.name in VARIANTS.get(N, {}) else None
        low, high = t.quartiles_ms
        bad = "" if t.error is not None and t.error < 1e-4 else "  WRONG"
        print(f"  {t.name:24s} {us:7.2f} us ({low * 1e3:.2f}..{high * 1e3:.2f}) {moved / us * 1e-3:6.0f} GB/s "
              f"{of:.4f} of QuACK  error {t.error:.1e}{bad}  rare {rare.get(t.name, '-')}"
              f"{f'  predicted {guess}' if guess else ''}  [{t.mode}]")
        rows.append(dict(name=t.name, us=us, ratio=of, error=t.error, rare=rare.get(t.name), predicted=guess,
                         times_ms=t.times_ms, mode=t.mode, launches=t.launches))
    for name, note in notes.items():
        print(f"  {name:24s} not timed: {note}")
    failed = {t.name: t.note for t in done.timings if not t.ok}
    return dict(kind=kind, M=M, N=N, keep=keep, rows=rows, failed={**notes, **failed})


def main():
    parser = argparse.ArgumentParser()
    tuning.add_compiling(parser)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.012, help="of a turn")
    options = parser.parse_args()
    tuning.precompile(recipes(), options.processes)
    if options.precompile:
        return
    import torch

    from tkq.testing.timing import Effort

    effort, begin, report = Effort(options.rounds, options.seconds, 0.05), time.perf_counter(), []
    out = Path(os.environ.get("OUT", "."))
    for kind, N, keep in cases():
        try:
            report.append(measure(kind, N, keep, effort))
        except Exception as problem:
            print(f"{kind} {N} {keep}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        seconds = time.perf_counter() - begin
        out.joinpath("ce2.json").write_text(json.dumps(
            dict(device=torch.cuda.get_device_name(), seconds=seconds, cases=report), indent=1))
        print(f"  {seconds:.1f} s so far", flush=True)
    best = {N: min((r for c in report if c["N"] == N and c["kind"] == "forward" and not c["keep"] for r in c["rows"]),
                   key=lambda r: statistics.median(r["times_ms"]), default=None) for N in SIZES}
    print({N: b and (b["name"], round(b["ratio"], 4)) for N, b in best.items()})


if __name__ == "__main__":
    main()
