"""Float8 products of about one round of tiles: the kernel for few rows with several tiles of rows, and tiles that share, beside the plan and torch."""
import json, os, sys
import torch
from dataclasses import replace
from bench.tuning import precompile
from tkq.gemm import fp8_ops, fp8_plan, narrow_plan
from tkq.gemm.fp8_narrow_config import NarrowFp8Config
from tkq.gemm.fp8_spec import Fp8Spec

KINDS = ("row", "block", "tensor")
PROBLEMS = ((256, 512, 16384), (512, 512, 16384), (256, 1024, 8192), (1024, 1024, 4096), (1024, 1024, 16384), (2048, 1024, 4096),
            (2048, 1024, 16384), (512, 4096, 4096), (256, 4096, 4096), (256, 8192, 8192), (128, 4096, 4096), (192, 2048, 8192))


def spec_of(kind):
    return Fp8Spec(scales=kind, promote=kind == "block")


def ways(kind, M, N, K):
    spec = spec_of(kind)
    found = {"planned": fp8_plan.plan(spec, M, N, K, 132)}
    for rows in (128, 64):
        for split in (1, 2, 4, 8):
            for places in (1, 2):
                try:
                    config = narrow_plan.fitted(NarrowFp8Config(128, rows, split, pdl=True), spec, places)
                except (ValueError, ArithmeticError):
                    continue
                count = -(-N // rows) * -(-M // 128) * split
                if (config.shared_bytes(spec) <= 232448 // places and count <= 132 * places * 1.05 and count >= 40
                        and K // 128 // split >= 4 and config not in found.values()):
                    found[f"{split} x {rows}" + " two" * (places == 2)] = config
    if not spec.promote:
        for tile in fp8_plan.SHARING:
            if fp8_plan.of_use(tile, M, N):
                c = fp8_plan.fitted(replace(tile, pdl=True), spec)
                if c not in found.values():
                    found[c.name] = c
    return found


def recipes():
    return list(dict.fromkeys(fp8_plan.launch(spec_of(k), *p, 132, c)[0] for k in KINDS for p in PROBLEMS for c in ways(k, *p).values()))


def main():
    broken = precompile(recipes())
    if broken:
        print(f"{len(broken)} do not compile")
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
            given = make(0); truth = calls["planned"](*given).float(); bad = []
            for n, f in calls.items():
                try:
                    off = (f(*given).float() - truth).abs().max().item() / truth.abs().max().item()
                    if not off < 2e-2: bad.append((n, off))
                except Exception as e:
                    bad.append((n, str(e)[:80]))
            calls["torch"] = fp8_peers.PEERS["fp8_gemm"]["torch"](kind)
            done = timing.compare(calls, make, timing.Effort(7, 0.008, 0.02))
            base = done["torch"] if done["torch"].ok else done["planned"]
            print(f"{kind} {M}x{N}x{K}: {ways(kind, M, N, K)['planned'].name} {'WRONG ' + str(bad) if bad else ''}", flush=True)
            for t in sorted((t for t in done.timings if t.ok), key=lambda t: t.median_ms)[:7]:
                config = ways(kind, M, N, K).get(t.name)
                print(f"   {t.name:26s} {t.median_ms * 1e3:8.2f} us {timing.ratio(t, base):.3f} of {base.name}  {config and config.name}", flush=True)
            for t in done.timings:
                if not t.ok: print("   ", t.name, t.note[:200])
                else: out[f"{kind} {M} {N} {K} {t.name}"] = t.times_ms
            del done; torch.cuda.empty_cache()
    json.dump(out, open(os.path.join(os.environ.get("OUT", "."), "mid.json"), "w"))


if __name__ == "__main__":
    main()
