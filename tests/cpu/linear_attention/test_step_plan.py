"""Plans of steps, and the machine code of their kernels, without a GPU."""
import itertools

import pytest

from tests.helpers.process.machine_code import entry_of
from tests.helpers.shipped import of_name
from tkq.linear_attention.step.catalog import expectation, shipped
from tkq.linear_attention.step.launch import recipe
from tkq.linear_attention.step.plan import FEW, plan, warps_of
from tkq.linear_attention.step.spec import DIMS, LAYOUTS, STATES, SsdSpec, StepSpec
from tkq.testing import sass

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")


@pytest.mark.parametrize("state, layout", itertools.product(STATES, LAYOUTS))
def test_every_size_has_a_plan(state, layout):
    """A warp has whole columns of the state, each number once, in accesses of 16 bytes where they are possible."""
    for K, V in itertools.product(DIMS, DIMS):
        c = plan(StepSpec("bf16", K, V, state=state, layout=layout))
        rows = sorted(lane * c.k_run + i // c.k_run * c.k_run * c.k_lanes + i % c.k_run
                      for lane in range(c.k_lanes) for i in range(c.k_values))
        assert rows == list(range(K)) and c.k_lanes * c.v_lanes == 32 and V % c.columns == 0
        vector = {"fp32": 4, "bf16": 8}[state]
        assert layout == "any" or {"v": c.v_values, "k": c.k_run}[layout] in (vector, 4)
        assert layout != "k" or c.k_lanes >= 4
        assert c.k_values * (c.v_values + 2) <= (112 if c.threads == 512 else 192)


@pytest.mark.parametrize("slices", range(1, 33))
def test_warps_divide_the_slices(slices):
    for others in (1, FEW // slices, FEW // slices + 1, 1 << 20):
        warps = warps_of(slices, others)
        assert slices % warps == 0 and 1 <= warps <= 4
        assert warps == 1 or slices * others > FEW


@pytest.mark.parametrize("given, words", [
    (dict(head_dim=24), "head_dim is 24"), (dict(value_dim=272), "value_dim is 272"),
    (dict(gate="row"), "gate is 'row'"), (dict(state="fp16"), "state is 'fp16'"), (dict(layout="x"), "layout is 'x'"),
    (dict(delta="fp16"), "delta is"),
    (dict(accepted="int32"), "accepted, allowed is with indices"), (dict(indices="int16"), "indices is 'int16'"),
    (dict(ssd=SsdSpec("bf16"), delta="fp32"), "ssd with a gate"), (dict(ssd=SsdSpec("bf16"), several=True), "several")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"StepSpec: {words}"):
        StepSpec(**dict(dtype="bf16", head_dim=64, value_dim=64) | given)


@pytest.mark.parametrize("given, words", [
    (dict(dt=None), "dt is None"), (dict(a="int32"), "a is 'int32'"), (dict(expanded=("x",)), "expanded is")])
def test_what_a_state_space_refuses(given, words):
    with pytest.raises(ValueError, match=f"SsdSpec: {words}"):
        SsdSpec(**dict(dt="bf16") | given)


@pytest.mark.parametrize("name", [
    "step_linear_attn-bf16-k128-v128-fp32-int32-token", "step_gated_delta_rule-bf16-k128-v128-fp32-int64-channel",
    "step_gated_delta_rule-bf16-k128-v128-bf16-int32-token-v_first",
    "step_gated_delta_rule-bf16-k128-v128-fp32-int32-token-accepted", "step_ssd-bf16-p64-n128-fp32-int32"])
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)


def spec_of(K, V, state, layout, several):
    return StepSpec("bf16", K, V, "channel", state, layout, False, "int64", delta="fp32", l2norm=True, several=several)


@pytest.mark.parametrize("K, V, state, layout", [
    (256, 128, "fp32", "v"), (256, 256, "bf16", "v"), (256, 64, "bf16", "k"), (144, 48, "bf16", "k"),
    (144, 48, "bf16", "v"), (256, 64, "fp32", "k"), (80, 48, "fp32", "any"), (64, 64, "fp32", "v")])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.sampled(when=lambda K, V, state, layout, several: several == (layout != "v") or (K, V) == (256, 256))
@pytest.mark.machine_code(recipe=lambda K, V, state, layout, several: recipe(spec_of(K, V, state, layout, several)))
def test_no_spills(K, V, state, layout, several, machine_code):
    sass.assert_sass(machine_code, expectation(spec_of(K, V, state, layout, several)))


@needs_nvdisasm
def test_states_are_loaded_before_any_is_used():
    """All loads of the state stand one behind the other, from one address, and so do its stores."""
    spec = StepSpec("bf16", 128, 128, "token", indices="int32", delta="fp32", l2norm=True)
    code, = sass.by_address(entry_of(recipe(spec)).path).values()
    words = [line for _, line in sorted(code.items())]
    for opcode in ("LDG.E.128", "STG.E.128"):
        base = [line.split("[")[-1].split(".64")[0] for line in words if line.split()[0] == opcode]
        state = max(set(base), key=base.count)
        at = [i for i, line in enumerate(words) if line.split()[0] == opcode and f"[{state}.64" in line]
        assert len(at) == 16 and at[-1] - at[0] == 15
