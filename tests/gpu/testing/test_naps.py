"""Each kernel family under pressure, each in a process of its own: what a missing wait, or a stage freed too early,
would do to results. See tests/helpers/sanitizer/pressed.py."""
import pytest

from tests.helpers.process import fresh
from tests.helpers.sanitizer import pressed

PROGRAM = """
import sys
from tests.helpers.sanitizer import pressed
pressed.main(*sys.argv[1:])
"""
# Forks of a process that has these: importing them takes longer than most cases. None of them starts CUDA, which a fork
# cannot use; tvm_ffi does (it asks torch for devices), and has to come later.
IMPORTS = "torch, pytest, cutlass.cute"

LOADED = (
    "attention", "attention_overlap_tasks", "attention_packed", "attention_fp8", "attention_fp8_parts",
    "attention_wide", "attention_wide_backward", "backward_helper_warps", "backward_of_one_task", "backward_wide",
    "backward_in_order", "backward_ordered", "backward_seamless", "gemm", "gemm_long", "gemm_not_held",
    "gemm_small_m", "fp8", "fp8_not_overlapped", "fp8_promoted", "fp8_blocks", "fp8_small_m", "fp8_small_m_blocks",
    "grouped", "grouped_long", "linear", "linear_pairs", "delta", "delta_neighbours", "delta_training", "delta_wide",
    "delta_blocks", "split", "channels", "channels_delta", "hedgehog", "hedgehog_segments", "hedgehog_window",
    "hedgehog_features", "ssd", "based", "norm_backward", "norm_backward_warps", "norm_quantised", "fft_passes",
    "split_fft_passes", "fft_heads", "mla", "mla_float8")
STORED = ("backward_first", "backward_chain", "backward_grouped", "backward_grouped_at_once", "backward_ordered")
CLUSTER = "attention_cluster", "attention_wide_cluster"
FIRSTS = "backward_first_at_once", "backward_chain"
ROLES = ("attention", "attention_wide", "hedgehog", "backward_helper_warps", "backward_of_one_task",
         "backward_wide_one_p", "backward_in_order", "backward_chain", "backward_seamless", "fft_heads",
         "hedgehog_features")
STARTED = "norm_backward_cluster", "norm_cluster", "softmax", "cross_entropy", "rows_held"
# One of most families, and of each kind but `firsts`. All others run with --slow alone, some under mutants.
# Of scan and decode no mutant needs a delay: their races would be found here alone.
EVERYDAY = {
    "naps": ("attention", "backward_helper_warps", "backward_wide", "gemm", "gemm_small_m", "fp8", "grouped_long",
             "linear", "linear_pairs", "hedgehog", "scan", "decode", "quantize", "mla_float8", "gated", "rope",
             "norm_backward_cluster"),
    "loads": ("attention_fp8",), "reads": ("attention_cluster", "fp8_promoted"),
    "stores": ("backward_first",), "roles": ("backward_wide_one_p",), "barriers": ("quantize_ticketed_few",),
    "starts": ("norm_cluster", "softmax")}
COUNTED = "quantize", "quantize_few", "quantize_ticketed", "quantize_ticketed_few"


def ids(kind, cases):
    return [pytest.param(kind, case, id=f"{kind}-{case}") for case in cases]


@pytest.mark.parametrize("kind, case", ids("naps", pressed.CASES) + ids("loads", LOADED)
                         + ids("loads", CLUSTER) + ids("reads", CLUSTER) + ids("reads", LOADED)
                         + ids("stores", STORED) + ids("firsts", FIRSTS) + ids("roles", ROLES)
                         + ids("barriers", COUNTED) + ids("starts", STARTED))
@pytest.mark.sampled(when=lambda kind, case: case in EVERYDAY.get(kind, ()))
def test_under_pressure(kind, case):
    found = fresh.run(PROGRAM, kind, case, imports=IMPORTS, timeout=240)
    assert found.returncode == 0, "\n".join((found.stdout + found.stderr).splitlines()[-8:])
