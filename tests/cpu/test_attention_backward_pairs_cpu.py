"""Attention's backward with fewer instructions for each score: what is built so, and what its rounding costs."""
from dataclasses import replace

import pytest
import torch

from tkq.attention.backward_grouped_config import GroupedConfig
from tkq.attention.backward_pairs import (
    PairsBackward,
    PairsChained,
    PairsFirst,
    PairsGrouped,
    PairsSeamless,
    build,
)
from tkq.attention.backward_plan import _BEHIND, _CHAIN, _FIRST, in_pairs, plan, recipe
from tkq.attention.backward_seamless_config import SeamlessConfig
from tkq.attention.backward_spec import BackwardSpec
from tkq.testing import sass

USUAL = BackwardSpec("bf16", 128)


def test_what_is_built_so():
    for spec in (USUAL, replace(USUAL, width=64, varlen=True, right=True, dlse=True)):
        assert in_pairs(spec, plan(spec))
    brief = replace(USUAL, varlen=True)
    assert not in_pairs(brief, plan(brief, "brief")) and in_pairs(replace(brief, right=True), _CHAIN[128])
    for other in (dict(dtype="fp16"), dict(width=256), dict(softcap=True), dict(deterministic=True), dict(dq=False)):
        spec = replace(USUAL, **other)
        assert not in_pairs(spec, plan(spec)) and not recipe(spec, plan(spec)).module.endswith("pairs")
    two_keys = SeamlessConfig.of(_BEHIND[128], two_keys=True, ds_stages=1)
    assert recipe(USUAL, two_keys).module.endswith("backward_seamless_keys")


@pytest.mark.parametrize("config, kind", [
    (_BEHIND[128], PairsBackward), (_CHAIN[128], PairsChained), (_FIRST, PairsFirst),
    (GroupedConfig.of(_BEHIND[128]), PairsGrouped), (SeamlessConfig.of(_BEHIND[128]), PairsSeamless)],
    ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_every_form_has_it(config, kind):
    assert recipe(USUAL, config).module.endswith("backward_pairs")
    assert type(build(USUAL, config)[0]) is kind


def test_instructions():
    """P is not taken apart for dS. Of loops there are two, with masks and without."""
    spec = replace(USUAL, right=True)
    kernel, other = (max(sass.report(recipe(x, plan(x))), key=lambda k: k.smem) for x in (USUAL, spec))
    assert kernel.count("HMUL2.BF16_V2") == other.count("HMUL2.BF16_V2") == 32
    assert other.count("FADD") - kernel.count("FADD") >= 64  # delta is where dP begins


@pytest.mark.parametrize("large", (1.0, 8.0))
def test_rounding(large):
    """Of dP - delta before the product with P, which has been rounded too: less than twice what one rounding costs, and
    well below what there is with every intermediate in bf16."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(300, 128).bfloat16() for _ in range(4))
    q, scale = q * large, 128**-0.5
    s = q.double() @ k.double().T * scale
    p = s.softmax(-1)
    dp = do.double() @ v.double().T
    dp -= ((p @ v.double()).bfloat16().double() * do.double()).sum(-1, keepdim=True)
    low_p, low_dp = ((q @ k.T) * scale).softmax(-1), do @ v.T
    low = low_p * (low_dp - (low_p * low_dp).sum(-1, keepdim=True))
    once, pairs = (p * dp).bfloat16(), p.bfloat16() * dp.bfloat16()
    of = lambda ds: (ds.double() @ k.double() - (p * dp) @ k.double()).norm()
    assert of(once) < of(pairs) < 2 * of(once)
    assert of(pairs) < 0.7 * of(low)
    assert abs((pairs.double() - p * dp).mean()) < 1e-3 * (p * dp).abs().mean()
