"""Attention's backward with fewer instructions for each score: what is built so, and what its rounding costs."""
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tkq.attention.backward.ds import Fp32Ds, PackedDs
from tkq.attention.backward.kernel import BackwardKernel
from tkq.attention.backward.plan import _DQ_FIRST_STORE, _DQ_SERIAL, _GQA, _HELPER_WARPS, plan, recipe
from tkq.attention.backward.spec import BackwardSpec
from tkq.testing import sass

USUAL = BackwardSpec("bf16", 128)


def test_what_is_built_so():
    for spec in (USUAL, replace(USUAL, width=64, varlen=True, right=True, dlse=True)):
        assert plan(spec).packs_ds(spec)
    brief = replace(USUAL, varlen=True)
    assert not plan(brief, "brief").packs_ds(brief) and _DQ_SERIAL[128].packs_ds(replace(brief, right=True))
    for other in (dict(dtype="fp16"), dict(width=256), dict(softcap=True), dict(deterministic=True), dict(dq=False)):
        spec = replace(USUAL, **other)
        assert not plan(spec).packs_ds(spec)


@pytest.mark.parametrize("config", [
    _HELPER_WARPS[128], _DQ_SERIAL[128], _DQ_FIRST_STORE, _GQA[128], replace(_HELPER_WARPS[128], fuse_preprocess=True)],
    ids=("helper_warps", "serial", "first_store", "by_query_head", "fuse_preprocess"))
def test_every_form_has_it(config):
    assert type(BackwardKernel(USUAL, config).dkv.ds) is PackedDs
    assert type(BackwardKernel(USUAL, replace(config, packed_ds=False)).dkv.ds) is Fp32Ds
    kernel = BackwardKernel(USUAL, config)
    assert f" Dkv PackedDs {type(kernel.dq).__name__}" in str(kernel), "reports name the parts"


def test_instructions():
    """P is not taken apart for dS. Of loops there are two, with masks and without."""
    spec = replace(USUAL, right=True)
    kernel, other = (max(sass.report(recipe(x, plan(x))), key=lambda k: k.smem) for x in (USUAL, spec))
    assert kernel.count("HMUL2.BF16_V2") == other.count("HMUL2.BF16_V2") == 32
    assert other.count("FADD") - kernel.count("FADD") >= 64  # delta is where dP begins


def errors(large):
    """Of dS with its roundings, what they do to dS @ k: relative norms by "once" (dS alone), "p" (P before the product
    too), "pairs" (dP - delta as well) and "low" (every intermediate); and the mean error of dS by "pairs"."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(700, 128).bfloat16() for _ in range(4))
    q, scale = q * large, 128**-0.5
    s = q.double() @ k.double().T * scale
    p = s.softmax(-1)
    dp = do.double() @ v.double().T
    dp -= ((p @ v.double()).bfloat16().double() * do.double()).sum(-1, keepdim=True)
    low_p, low_dp = ((q @ k.T) * scale).softmax(-1), do @ v.T
    found = dict(once=(p * dp).bfloat16(), p=(p.bfloat16() * dp).bfloat16(), pairs=p.bfloat16() * dp.bfloat16(),
                 low=low_p * (low_dp - (low_p * low_dp).sum(-1, keepdim=True)))
    wanted = (p * dp) @ k.double()
    off = {name: ((ds.double() @ k.double() - wanted).norm() / wanted.norm()).item() for name, ds in found.items()}
    return off, abs((found["pairs"].double() - p * dp).mean()) / (p * dp).abs().mean()


@pytest.mark.parametrize("large", (1.0, 8.0))
def test_rounding(large):
    """Of dP - delta before the product with P, which has been rounded too: less than twice what one rounding costs, and
    well below what there is with every intermediate in bf16."""
    off, mean = errors(large)
    assert off["once"] < off["p"] < off["pairs"] < 2 * off["once"] and off["pairs"] < 0.7 * off["low"]
    assert mean < 1e-3


def test_the_page_has_these_errors():
    page = " ".join((Path(__file__).parents[3] / "docs" / "numerics.md").read_text().split())
    said = re.search(r"an error of (\S+)\. It would be (\S+) with that product in float32, (\S+) with P in "
                     r"float32 as well, and (\S+) with every intermediate", page)
    off, _ = errors(1.0)
    assert [float(word) for word in said.groups()] == pytest.approx(
        [off[name] for name in ("pairs", "p", "once", "low")], rel=0.03)
