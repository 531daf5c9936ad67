# ruff: noqa: F401, F811
"""Gradients of norms whose tensors have types of their own, beside float64."""
import pytest

from tests.gpu.norms.test_norm_option_gradients import HARD, backward, check_gradients, leaves_of
from tests.helpers.norms.options import DTYPES, poison


@pytest.mark.parametrize("kind, x, weight, bias, out", [
    ("layernorm", "bf16", "bf16", "fp32", None), ("rmsnorm", "bf16", "fp32", "fp16", None),
    ("layernorm", "fp16", "fp16", "bf16", None), ("rmsnorm", "bf16", "bf16", None, "fp32"),
    ("layernorm", "fp32", "fp32", None, "fp16")])
def test_mixes(backward, kind, x, weight, bias, out):
    """The bias has another type than the weight, the result than x: its gradient comes in that type."""
    leaves = leaves_of((129, 1000), x, weight=weight, **({"bias": bias} if bias else {}))
    check_gradients(kind, leaves, with_sum=False, out_dtype=out and DTYPES[out])


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_residual_in_bfloat16(backward, kind):
    """What models have. The sum is stored in bfloat16: as exact as x and residual themselves."""
    for M in (1, 129):
        for how in (None, *HARD):
            check_gradients(kind, leaves_of((M, 256), "bf16", how=how, weight="bf16", residual="bf16"), what=how)


def test_a_residual_in_float16(backward):
    check_gradients("rmsnorm", leaves_of((129, 1000), "fp16", weight="fp16", residual="fp16"))
