"""tkq: GPU kernels for NVIDIA Hopper in the CuTe DSL, called from PyTorch.

    import torch, tkq
    o = tkq.flash_attn(q, k, v, causal=True)
    y = tkq.rmsnorm(x, weight)
    c = tkq.gemm(a, b)

The public functions load on first use (PEP 562): ``import tkq`` brings neither torch nor the DSL.
"""
import importlib as _importlib
import sys as _sys
from types import ModuleType as _ModuleType

from . import names as _names
from .version import __version__

_PUBLIC = {
    "based": "tkq.linear_attention.based.ops",
    "causal_conv1d": "tkq.convolution.ops",
    "causal_conv1d_step": "tkq.convolution.step_ops",
    "create_block_mask": "tkq.attention.flex.block_masks.create",
    "cross_entropy": "tkq.losses.ops",
    "cross_entropy_and_gradient": "tkq.losses.ops",
    "fft_conv": "tkq.convolution.fft.ops",
    "flash_attn": "tkq.attention.ops",
    "flash_attn_fp8": "tkq.attention.fp8.ops",
    "flash_attn_fp8_varlen": "tkq.attention.fp8.varlen_ops",
    "flex_attention": "tkq.attention.flex.ops",
    "fp8_gemm": "tkq.gemm.fp8.ops",
    "cascade_attention": "tkq.attention.decode.cascade.ops",
    "check_plan": "tkq.attention.decode.plan_flags",
    "flash_attn_with_kvcache": "tkq.attention.decode.ops",
    "kv_append": "tkq.attention.decode.append_ops",
    "merge_state": "tkq.attention.decode.merge_ops",
    "mla_decode": "tkq.attention.mla.ops",
    "plan_cascade": "tkq.attention.decode.cascade.plan_ops",
    "plan_decode": "tkq.attention.decode.plan_ops",
    "flash_attn_varlen": "tkq.attention.varlen_ops",
    "gated_delta_rule": "tkq.linear_attention.delta.ops",
    "hedgehog": "tkq.linear_attention.hedgehog.ops",
    "mamba2_ssd": "tkq.linear_attention.ssd.ops",
    "gated_delta_rule_step": "tkq.linear_attention.step.ops",
    "geglu": "tkq.pointwise.gated_ops",
    "gemm": "tkq.gemm.dense.ops",
    "grouped_gemm": "tkq.gemm.grouped.ops",
    "layernorm": "tkq.norms.ops",
    "layernorm_quant": "tkq.norms.quant_ops",
    "linear_attn": "tkq.linear_attention.ops",
    "linear_attn_step": "tkq.linear_attention.step.ops",
    "linear_cross_entropy": "tkq.losses.linear_ops",
    "log_softmax": "tkq.softmax.ops",
    "prefetch": "tkq.warmup.prefetch",
    "quantize_fp8": "tkq.quantize.ops",
    "quantize_qkv": "tkq.attention.fp8.quantize_ops",
    "rmsnorm": "tkq.norms.ops",
    "rmsnorm_quant": "tkq.norms.quant_ops",
    "rope": "tkq.pointwise.rope_ops",
    "rope_cos_sin": "tkq.pointwise.rope_tables",
    "rope_qk": "tkq.pointwise.rope_ops",
    "scan": "tkq.recurrence.ops",
    "softmax": "tkq.softmax.ops",
    "ssd_step": "tkq.linear_attention.step.ssd_ops",
    "swiglu": "tkq.pointwise.gated_ops",
    "tune": "tkq.warmup.tune",
    "Exchange": "tkq.rows.persistent.monoid",
    "Monoid": "tkq.rows.persistent.monoid",
    "ReductionBase": "tkq.reduction_base",
    "RowKernel": "tkq.rows.persistent.kernel",
}
_MODULES = ("attention", "flash_attn_interface", "integrations", "models", "nn", "norms", "pointwise", "reduction_base",
            "reference", "row_kernel", "rows", "runtime", "testing", "tile", "utils", "viz")

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name):
    if name in _PUBLIC:
        value = getattr(_importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value  # the next look-up finds it without coming here
        return value
    if name in _MODULES:
        return _importlib.import_module(f"tkq.{name}")
    raise _names.unknown("tkq", name, (*_PUBLIC, *_MODULES))


def __dir__():
    return _names.listed(globals(), (*__all__, *_MODULES))


class _Package(_ModuleType):
    """tkq, where ``tkq.gemm`` stays the function when the package of that name is imported: Python then sets it here.
    What is in the package is had by ``from tkq.gemm.dense import plan`` (not ``import tkq.gemm.dense.plan as``)."""

    def __setattr__(self, name, value):
        if not (name in _PUBLIC and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
