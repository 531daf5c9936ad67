import sys
from tkq.gemm.fp8_narrow_config import NarrowFp8Config
from tkq.gemm.fp8_spec import Fp8Spec
from tkq.runtime.recipe import Recipe
from tkq.testing import sass
from dataclasses import replace
for spec in (Fp8Spec(store="elements"), Fp8Spec(scales="row", store="elements"), Fp8Spec(scales="row", promote=True, store="elements", bias="bf16", activation="gelu"),
             Fp8Spec(scales="block", promote=True, store="elements"), Fp8Spec(scales="line", promote=True, store="elements", out="e4m3")):
    for c in (NarrowFp8Config(16, 64, 1, 8), NarrowFp8Config(64, 64, 4, 5, pdl=True), NarrowFp8Config(128, 128, 2, 3)):
        try:
            for k in sass.report(Recipe("tkq.gemm.fp8_narrow:build", (spec, c))):
                print(spec.scales, spec.promote, c.name, "spills", k.spill_loads + k.spill_stores, "regs", k.registers, "waits", k.waits, "tensor", k.tensor, k.total, flush=True)
        except Exception as e:
            print(spec.scales, c.name, type(e).__name__, str(e)[:700], flush=True)
