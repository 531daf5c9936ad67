"""Few rows in float8: ways beside torch, the plan; GB/s of B, us."""
import json, os, sys
from dataclasses import replace
import torch
from bench.tuning import precompile
from tkq.gemm import fp8_ops, fp8_plan
from tkq.gemm.fp8_narrow_config import NarrowFp8Config
from tkq.gemm.fp8_narrow_plan import fitted, plan, recipe
from tkq.gemm.fp8_spec import Fp8Spec

KINDS = ("tensor", "row", "block")
PROBLEMS = ((1, 8192, 8192), (16, 8192, 8192), (64, 8192, 8192), (128, 8192, 8192), (16, 1024, 8192), (128, 1024, 8192), (64, 4096, 4096), (128, 256, 16384),
            (16, 28672, 8192))


def spec_of(kind):
    return Fp8Spec(scales=kind, promote=kind == "block")


def ways(kind, M, N, K):
    spec = spec_of(kind)
    best = plan(spec, M, N, K, 132)
    found = {"planned": fp8_plan.plan(spec, M, N, K, 132), "narrow": best, "narrow, no pdl": replace(best, pdl=False)}
    for rows in (64, 128):
        for split in (1, 2, 4, 8):
            for places in (2, 1):
                try:
                    config = fitted(NarrowFp8Config(best.m, rows, split, pdl=True), spec, places)
                except (ValueError, ArithmeticError):
                    continue
                if config not in found.values() and (split == 1 or K // 128 // split >= 2):
                    found[f"{rows} / {split}" + ", alone" * (places == 1)] = config
    return found


def recipes():
    out = []
    for kind in KINDS:
        for problem in PROBLEMS:
            for c in ways(kind, *problem).values():
                out.append(fp8_plan.launch(spec_of(kind), *problem, 132, c)[0])
    return list(dict.fromkeys(out))


def main():
    broken = precompile(recipes())
    if broken:
        sys.exit(f"{len(broken)} do not compile")
    if "--precompile" in sys.argv:
        return
    from bench import fp8_peers
    from tkq.testing import timing
    out = {}
    for kind in KINDS:
        for M, N, K in PROBLEMS:
            make = lambda i: fp8_peers.both_orders(kind, fp8_peers.operands(M, N, K, kind, i))
            def call(config):
                def run(a, b, sa, sb, *_):
                    c = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
                    fp8_ops.run(spec_of(kind), a, b, sa, sb, c, config)
                    return c
                return run
            calls = {n: call(c) for n, c in ways(kind, M, N, K).items()}
            calls['torch'] = fp8_peers.PEERS['fp8_gemm']['torch'](kind)
            done = timing.compare(calls, make, timing.Effort(7, 0.01, 0.02))
            base = done["planned"]
            print(f"{kind} {M}x{N}x{K}: {ways(kind, M, N, K)['planned'].name}", flush=True)
            for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms):
                config = ways(kind, M, N, K).get(t.name)
                if config and t.name not in ("planned", "narrow", "narrow, no pdl") and t.median_ms > 1.02 * done["narrow"].median_ms:
                    continue
                print(f"   {t.name:22s} {t.median_ms * 1e3:8.2f} us {N * K / t.median_ms / 1e6:7.0f} GB/s {timing.ratio(t, base):.3f}  {config and config.name} {config and config.stages}", flush=True)
            for t in done.timings:
                if not t.ok: print("   ", t.name, t.note[:200])
                else: out[f"{kind} {M} {N} {K} {t.name}"] = t.times_ms
            del done; torch.cuda.empty_cache()
    json.dump(out, open(os.path.join(os.environ.get("OUT", "."), "n8.json"), "w"))


if __name__ == "__main__":
    main()
