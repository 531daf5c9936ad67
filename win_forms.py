"""smoke | time: forms of the window kernel, and of the plain one with ``over``."""
import json, os, sys, time
from dataclasses import replace
import torch
from bench.tuning import precompile
from tkq.attention.arguments import Options
from tkq.attention.config import AttentionConfig
from tkq.attention.halves_config import HalvesConfig
from tkq.attention.halves_plan import builder_of
from tkq.attention.launch import Operands
from tkq.attention.plan import length_class, plan
from tkq.attention.spec import AttentionSpec
from tkq.attention import ops
from tkq.runtime import Recipe

S = dict(scout=True)
B = dict(bridge=True, **S)
N = dict(turns=False)
FORMS = {
    "halves": HalvesConfig(), "scout": HalvesConfig(**S), "scout free": HalvesConfig(**S, **N), "scout eager": HalvesConfig(eager=32, **S),
    "bridge": HalvesConfig(**B), "bridge free": HalvesConfig(**B, **N),
    "second": HalvesConfig(second=True, **B), "second free": HalvesConfig(second=True, **B, **N),
}
OUT = os.environ.get("OUT", "/tmp/out")


def spec_of(left, right, causal, lse):
    causal = causal or right == 0
    return AttentionSpec("bf16", 128, causal, lse, left=left >= 0, right=right > 0 and not causal, far=left >= 512)


def ready(pairs):
    broken = precompile([Recipe(builder_of(c), (s.kernel(), c)) for s, c in pairs])
    if broken:
        sys.exit(f"{len(broken)} do not compile")


def smoke():
    from tests.attention_run import compare, make
    from tests.gpu.test_attention_moving_maximum import cases, moved_by
    windows = {"causal": ((512, 0), (575, 0), (600, 0), (1023, 0)), "right": ((512, 511), (513, 64), (512, 63), (575, 1), (512, 900))}
    sizes = ((1, 640, 640, 2, 2), (1, 1290, 1353, 2, 2), (1, 65, 1999, 2, 2), (1, 1, 1290, 2, 2), (1, 63, 700, 2, 2), (1, 1153, 1153, 2, 2),
             (3, 1300, 1300, 40, 8), (1, 3000, 5000, 12, 3))
    forms = {n: c for n, c in FORMS.items() if n != "halves"}
    ready([(spec_of(600, r, False, True), c) for c in forms.values() for r in (0, 64)])
    bad = 0
    begin = time.time()
    for name, config in forms.items():
        for kind, of_kind in windows.items():
            for left, right in of_kind[::1 + ("eager" in name)]:
                for b, rows, keys, h, hk in sizes:
                    if left < keys - 1 and (kind == "causal" or right < rows - 1):
                        bad += tried(f"{name} {rows}x{keys} {left},{right}", lambda: compare(
                            *make(b, rows, keys, h, hk, 128), config=config, left=left, right=right))
            q, k, v = make(3, 1290, 1353, 20, 20, 128)
            for what, exponents in list(cases(1353, "bf16"))[::3]:
                bad += tried(f"{name} {kind} {what}", lambda: compare(
                    *moved_by(q, k, exponents), v, config=config, left=600, right=64 if kind == "right" else 0))
        print(f"{name}: {time.time() - begin:.1f} s, {bad} wrong so far", flush=True)
    print("smoke:", "ok" if not bad else f"{bad} WRONG")
    return bool(bad)


def tried(what, call):
    try:
        call()
        return 0
    except AssertionError as problem:
        print(f"WRONG {what}: {str(problem)[:150]}", flush=True)
        return 1


def call_of(config, causal=False, left=-1, right=-1):
    options = Options(causal, None, left, right)
    def call(q, k, v):
        o = torch.empty_like(q)
        ops.run(Operands(q, k, v, o), options, config)
        return o
    return call


GROUPS = {  # name: (S, what is asked, forms)
    "w1023": (16384, dict(left=1023, right=0), FORMS),
    "w512+511": (16384, dict(left=512, right=511), FORMS),
    "zeros w1023": (16384, dict(left=1023, right=0), FORMS), "zeros w512+511": (16384, dict(left=512, right=511), FORMS),
    "w1023 S2048": (2048, dict(left=1023, right=0), FORMS), "w4095": (16384, dict(left=4095, right=0), FORMS),
}


