"""Backward of shared heads, causal: forms beside 32/32, alone, in turns of 40 ms."""
import json, os, sys
from bench import attention_backward, attention_backward_gqa as gqa
from bench.attention_forward import TOKENS
from bench.tuning import precompile
from tkq.attention.backward_first_config import FinishConfig
from tkq.attention.backward_plan import _BEHIND, _FIRST, plan, recipe
from tkq.attention.backward_spec import BackwardSpec
from dataclasses import replace
fin = FinishConfig.of(_BEHIND[128], split=2, registers=(32, 64, 208))
FORMS = {"first": _FIRST, "finish": fin, "finish 4 MB": replace(fin, section_mb=4), "finish 16 MB": replace(fin, section_mb=16),
         "finish 1 head": replace(fin, split=1)}
CASES = ((1024, True), (2048, True), (1024, False), (4096, True))
spec = lambda causal: BackwardSpec(width=128, right=causal)
pairs = [(spec(c), f) for c in (True, False) for f in FORMS.values()]
pairs += [(spec(c), plan(spec(c), k, 1)) for c in (True, False) for k in ("short", "medium")] + [(spec(c), plan(spec(c), k, 4)) for c in (True, False) for k in ("short", "medium")]


def main():
    broken = precompile([recipe(*p) for p in pairs])
    if broken: sys.exit(f"{len(broken)} do not compile")
    if "--precompile" in sys.argv: sys.exit()
    from tkq.testing import timing
    import torch
    out = {}
    for s, causal in CASES:
        shape = attention_backward.Shape(0, 0, causal)
        call = lambda c: (lambda do, q, k, v, o, lse, *_: attention_backward.ours(shape, c)(do, q, k, v, o, lse))
        calls = {"32/32": gqa.as_many(causal), "plan": gqa.ours(causal), **{n: call(c) for n, c in FORMS.items()}}
        done = timing.compare(calls, gqa.inputs(s, 128, causal), timing.Effort(int(os.environ.get("ROUNDS", 14)), 0.03, 0.1))
        base = done["32/32"]
        print(f"S {s} {'causal' if causal else 'full'}")
        for t in done.timings:
            if not t.ok: print(t.name, t.note); continue
            print(f"  {t.name:14s} {t.median_ms * 1e3:8.1f} us  {timing.ratio(t, base):.4f} of 32/32", flush=True)
            out[f"{s} {causal} {t.name}"] = t.times_ms
        torch.cuda.empty_cache()
    json.dump(out, open(os.path.join(os.environ.get("OUT", "."), "fin.json"), "w"))


if __name__ == '__main__':
    main()
