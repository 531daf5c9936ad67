"""The kernels of steps that tkq itself can choose, and what their machine code must show."""
import itertools
from dataclasses import replace

from tkq.linear_attention.step.launch import recipe
from tkq.linear_attention.step.plan import ACCESS, plan
from tkq.linear_attention.step.spec import SsdSpec, StepSpec
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped() -> list:
    """Of bf16, as models decode: one token of sequences whose states are in a pool by int32 or int64, K and V of 128, a
    state space of 64 x 128, few states and many; and several tokens of which some are accepted."""
    return [Shipped(f"{name}{'-many' * many}", recipe(spec, many), expectation(spec, many))
            for name, spec in _models() for many in (False, True) if not many or plan(spec, many) != plan(spec)]


def _models():
    for indices, state in itertools.product(("int32", "int64"), ("fp32", "bf16")):
        end, pool = f"-bf16-k128-v128-{state}-{indices}", dict(state=state, indices=indices)
        for gate in ("head", "token"):
            yield f"step_linear_attn{end}-{gate}", StepSpec("bf16", 128, 128, gate, **pool)
        for gate in ("token", "channel"):
            delta = StepSpec("bf16", 128, 128, gate, **pool, delta="fp32", l2norm=True)
            yield f"step_gated_delta_rule{end}-{gate}", delta
            yield f"step_gated_delta_rule{end}-{gate}-v_first", replace(delta, layout="k", v_first=True)
        yield f"step_gated_delta_rule{end}-token-accepted", replace(delta, gate="token", several=True,
                                                                    accepted=indices)
        ssd = SsdSpec("bf16", "fp32", "fp32", "fp32", softplus=True, expanded=("A", "dt", "D", "dt_bias"))
        yield f"step_ssd-bf16-p64-n128-{state}-{indices}", StepSpec("bf16", 128, 64, layout="k", v_first=True, **pool,
                                                                    ssd=ssd)


def expectation(spec: StepSpec, many: bool = False) -> Expectation:
    """States in accesses of 16 bytes where the plan has such, of one token as many registers as leave room for 16 warps
    an SM, and no shared memory, but for the sums of warps that share a slice, who meet once."""
    c = plan(spec, many)
    few, run = c.threads == 512, {"v": c.v_values, "k": c.k_run, "any": 1}[spec.layout]
    wide = run * {"fp32": 4, "bf16": 2}[spec.state] == ACCESS
    shared = c.k_warps > 1
    instructions = (("LDG.E.128", "STG.E.128") if wide else ()) + (("LDS.128", "STS.128", "BAR") if shared else ())
    return Expectation(instructions=instructions, absent=() if shared else ("LDS", "BAR"),
                       registers=128 if few else 255, smem=8 * 1024 if shared else 1024)
