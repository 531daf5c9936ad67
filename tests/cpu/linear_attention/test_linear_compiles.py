"""Machine code, without a GPU: shipped kernels of each kind, those of the delta rule with states. No spills, tensor
cores not serialised."""
import itertools

import pytest

from tests.helpers.shipped import of_name
from tkq.linear_attention.catalog import expectation, shipped
from tkq.linear_attention.launch import recipe
from tkq.linear_attention.plan import plan
from tkq.linear_attention.spec import HEAD_DIMS, VALUE_DIMS, LinearSpec
from tkq.testing import sass

# users would see the DSL's warning at a first call: a loop within a loop avoids it
pytestmark = pytest.mark.filterwarnings("error:This static loop has")
# Of each there is one that has its code and as few registers to spare, or fewer: here with packed sequences or as the
# other half of a gradient, of the forward that of Mamba-2 in packed sequences, test_ssd_compiles.py.
HELD_BY_OTHERS = ("linear_attn-bf16-k128-v128-token", "linear_attn_dv-bf16-k128-v128-token-states",
                  "linear_attn-bf16-k128-v128-token-packed-pool",
                  "gated_delta_rule_updates-bf16-k128-v128-token-beta_fp32",
                  "gated_delta_rule_behind-bf16-k128-v128-token-dot-beta_fp32-summed")


@pytest.mark.parametrize("name", ["linear_attn-bf16-k128-v128-token", "linear_attn_dk-bf16-k64-v128-head",
                                  "linear_attn_dv-bf16-k128-v128-token-states",
                                  "gated_delta_rule_updates-bf16-k128-v128-token-beta_fp32",
                                  "gated_delta_rule_before-bf16-k128-v128-token-dot-beta_fp32-summed",
                                  "gated_delta_rule_behind-bf16-k128-v128-token-dot-beta_fp32-summed",
                                  "linear_attn-bf16-k128-v128-token-packed-pool",
                                  "linear_attn_dv-bf16-k128-v128-token-packed",
                                  "gated_delta_rule_du-bf16-k128-v128-token-packed",
                                  "gated_delta_rule-bf16-k128-v128-token-packed-pool"])
@pytest.mark.sampled(when=lambda name: name not in HELD_BY_OTHERS)
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)


def delta_rule(gate, beta, states, reverse):
    return LinearSpec("bf16", 128, 128, gate, states, states, delta=beta, reverse=reverse, dot=reverse,
                      inverse="in" if reverse else None)


@pytest.mark.parametrize("gate, beta, states", [("token", "fp32", "fp32"), ("none", "bf16", None)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.sampled(when=lambda gate, reverse: reverse and gate == "none")
@pytest.mark.machine_code(recipe=lambda gate, beta, states, reverse: recipe(delta_rule(gate, beta, states, reverse)))
def test_delta_rule(gate, beta, states, reverse, machine_code):
    """The reversed order without gates and states; `test_shipped` has both orders with both, in packed sequences."""
    sass.assert_sass(machine_code, expectation(delta_rule(gate, beta, states, reverse)))


def wide_keys(more):
    return LinearSpec("bf16", 256, 128, "token", "fp32", "fp32", **more)


@pytest.mark.parametrize("more", [
    dict(packed="int32", pool="int64", delta="fp32"), dict(reverse=True, dot=True, strict=True),
    dict(packed="int32", delta="bf16", reverse=True, dot=True, inverse="in")])
@pytest.mark.sampled(when=lambda more: more.get("reverse") and "delta" in more)
@pytest.mark.machine_code(recipe=lambda more: recipe(wide_keys(more)))
def test_wide_keys(more, machine_code):
    """At K of 256 one warpgroup's states fill its registers: of these three, the last one has the most in local
    memory."""
    sass.assert_sass(machine_code, expectation(wide_keys(more)))


def test_plans_have_room():
    for K, V in itertools.product(HEAD_DIMS, VALUE_DIMS):
        for more in (dict(), dict(dot=True, reverse=True), dict(delta="fp32")):
            assert plan(LinearSpec("bf16", K, V, "token", **more)).stages >= 2


@pytest.mark.parametrize("given, words", [
    (dict(delta="fp32", strict=True), "delta and strict"), (dict(updates=True), "updates"), (dict(dot=True), "dot"),
    (dict(delta="fp32", updates=True, reverse=True), "updates"),
    (dict(delta="fp32", updates=True), "updates"),
    (dict(dot=True, gate="token", delta="bf16"), "dot"), (dict(inverse="in"), "inverse 'in'"),
    (dict(delta="fp32", reverse=True), "inverse None"), (dict(delta="fp32", inverse="in"), "inverse 'in'"),
    (dict(delta="fp32", reverse=True, inverse="in"), "inverse 'in'"),
    (dict(delta="fp32", reverse=True, dot=True, inverse="out"), "inverse 'out'"),
    (dict(head_dim=272), "head_dim is 272"),
    (dict(value_dim=40), "value_dim is 40"),
    (dict(packed="uint8"), "packed is 'uint8'"), (dict(pool="int32"), "pool"), (dict(pool="uint8"), "pool is 'uint8'"),
    (dict(pool="int64", initial="fp32", final="fp32", reverse=True), "pool"),
    (dict(gate="channel"), "gate is 'channel'"), (dict(gate="head", delta="fp32"), "gate is 'head'"),
    (dict(second="key"), "second is 'key'"),
    (dict(second="pair", strict=True), "second 'pair'"),
    (dict(second="query", final="fp32", part="states"), "second 'query'"),
    (dict(summed=True, value_dim=128), "summed"), (dict(summed=True, second="query"), "summed"),
    (dict(less=True, second="query"), "less"), (dict(kept="fp32", delta="fp32"), "kept"),
    (dict(kept="fp16"), "kept is 'fp16'")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"LinearSpec: {words}"):
        LinearSpec(**dict(dtype="bf16", head_dim=64, value_dim=64) | given)
