"""Attention's backward, dS of P in fp32: what is built so, and what roundings would cost."""
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tkq.attention.backward.kernel import BackwardKernel
from tkq.attention.backward.plan import _DQ_FIRST_STORE, _DQ_SERIAL, _GQA, _HELPER_WARPS, plan, recipe
from tkq.attention.backward.spec import BackwardSpec

USUAL = BackwardSpec("bf16", 128)


@pytest.mark.parametrize("config", [
    _HELPER_WARPS[128], _DQ_SERIAL[128], _DQ_FIRST_STORE, _GQA[128], replace(_HELPER_WARPS[128], fuse_preprocess=True)],
    ids=("helper_warps", "serial", "first_store", "by_query_head", "fuse_preprocess"))
def test_every_form_has_it(config):
    kernel = BackwardKernel(USUAL, config)
    assert not kernel.dkv.by_slope and BackwardKernel(replace(USUAL, softcap=True), config).dkv.by_slope
    assert f" Dkv {type(kernel.dq).__name__}" in str(kernel), "reports name the parts"


@pytest.mark.parametrize("wrong", ({"dkv_parts": 0}, {"dkv_parts": 3}, {"dkv_parts": 8}), ids=str)
def test_configurations_that_cannot_run(wrong):
    with pytest.raises(ValueError, match="dkv_parts is 1 or more"):
        replace(plan(USUAL), **wrong).check(128)


CAUSAL = replace(USUAL, right=True)


@pytest.mark.machine_code(recipe=lambda: recipe(CAUSAL, plan(CAUSAL)))
def test_instructions(machine_code):
    """dS is multiplied in fp32, and P is not taken apart. Of loops there are two, with masks and without. The causal
    kernel has the same configuration, and is compiled for test_kernels_sass.py too."""
    assert plan(CAUSAL) == plan(USUAL)
    kernel = max(machine_code, key=lambda k: k.smem)
    assert not kernel.count("HMUL2") and kernel.count("FMUL") >= 64 and kernel.count("MUFU.EX2") == 64
    assert kernel.waits < 0.25 * kernel.tensor and kernel.spill_loads == kernel.spill_stores == 0


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
    page = " ".join((Path(__file__).parents[4] / "docs" / "numerics.md").read_text().split())
    said = re.search(r"an error of (\S+)\. It would be (\S+) with P rounded, (\S+) with dP - delta rounded as well, "
                     r"and (\S+) with every intermediate", page)
    off, _ = errors(1.0)
    assert [float(word) for word in said.groups()] == pytest.approx(
        [off[name] for name in ("once", "p", "pairs", "low")], rel=0.03)
