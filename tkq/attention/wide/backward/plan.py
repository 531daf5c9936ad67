"""From what was asked for to how the kernels are built: pure Python. No kernel depends on this file."""
from dataclasses import replace

from tkq.attention.wide.backward.config import PassConfig
from tkq.attention.wide.backward.spec import WideBackwardSpec
from tkq.attention.wide.plan import SLOTS, filled
from tkq.runtime.compile.recipe import Recipe


def recipe(spec: WideBackwardSpec, configs: tuple) -> Recipe:
    """Of all passes, with a configuration each."""
    return Recipe("tkq.attention.wide.backward.kernel:WideBackward", (spec, configs))


def plan(spec: WideBackwardSpec) -> tuple:
    """The configuration of each pass."""
    configs = tuple(_of(name, spec.width) for name in spec.passes)
    # Finding a task among sequences takes the producer more registers.
    return tuple(replace(config, registers=(40, 152, 160)) for config in configs) if spec.varlen else configs


def _of(name, width):
    slots = SLOTS[width]
    if name == "dv":
        return filled(PassConfig(kv=128, products=1, **slots), width).check(width)
    if width == 512:  # slots of half the size, and twice as many: 0.89 of the speed, see docs/wide_heads.md
        slots = dict(key_cols=128)
    return filled(PassConfig(**slots), width).check(width)