def time_all(only):
    from tkq.testing import timing
    groups = {n: g for n, g in GROUPS.items() if not only or n in only}
    full = spec_of(-1, -1, False, False), plan(AttentionSpec("bf16", 128), "long")
    pairs = [full]
    for s, asked, forms in groups.values():
        spec = spec_of(asked.get("left", -1), asked.get("right", -1), asked.get("causal", False), False)
        pairs += [(spec, c) for c in forms.values()]
    ready(pairs)
    out = {}
    rounds, seconds = int(os.environ.get("ROUNDS", 9)), float(os.environ.get("SECONDS_OF_TURN", 0.03))
    for name, (s, asked, forms) in groups.items():
        begin = time.time()
        calls = {n: call_of(c, **asked) for n, c in forms.items()}
        if s == 16384 and "left" in asked:
            calls["all keys"] = call_of(full[1])
        make = lambda i: tuple(torch.randn(16384 // s, s, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        if name.startswith("zeros"):
            make = lambda i: tuple(torch.zeros(16384 // s, s, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        done = timing.compare(calls, make, timing.Effort(rounds, seconds, 4 * seconds))
        base = done.timings[0]
        print(f"\n{name}: {time.time() - begin:.1f} s")
        of_all = done["all keys"] if "all keys" in calls else None
        for t in done.timings:
            if not t.ok:
                print(t.name, t.note); continue
            more = f"  of all keys {timing.ratio(t, of_all):6.2f}" if of_all else ""
            print(f"{t.name:22s} {t.median_ms * 1e3:9.1f} us  {timing.ratio(t, base):6.3f} of {base.name}{more}", flush=True)
            out.setdefault(name, {})[t.name] = t.times_ms
    os.makedirs(OUT, exist_ok=True)
    json.dump(out, open(f"{OUT}/win_{'_'.join(only) or 'all'}.json".replace(" ", ""), "w"))


def long(seconds=1.6):
    """At the power limit: each form for so long, in two mirrored turns; milliseconds, clock, watts, joules a call."""
    import statistics
    from bench import harness, sustained
    from tkq.testing import timing
    gpu, monitor = timing.Gpu(), harness.Monitor()
    full = spec_of(-1, -1, False, False), plan(AttentionSpec("bf16", 128), "long")
    forms = {n: FORMS[n] for n in ("halves", "scout", "scout eager", "bridge", "second", "second free")}
    forms["eager"] = HalvesConfig(eager=32)
    ready([full] + [(spec_of(600, r, False, False), c) for c in forms.values() for r in (0, 64)])
    new = lambda i: tuple(torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    sets = [new(0)]
    sets += [new(i) for i in range(1, timing.input_sets(timing.tensor_bytes(sets[0]), gpu.l2_bytes(), gpu.free_bytes()))]
    for name, asked in (("w1023", dict(left=1023, right=0)), ("w512+511", dict(left=512, right=511))):
        makers = {n: lambda c=c: call_of(c, **asked) for n, c in forms.items()}
        makers["all keys"] = lambda: call_of(full[1])
        batches, missing = sustained.ready(makers, sets, (), gpu)
        found = {n: [] for n in batches}
        for n, ms, reading in sustained.sustained(batches, seconds, monitor.read):
            found[n].append((ms, reading))
        base = statistics.median(ms for ms, _ in found["halves"])
        of_all = statistics.median(ms for ms, _ in found["all keys"])
        for n, of in found.items():
            ms = statistics.median(x for x, _ in of)
            print(f"{name:9s} {n:12s} {1e3 * ms:8.1f} us  {base / ms:.4f} of halves  of all keys {of_all / ms:.2f}  {of[len(of) // 2][1]}", flush=True)
        batches.clear()


if __name__ == "__main__":
    if sys.argv[1] == "long":
        sys.exit(long())
    sys.exit(smoke() if sys.argv[1] == "smoke" else time_all(sys.argv[2:]))
