import sys
from dataclasses import replace
from tkq.attention.backward_first_config import FinishConfig, FirstConfig
from tkq.attention.backward_plan import _BEHIND, _FIRST, recipe
from tkq.attention.backward_spec import BackwardSpec
from tkq.testing import sass
spec = BackwardSpec(width=128, right=True)
for regs in ((32, 64, 208), (24, 72, 208), (40, 72, 200), (32, 80, 200), (40, 56, 208)):
    c = FinishConfig.of(_BEHIND[128], split=2, registers=regs)
    try:
        ks = sass.report(recipe(spec, c))
        print(regs, [(k.name[-40:], k.spill_loads + k.spill_stores, k.registers, k.total) for k in ks], flush=True)
    except Exception as e:
        print(regs, type(e).__name__, str(e)[:500], flush=True)
