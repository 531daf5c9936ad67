"""Machine code of gates for each column, without a GPU: no spills, tensor cores not serialised. And what a spec
refuses, that plans have room."""
import itertools

import pytest

from tests.helpers.shipped import of_name
from tkq.linear_attention.channels.ahead import slots
from tkq.linear_attention.channels.catalog import expectation, shipped
from tkq.linear_attention.channels.launch import recipe
from tkq.linear_attention.channels.plan import plan
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.spec import COLUMN_DIMS, VALUE_DIMS
from tkq.testing import sass

# Of each there is one here that has all its code and as many registers to fill: with states of a pool; as wide, in the
# same order of tokens; with pairs besides. Of both the delta rule's gradients of values the third of `test_other_sizes`
# has the code, packed sequences and a beta of 16 bits, at a K of 64, and its forward with states has K of 128: more
# products, and more in local memory (549 loads and stores, 456 in the reversed order). So it is with the updates, which
# are its code without outputs (125). Its gradient of keys is that of queries in the reversed order, with sums, states
# and packed sequences besides.
HELD_BY_OTHERS = ("linear_attn-bf16-k128-v128-column", "linear_attn_dv-bf16-k128-v128-column",
                  "linear_attn_dk-bf16-k64-v128-column", "linear_attn-bf16-k128-v128-column-states",
                  "gated_delta_rule_updates-bf16-k128-v128-column-beta_fp32",
                  "gated_delta_rule_du-bf16-k128-v128-column-packed",
                  "gated_delta_rule_du-bf16-k128-v128-column-beta_bf16", "gated_delta_rule_dq-bf16-k128-v128-column")


@pytest.mark.parametrize("name", [
    "linear_attn-bf16-k128-v128-column", "linear_attn_dv-bf16-k128-v128-column",
    "linear_attn-bf16-k128-v128-column-states", "linear_attn_dq-bf16-k128-v128-column",
    "linear_attn_dk-bf16-k64-v128-column",
    "gated_delta_rule-bf16-k128-v128-column-beta_fp32-states",
    "gated_delta_rule_updates-bf16-k128-v128-column-beta_fp32",
    "linear_attn-bf16-k128-v128-column-packed-pool", "gated_delta_rule_du-bf16-k128-v128-column-packed",
    "linear_attn_dg-column-packed", "gated_delta_rule-bf16-k128-v128-column-bounded-beta_fp32-packed",
    "gated_delta_rule-bf16-k128-v128-column-bounded-beta_fp32-states-reach",
    "gated_delta_rule_reach-bf16-k128-column-bounded-beta_fp32",
    "gated_delta_rule_du-bf16-k128-v128-column-beta_bf16", "gated_delta_rule_dq-bf16-k128-v128-column",
    "gated_delta_rule_dk-bf16-k128-v128-column-packed"])
@pytest.mark.sampled(when=lambda name: name not in HELD_BY_OTHERS)
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)


@pytest.mark.parametrize("spec", [
    ChannelSpec("fp16", 48, 112, "bf16", "bf16"), ChannelSpec("fp16", 128, 256, reverse=True),
    ChannelSpec("bf16", 64, 128, "fp32", "fp32", True, "bf16", packed="int32"),
    ChannelSpec("bf16", 64, 128, delta="fp32", updates=True),
    # its parts are in others: the delta rule in the reversed order, states, 80 columns of values
    pytest.param(ChannelSpec("bf16", 96, 80, "fp32", "fp32", True, "fp32"), marks=pytest.mark.slow),
    ChannelSpec("bf16", 48, 80, "fp32", "fp32", True, of_values=True, dot=True)])
@pytest.mark.machine_code(recipe=recipe)
def test_other_sizes(spec, machine_code):
    sass.assert_sass(machine_code, expectation(spec))


def test_beta_of_a_chunk_is_written_while_all_stages_are_in_use():
    for stages in range(1, 9):
        assert slots(stages) > stages and slots(stages) & (slots(stages) - 1) == 0


def test_plans_have_room():
    for K, V, delta in itertools.product(COLUMN_DIMS, VALUE_DIMS, (None, "fp32")):
        assert plan(ChannelSpec("bf16", K, V, delta=delta, l2norm=bool(delta))).stages >= 2
    for V, K in itertools.product(COLUMN_DIMS, COLUMN_DIMS):
        assert plan(ChannelSpec("bf16", V, K, of_values=True, dot=True)).stages >= 2


@pytest.mark.parametrize("given, words", [
    (dict(updates=True), "updates"), (dict(delta="fp32", updates=True, reverse=True), "updates"),
    (dict(packed="uint8"), "packed is 'uint8'"), (dict(pool="int32"), "pool"),
    (dict(pool="int32", initial="fp32", final="fp32", of_values=True), "pool"),
    (dict(delta="fp32", of_values=True), "of_values and delta"),
    (dict(narrow=True), "narrow"), (dict(of_values=True, dot=True, sums=True), "sums"),
    (dict(of_values=True, end=True), "end"), (dict(of_values=True, pairs=True), "pairs"),
    (dict(of_values=True, dot=True, pairs=True, rest=True), "rest"), (dict(dot=True), "dot"),
    (dict(l2norm=True), "l2norm"), (dict(l2norm=True, delta="fp32", dtype="fp16"), "l2norm"),
    (dict(head_dim=144), "head_dim is 144"), (dict(value_dim=40), "value_dim is 40"),
    (dict(value_dim=256, of_values=True), "value_dim is 256"), (dict(initial="fp16"), "initial is 'fp16'")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"ChannelSpec: {words}"):
        ChannelSpec(**dict(dtype="bf16", head_dim=64, value_dim=64) | given)
