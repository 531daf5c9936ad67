import os
from tkq.gemm.fp8_narrow_config import NarrowFp8Config
from tkq.gemm import narrow_plan
from tkq.gemm.fp8_spec import Fp8Spec
from tkq.runtime.recipe import Recipe
from tkq.testing import sass
for spec in (Fp8Spec(scales="row", store="elements"), Fp8Spec(scales="block", promote=True, store="elements")):
    for c in (NarrowFp8Config(128, 128, 2, pdl=True), NarrowFp8Config(128, 64, 4, pdl=True)):
        c = narrow_plan.fitted(c, spec, 1)
        for k in sass.report(Recipe("tkq.gemm.fp8_narrow:build", (spec, c))):
            print(spec.scales, c.name, "spills", k.spill_loads + k.spill_stores, "regs", k.registers, k.total, flush=True)
