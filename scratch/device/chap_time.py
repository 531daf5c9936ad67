"""The chapter's row kernel (examples/write_a_row_kernel.py): other plans beside the planned one and torch.add."""
import json, os, sys
from dataclasses import replace
sys.path.insert(0, "examples")
import torch
import write_a_row_kernel as w
from bench.tuning import precompile
from tkq.rows.plan import plan
K = w.SiluNormBackward
def plans(N):
    dy = torch.empty(1, N, dtype=torch.bfloat16); v = torch.empty(N, dtype=torch.bfloat16); r = torch.empty(1)
    spec = K.recipe(dy=dy, x=dy, weight=v, rstd=r, dx=dy, dweight=v).args[0]
    p = plan(spec.shape); found = {"planned": p}
    for name, change in {"no hints": dict(evict_first=False, streaming=False), "evict": dict(evict_first=True, streaming=False),
                         "stream": dict(evict_first=False, streaming=True), "both": dict(evict_first=True, streaming=True)}.items():
        q = replace(p, **change)
        if q not in found.values(): found[name] = q
    for name, choice in {"stages 3": dict(stages=3), "stages 4": dict(stages=4), "warps 4": dict(warps=4), "warps 16": dict(warps=16),
                         "two blocks of 8": dict(per_thread=16, warps=8, stages=3, resident=2), "two blocks of 4": dict(per_thread=32, warps=4, stages=3, resident=2)}.items():
        try: q = plan(spec.shape, **choice)
        except ValueError: continue
        if q not in found.values(): found[name] = q
    return spec, found
def main():
    from tkq.rows.launch import recipe_of
    cases = {N: plans(N) for N in (1024, 4096, 16384)}
    broken = precompile([recipe_of(s, p) for s, f in cases.values() for p in f.values()])
    if "--precompile" in sys.argv: return print("broken", broken)
    from tkq.testing import timing
    out = {}
    for N, (_, found) in cases.items():
        M = (1 << 28) // N
        def call(p):
            def f(dy, x, weight, rstd):
                dx, dw = torch.empty_like(x), torch.empty_like(weight)
                K.launch(plan=p, dy=dy, x=x, weight=weight, rstd=rstd, dx=dx, dweight=dw)
                return dx
            return f
        calls = {"torch.add": lambda dy, x, weight, rstd: torch.add(dy, x), **{n: call(p) for n, p in found.items()}}
        done = timing.compare(calls, lambda i: w.inputs(M, N, "cuda", i), timing.Effort(9, 0.02, 0.05))
        print(N)
        for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms):
            print(f"  {t.name:18s} {t.median_ms * 1e3:8.1f} us {timing.ratio(t, done['torch.add']):.4f} of add", flush=True)
            out[f"{N} {t.name}"] = t.times_ms
        for t in done.timings:
            if not t.ok: print("  ", t.name, t.note[:200])
        torch.cuda.empty_cache()
    json.dump(out, open(os.path.join(os.environ.get("OUT", "."), "chap.json"), "w"))
if __name__ == "__main__":
    main()
