"""Plans of steps, and the machine code of their kernels, without a GPU."""
import itertools

import pytest

from tests.helpers.process.machine_code import entry_of
from tests.helpers.shipped import of_name
from tkq.linear_attention.step.catalog import expectation, shipped
from tkq.linear_attention.step.config import LANES, StepConfig
from tkq.linear_attention.step.launch import recipe
from tkq.linear_attention.step.plan import FEW, MOST_SHARING, most_few, plan, warps_of
from tkq.linear_attention.step.spec import DIMS, LAYOUTS, STATES, SsdSpec, StepSpec
from tkq.testing import sass

needs_nvdisasm = pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")


def rows_of(c):
    """Of K, in the order of warps, lanes and registers."""
    return [warp * c.rows + lane * c.k_run + i // c.k_run * c.k_run * c.k_lanes + i % c.k_run
            for warp in range(c.k_warps) for lane in range(c.k_lanes) for i in range(c.k_values)]


@pytest.mark.parametrize("state, layout, many", list(itertools.product(STATES, LAYOUTS, (False, True))))
def test_every_size_has_a_plan(state, layout, many):
    """A warp has whole columns of the state, or the warps of a block have, each number once, in accesses of 16 bytes
    where they are possible."""
    for K, V in itertools.product(DIMS, DIMS):
        c = plan(StepSpec("bf16", K, V, state=state, layout=layout), many)
        assert sorted(rows_of(c)) == list(range(K)) and c.k_lanes * c.v_lanes == LANES and V % c.columns == 0
        vector = {"fp32": 4, "bf16": 8}[state]
        assert layout == "any" or {"v": c.v_values, "k": c.k_run}[layout] in (vector, 4)
        assert layout != "k" or c.k_lanes >= 4
        assert c.k_values * (c.v_values + 2) <= (112 if c.threads == 512 else 192)
        assert 1 <= c.k_warps <= MOST_SHARING and LANES * c.k_warps <= c.threads


@pytest.mark.parametrize("K, V, k_warps", [(128, 128, 4), (128, 256, 4), (64, 64, 2), (96, 128, 3), (128, 96, 2),
                                           (128, 32, 2)])
def test_warps_share_rows_of_many_states(K, V, k_warps):
    """Accesses of rows of 128 or 256 bytes; a warp's rows lie behind one another."""
    c = plan(StepSpec("bf16", K, V), many=True)
    assert c.k_warps == k_warps and c.v_values * c.v_lanes == c.columns in (32, 64) and c.k_values * c.v_values == 64
    for warp in range(k_warps):
        assert sorted(rows_of(c)[warp * c.rows:(warp + 1) * c.rows]) == list(range(warp * c.rows, (warp + 1) * c.rows))


def test_whole_rows_of_many_state_spaces():
    c = plan(StepSpec("bf16", 128, 64, layout="k", v_first=True), many=True)
    assert (c.k_lanes * c.k_run, c.k_warps, c.columns) == (128, 1, 16)


def test_which_states_have_no_plan_of_many():
    """Several tokens, bf16, strides of any kind, sizes that rows of 128 bytes do not divide, or warps share alone."""
    for spec in (StepSpec("bf16", 128, 128, several=True), StepSpec("bf16", 128, 128, state="bf16"),
                 StepSpec("bf16", 128, 128, layout="any"), StepSpec("bf16", 256, 256), StepSpec("bf16", 128, 48),
                 StepSpec("bf16", 32, 64), StepSpec("bf16", 64, 128, layout="k"),
                 StepSpec("bf16", 128, 128, layout="k", delta="fp32")):
        assert plan(spec, many=True) == plan(spec)


@pytest.mark.parametrize("slices", range(1, 33))
def test_warps_divide_the_slices(slices):
    for others in (1, FEW // slices, FEW // slices + 1, 1 << 20):
        warps = warps_of(StepConfig(8, 16, 8, 4), slices, others)
        assert slices % warps == 0 and 1 <= warps <= 4
        assert warps == 1 or slices * others > FEW
        assert warps_of(StepConfig(1, 16, 8, 4, k_warps=8), slices, others) == 1


def test_many_states_are_those_whose_slices_fill_blocks():
    for V in DIMS:
        spec = StepSpec("bf16", 128, V)
        few, config = most_few(spec), plan(spec)
        slices = V // config.columns
        assert few * slices <= FEW < (few + 1) * slices


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
    "step_gated_delta_rule-bf16-k128-v128-fp32-int32-token-accepted", "step_ssd-bf16-p64-n128-fp32-int32",
    "step_gated_delta_rule-bf16-k128-v128-fp32-int64-channel-many", "step_ssd-bf16-p64-n128-fp32-int32-many"])
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)


def spec_of(K, V, state, layout, several):
    return StepSpec("bf16", K, V, "channel", state, layout, False, "int64", delta="fp32", l2norm=True, several=several)


@pytest.mark.parametrize("K, V, state, layout", [
    (256, 128, "fp32", "v"), (256, 256, "bf16", "v"), (256, 64, "bf16", "k"), (144, 48, "bf16", "k"),
    (144, 48, "bf16", "v"), (256, 64, "fp32", "k"), (80, 48, "fp32", "any"), (64, 64, "fp32", "v")])
@pytest.mark.parametrize("several", [False, True])
# states of bf16 along K are at 144, those of fp32 at 256
@pytest.mark.sampled(when=lambda K, V, state, layout, several: (K, V) == (256, 256) or (
    several == (layout != "v") and (K, state, layout) != (256, "bf16", "k")))
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
