"""Machine code of Mamba-2's launches and of the sums of gates' gradients, without a GPU: no spills, tensor cores not
serialised, of shipped sizes and of the widest."""
from dataclasses import replace

import pytest

from tests.helpers.shipped import of_name
from tkq.linear_attention.catalog import expectation, shipped
from tkq.linear_attention.launch import recipe
from tkq.linear_attention.spec import LinearSpec, SsdSpec
from tkq.testing import sass

pytestmark = pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")
STEPS = SsdSpec("bf16", "fp32", True, "fp32", 2)
SPECS = {
    "forward": LinearSpec("bf16", 128, 256, "token", "fp32", "fp32", ssd=STEPS, state_v_first=True),
    "gated": LinearSpec("fp16", 128, 128, "token", "fp32", "fp32", ssd=replace(STEPS, dt="fp32", gated=True),
                        state_v_first=True),
    "dC": LinearSpec("bf16", 128, 128, "token", "fp32", "fp32", dot=True, ssd=STEPS),
    "dB": LinearSpec("bf16", 128, 128, "token", "fp32", reverse=True, ssd=STEPS),
    "dx": LinearSpec("bf16", 128, 256, "token", "fp32", "fp32", reverse=True, dot=True,
                     ssd=replace(STEPS, skip_gradient=True), state_v_first=True),
    "packed": LinearSpec("bf16", 128, 256, "token", "fp32", "fp32", ssd=replace(STEPS, gated=True), state_v_first=True,
                         packed="int64", pool="int64"),
    "packed dx": LinearSpec("bf16", 128, 256, "token", "fp32", "fp32", reverse=True, dot=True,
                            ssd=replace(STEPS, skip_gradient=True), state_v_first=True, packed="int64"),
    "narrow": LinearSpec("bf16", 96, 80, "token", reverse=True, dot=True, ssd=replace(STEPS, skip_gradient=True)),
}


# "dx" and "forward" are in their packed forms, which have all their code; "gated" is as "packed", in half the columns;
# "dB" has fewer products than "narrow", and more registers to spare than "dC".
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sampled(when=lambda name: name not in ("dx", "forward", "gated", "dB"))
@pytest.mark.machine_code(recipe=lambda name: recipe(SPECS[name]))
def test_the_widest(name, machine_code):
    sass.assert_sass(machine_code, expectation(SPECS[name]))


# Of the shipped sizes one whose states a single warpgroup has, of the launch that keeps most in registers;
# `test_the_widest` has all launches, with two.
@pytest.mark.parametrize("name", ["mamba2_ssd-bf16-n128-p64", "mamba2_ssd_gated-bf16-n64-p64-states",
                                  "mamba2_ssd_dc-bf16-n128-p64", "mamba2_ssd_db-bf16-n64-p64-states",
                                  "mamba2_ssd_dx-bf16-n128-p64-states", "linear_attn_suffix_sums-2-2",
                                  "mamba2_ssd_steps-2-1-end"])
@pytest.mark.sampled(when=lambda name: name in (
    "mamba2_ssd_dx-bf16-n128-p64-states", "mamba2_ssd_steps-2-1-end"))
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)
