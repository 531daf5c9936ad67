"""The kernels that tkq itself can choose: every configuration, and what its machine code must show.

Does not need the DSL. The SASS tests, ``python -m tkq compile`` and the demo walk through it."""
from __future__ import annotations

import difflib
import importlib

from ..runtime.compile.recipe import Shipped

# modules with a function shipped()
_LISTS = (
    "tkq.norms.catalog",
    "tkq.norms.backward.catalog",
    "tkq.gemm.dense.catalog",
    "tkq.gemm.fp8.catalog",
    "tkq.gemm.fp8.small_m_catalog",
    "tkq.gemm.grouped.catalog",
    "tkq.quantize.catalog",
    "tkq.pointwise.catalog",
    "tkq.softmax.catalog",
    "tkq.losses.catalog",
    "tkq.attention.forward.catalog",
    "tkq.attention.fp8.catalog",
    "tkq.attention.wide.catalog",
    "tkq.attention.wide.backward.catalog",
    "tkq.attention.backward.catalog",
    "tkq.attention.decode.catalog",
    "tkq.attention.mla.catalog",
    "tkq.attention.flex.catalog",
    "tkq.convolution.catalog",
    "tkq.recurrence.catalog",
    "tkq.convolution.fft.catalog",
    "tkq.linear_attention.catalog",
    "tkq.linear_attention.based.catalog",
    "tkq.linear_attention.channels.catalog",
    "tkq.linear_attention.decays.catalog",
    "tkq.linear_attention.finish.catalog",
    "tkq.linear_attention.hedgehog.catalog",
    "tkq.linear_attention.step.catalog",
)

# Functions whose kernels are named otherwise, or that take those of others too.
_BEGINNINGS = {
    "cross_entropy": ("cross_entropy", "total"),
    "cross_entropy_and_gradient": ("cross_entropy_and_gradient", "cross_entropy_fused", "total"),
    "linear_cross_entropy": ("linear_cross_entropy", "cross_entropy", "total", "scale", "gemm"),
    "flash_attn": ("flash_attn", "attention_backward"),
    "flash_attn_varlen": ("flash_attn", "attention_backward"),
    "flash_attn_with_kvcache": ("decode", "plan_decode", "chunked_prefill"),
    "mla_decode": ("mla_decode", "plan_decode"),
    "cascade_attention": ("decode", "plan_decode", "merge_state"),
    "plan_cascade": ("plan_decode",),
    "gated_delta_rule": ("gated_delta_rule", "linear_attn", "column_decays", "rmsnorm"),
    "mamba2_ssd": ("mamba2_ssd", "linear_attn_combined", "linear_attn_shared_heads"),
    "gemm": ("gemm", "swiglu", "geglu"),
    "linear_attn_step": ("step_linear_attn",),
    "gated_delta_rule_step": ("step_gated_delta_rule",),
    "ssd_step": ("step_ssd",),
    "rope_qk": ("rope",),
    "rmsnorm_quant": ("rmsnorm",),
    "layernorm_quant": ("layernorm",),
    "quantize_fp8": ("quantize",),
}


def shipped() -> list[Shipped]:
    """Every shipped kernel; names are unique."""
    found = [kernel for module in _LISTS for kernel in importlib.import_module(module).shipped()]
    names = [kernel.name for kernel in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"catalog: names used more than once: {', '.join(twice)}")
    return found


def select(words) -> list[Shipped]:
    """The kernels whose names contain one of the words; all of them where no word is given.

    Raises:
        ValueError: a word that no name contains.
    """
    return named(shipped(), words)


def named(kernels: list[Shipped], words) -> list[Shipped]:
    """Likewise, of these kernels."""
    names = [kernel.name for kernel in kernels]
    for word in words:
        if not any(word in name for name in names):
            near = difflib.get_close_matches(word, names, 3, 0.5)
            nearest = f"; near it are {', '.join(near)}" if near else ""
            raise ValueError(f"no kernel's name contains {word!r}{nearest}; --list prints all names")
    return [kernel for kernel in kernels if not words or any(word in kernel.name for word in words)]


def ops() -> tuple[str, ...]:
    """The functions of tkq that have kernels."""
    from .. import _PUBLIC

    others = ("check_plan", "Exchange", "Monoid", "ReductionBase", "RowKernel", "prefetch", "rope_cos_sin", "tune")
    return tuple(sorted(set(_PUBLIC) - set(others)))


def of_ops(kernels: list[Shipped], chosen) -> list[Shipped]:
    """The kernels of some of tkq's functions; all of them where none is named.

    Raises:
        ValueError: a function that none of the kernels is for.
    """
    for op in chosen:
        if not any(_is_of(kernel, op) for kernel in kernels):
            raise ValueError(f"no kernel is for {op!r}; functions are {', '.join(ops())}")
    return [kernel for kernel in kernels if not chosen or any(_is_of(kernel, op) for op in chosen)]


def _is_of(kernel, op):
    """Names of shipped kernels begin with the function's, those of models' kernels have it behind a slash."""
    name = kernel.name.rpartition("/")[2]
    return any(name.startswith((start + "-", start + "_")) for start in _BEGINNINGS.get(op, (op,)))
