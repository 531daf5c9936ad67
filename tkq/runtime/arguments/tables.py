"""The arguments of every public function, in the order of its signature. See ``kinds.Argument`` for what a field means.

What the tensors of a call have to be together (shapes, devices, strides) is asked by each function itself.
"""
from __future__ import annotations

import math

from ... import granularity
from ..call.dtypes import torch_type
from .kinds import DOUBLE_END, Argument

WIDE, HALF, INDEX, FP8 = ("bf16", "fp16", "fp32"), ("bf16", "fp16"), ("int32", "int64"), ("e4m3", "e5m2")
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_interleaved", "geglu_interleaved", "geglu_tanh_interleaved")


class _Required:
    """In the place of a default: there is none."""

    def __repr__(self):
        return "REQUIRED"


REQUIRED = _Required()


def tensor(name, *dtypes, none=False, written=""):
    return Argument(name, "tensor", none, None if none else REQUIRED, dtypes, written=written)


def flag(name):
    return Argument(name, "flag", default=False)


def number(name, default, low=None, high=None, **more):
    return Argument(name, "number", default is None, default, low=low, high=high, **more)


def integer(name, default, low=None, high=None, **more):
    return Argument(name, "integer", default is None, default, low=low, high=high, **more)


def dtype(name, *dtypes, default=None):
    return Argument(name, "dtype", default is None, default and torch_type(default), dtypes)


def _other(name, default=None):
    return Argument(name, "other", default is None, default)


def choice(name, default, *choices, **more):
    return Argument(name, "choice", default is None, default, choices=choices, **more)


_ROWS = tensor("x", *WIDE), integer("dim", -1, error=IndexError), number("scale", 1.0)


def _norm(eps, *last, bias_first=False):
    weight, bias = tensor("weight", *WIDE, none=True), tensor("bias", *WIDE, none=True)
    return (tensor("x", *WIDE), weight, bias, number("eps", eps, 0), tensor("residual", *WIDE, none=True),
            flag("prenorm"), number("weight_offset", 0.0), *last)


_OUT, _SUM = dtype("out_dtype", *WIDE), dtype("residual_dtype", *WIDE)
_SCALES = choice("granularity", "row", "row", "1x128", scales=True)


def _loss(weight, *last, reductions=("none", "mean", "sum")):
    return (tensor(weight, *WIDE, none=True), integer("ignore_index", -100, -1 << 63, (1 << 63) - 1),
            choice("reduction", "mean", *reductions), number("label_smoothing", 0.0, 0, 1),
            number("z_loss", 0.0), number("softcap", None, 0, above=True), *last)


def _logits(written):
    return tensor("logits", *WIDE, written=written), tensor("target", *INDEX)


_LONGEST = (1 << 31) - 1
_ROTATION = (tensor("cos", *WIDE), tensor("sin", *WIDE), flag("interleaved"),
         integer("seqlen_offsets", 0, 0, _LONGEST, dtypes=INDEX), tensor("position_ids", *INDEX, none=True),
         tensor("cu_seqlens", "int32", none=True), integer("max_seqlen", None, 0, _LONGEST))
_LAYOUT = choice("layout", "split", "split", "interleaved")
_GATES = tensor("gate", *WIDE), tensor("up", *WIDE, none=True)
_QKV = tensor("q", *HALF), tensor("k", *HALF), tensor("v", *HALF)
_CAUSAL, _SCALE = flag("causal"), number("softmax_scale", None, 0, above=True)
_WINDOW = Argument("window_size", "window", default=(None, None), low=-1, high=(1 << 30) - 1)
_SOFTCAP, _SINKS = number("softcap", 0.0, 0), tensor("sinks", *WIDE, none=True)
_POOL = tensor("state", "fp32", "bf16", written="always")
_ACCEPTED = tensor("num_accepted_tokens", *INDEX, none=True)
_STEP_OUT = tensor("out", *HALF, none=True, written="always")
_STATES = tensor("initial_state", "fp32", "bf16", none=True, written="state_indices"), flag("output_final_state")
_PACKED = tensor("cu_seqlens", *INDEX, none=True), tensor("state_indices", *INDEX, none=True), flag("state_v_first")
_CHECKPOINTS = integer("checkpoint_every", None, 1, _LONGEST)

TABLES = {
    "softmax": _ROWS,
    "log_softmax": _ROWS,
    "rmsnorm": _norm(1e-6, _OUT, _SUM),
    "layernorm": _norm(1e-5, _OUT, _SUM),
    "rmsnorm_quant": _norm(1e-6, _SUM, _SCALES),
    "layernorm_quant": _norm(1e-5, _SUM, _SCALES),
    "cross_entropy": (*_logits("inplace_backward"), *_loss("weight", flag("inplace_backward"))),
    "cross_entropy_and_gradient": (*_logits("inplace"), *_loss("weight", flag("inplace"), reductions=("mean", "sum"))),
    "linear_cross_entropy": (tensor("x", *HALF), tensor("weight", *HALF), tensor("target", *INDEX),
                             *_loss("class_weight")),
    "rope": (tensor("x", *WIDE, written="inplace"), *_ROTATION, flag("inplace")),
    "rope_qk": (tensor("q", *WIDE), tensor("k", *WIDE), *_ROTATION),
    "rope_cos_sin": (integer("seqlen", REQUIRED, 0, _LONGEST), integer("dim", REQUIRED, 2, 1 << 16),
                     number("base", 10000.0, 0, above=True, end=DOUBLE_END), dtype("dtype", *WIDE, default="fp32"),
                     Argument("device", "device", none=True), tensor("inv_freq", *WIDE, "float64", none=True)),
    "swiglu": (*_GATES, _LAYOUT),
    "geglu": (*_GATES, choice("approximate", "none", "none", "tanh"), _LAYOUT),
    "gemm": (tensor("a", *HALF), tensor("b", *HALF), tensor("bias", *WIDE, none=True),
             Argument("activation", "function", none=True, choices=(*ACTIVATIONS, *GATED)),
             tensor("c", *WIDE, none=True), number("alpha", 1.0), number("beta", 0.0),
             tensor("out", *WIDE, none=True, written="always"), _OUT),
    "fp8_gemm": (tensor("a", *FP8), tensor("b", *FP8), tensor("scale_a", "fp32"), tensor("scale_b", "fp32"),
                 tensor("bias", *WIDE, none=True), choice("activation", None, *ACTIVATIONS, error=NotImplementedError),
                 dtype("out_dtype", *WIDE, "e4m3", default="bf16"), tensor("out_scale", "fp32", none=True),
                 choice("accumulate", None, "fast", "fp32")),
    "quantize_fp8": (tensor("x", *WIDE), choice("granularity", "row", *granularity.NAMES, scales=True),
                     dtype("dtype", *FP8, default="e4m3"), flag("transpose")),
    "grouped_gemm": (tensor("a", *HALF, *FP8), tensor("b", *HALF, *FP8), tensor("offsets", "int32"),
                     tensor("scale_a", "fp32", none=True), tensor("scale_b", "fp32", none=True), _OUT),
    "flash_attn": (*_QKV, _CAUSAL, _SCALE, _WINDOW, _SOFTCAP, _SINKS, flag("deterministic"), flag("return_lse"),
                   _other("score_mod"), _other("mask_mod"), _other("block_mask")),
    "flash_attn_fp8": (
        *(tensor(name, "e4m3") for name in "qkv"), *(tensor(f"{name}_descale", "fp32", none=True) for name in "qkv"),
        _CAUSAL, _SCALE, _WINDOW, choice("accumulate", "two_level", "two_level", "fast"),
        dtype("out_dtype", *HALF, default="bf16"), flag("return_lse")),
    "flash_attn_fp8_varlen": (
        *(tensor(name, "e4m3") for name in "qkv"), tensor("cu_seqlens_q", "int32"),
        Argument("cu_seqlens_k", "tensor", True, REQUIRED, ("int32",)),
        integer("max_seqlen_q", REQUIRED, 0, _LONGEST), integer("max_seqlen_k", REQUIRED, 0, _LONGEST),
        *(tensor(f"{name}_descale", "fp32", none=True) for name in "qkv"), _CAUSAL, _SCALE, _WINDOW,
        choice("accumulate", "two_level", "two_level", "fast"), dtype("out_dtype", *HALF, default="bf16"),
        *(tensor(name, "int32", none=True) for name in ("seqused_q", "seqused_k", "block_table")), flag("return_lse")),
    "quantize_qkv": (*(tensor(name, *WIDE) for name in "qkv"), flag("rotate"), flag("smooth_k"),
                     *(tensor(name, "fp32", none=True) for name in ("cos", "sin"))),
    "create_block_mask": (_other("mask_mod", REQUIRED), *(Argument(n, "integer", True, REQUIRED, low=1, high=_LONGEST)
                                                          for n in ("B", "H")),
                          integer("Q_LEN", REQUIRED, 1, _LONGEST), integer("KV_LEN", REQUIRED, 1, _LONGEST),
                          Argument("device", "device", none=True), _other("BLOCK_SIZE", 128)),
    "flex_attention": (tensor("query", *HALF), tensor("key", *HALF), tensor("value", *HALF), _other("score_mod"),
                       _other("block_mask"), number("scale", None), flag("enable_gqa"), flag("return_lse"),
                       _other("kernel_options"), _other("return_aux")),
    "flash_attn_varlen": (
        *_QKV, tensor("cu_seqlens_q", "int32"), tensor("cu_seqlens_k", "int32"),
        integer("max_seqlen_q", REQUIRED, 0, _LONGEST), integer("max_seqlen_k", REQUIRED, 0, _LONGEST),
        _CAUSAL, _SCALE, _WINDOW, _SOFTCAP, _SINKS,
        tensor("seqused_q", "int32", none=True), tensor("seqused_k", "int32", none=True), flag("return_lse"),
        flag("deterministic")),
    "flash_attn_with_kvcache": (
        tensor("q", *HALF), tensor("k_cache", *HALF, "e4m3"), tensor("v_cache", *HALF, "e4m3"),
        tensor("cache_seqlens", "int32"), tensor("block_table", "int32", none=True),
        tensor("k_descale", "fp32", none=True), tensor("v_descale", "fp32", none=True), _SCALE,
        Argument("causal", "flag", default=True), _WINDOW, _SOFTCAP, _SINKS, tensor("plan", "int32", none=True),
        tensor("cu_seqlens_q", "int32", none=True), tensor("tree_mask", "int64", none=True), flag("batch_invariant"),
        flag("return_lse"), tensor("out", *HALF, none=True, written="always")),
    "mla_decode": (
        tensor("q", *HALF), tensor("kv_cache", *HALF, "uint8"), tensor("block_table", "int32", none=True),
        tensor("cache_seqlens", "int32", none=True), number("softmax_scale", REQUIRED, 0, above=True),
        Argument("causal", "flag", default=True), tensor("plan", "int32", none=True),
        tensor("indices", "int32", none=True), tensor("topk_length", "int32", none=True), flag("batch_invariant"),
        flag("return_lse"),
        tensor("out", *HALF, none=True, written="always")),
    "plan_decode": (
        tensor("cache_seqlens", "int32"), integer("num_heads_q", REQUIRED, 1, _LONGEST),
        integer("num_heads_kv", REQUIRED, 1, _LONGEST), integer("head_dim", REQUIRED, 1, _LONGEST),
        integer("head_dim_v", None, 1, _LONGEST), integer("max_seqlen_q", 1, 1, _LONGEST), _WINDOW,
        flag("batch_invariant"), tensor("cu_seqlens_q", "int32", none=True),
        integer("total_q", None, 0, _LONGEST), tensor("out", "int32", none=True, written="always")),
    "cascade_attention": (
        tensor("q", *HALF), tensor("k_cache", *HALF, "e4m3"), tensor("v_cache", *HALF, "e4m3"),
        tensor("block_table", "int32"), tensor("cache_seqlens", "int32", none=True),
        integer("prefix_len", None, 0, (1 << 30) - 1), _other("plan"), tensor("k_descale", "fp32", none=True),
        tensor("v_descale", "fp32", none=True), _SCALE, Argument("causal", "flag", default=True), _WINDOW, _SOFTCAP,
        _SINKS, tensor("cu_seqlens_q", "int32", none=True), flag("batch_invariant"), Argument("cascade", "flag", True),
        flag("return_lse"), tensor("out", *HALF, none=True, written="always")),
    "plan_cascade": (
        tensor("cache_seqlens", "int32"), *(integer(n, REQUIRED, 1, _LONGEST) for n in (
            "num_heads_q", "num_heads_kv", "head_dim")), integer("prefix_len", REQUIRED, 0, (1 << 30) - 1),
        integer("page_size", REQUIRED, 1, _LONGEST), integer("head_dim_v", None, 1, _LONGEST),
        integer("max_seqlen_q", 1, 1, _LONGEST), Argument("causal", "flag", default=True), flag("batch_invariant"),
        tensor("cu_seqlens_q", "int32", none=True), integer("total_q", None, 0, _LONGEST),
        Argument("cascade", "flag", True)),
    "merge_state": (tensor("o_a", *WIDE), tensor("lse_a", "fp32"), tensor("o_b", *WIDE), tensor("lse_b", "fp32")),
    "kv_append": (
        tensor("k", *WIDE), tensor("v", *WIDE), tensor("k_cache", *WIDE, "e4m3", written="always"),
        tensor("v_cache", *WIDE, "e4m3", written="always"), tensor("slot_mapping", *INDEX),
        tensor("cos", *WIDE, none=True), tensor("sin", *WIDE, none=True), flag("interleaved"),
        tensor("positions", *INDEX, none=True), tensor("q", *WIDE, none=True),
        tensor("k_scale", "fp32", none=True, written="always"), tensor("v_scale", "fp32", none=True, written="always")),
    "check_plan": (tensor("plan", "int32"),),
    "linear_attn": (*_QKV, tensor("g", "fp32", none=True), number("scale", None),
                    *_STATES, *_PACKED, _CHECKPOINTS),
    "gated_delta_rule": (*_QKV, Argument("g", "tensor", True, REQUIRED, ("fp32",)), tensor("beta", "fp32", "bf16"),
                         number("scale", None), *_STATES, flag("use_qk_l2norm_in_kernel"),
                         tensor("A_log", *WIDE, none=True), tensor("dt_bias", *WIDE, none=True),
                         flag("use_gate_in_kernel"), flag("allow_neg_eigval"), number("gate_lower_bound", None),
                         *_PACKED, _CHECKPOINTS),
    "hedgehog": (*_QKV, tensor("q_map", *HALF), tensor("k_map", *HALF), tensor("linear_factor", "fp32"),
                 tensor("window_factor", "fp32"), integer("window_size", 64, 1, _LONGEST)),
    "mamba2_ssd": (tensor("x", *HALF), tensor("dt", *WIDE), tensor("A", "fp32"), tensor("B", *HALF), tensor("C", *HALF),
                   tensor("D", *WIDE, none=True), tensor("z", *HALF, none=True), tensor("dt_bias", *WIDE, none=True),
                   tensor("initial_states", "fp32", "bf16", none=True, written="state_indices"), flag("dt_softplus"),
                   Argument("dt_limit", "limits", default=(0.0, math.inf)), flag("return_final_states"),
                   *_PACKED[:2], _CHECKPOINTS),
    "based": (*_QKV, number("scale", None), Argument("use_norm", "flag", default=True)),
    "linear_attn_step": (*_QKV, Argument("g", "tensor", True, REQUIRED, ("fp32",)), _POOL, number("scale", None),
                         tensor("state_indices", *INDEX, none=True), _ACCEPTED, flag("state_v_first"), _STEP_OUT),
    "gated_delta_rule_step": (
        *_QKV, Argument("g", "tensor", True, REQUIRED, ("fp32",)), tensor("beta", "fp32", "bf16"), _POOL,
        number("scale", None), flag("use_qk_l2norm_in_kernel"), tensor("state_indices", *INDEX, none=True), _ACCEPTED,
        flag("state_v_first"), _STEP_OUT),
    "ssd_step": (_POOL, tensor("x", *HALF), tensor("dt", *WIDE), tensor("A", *WIDE), tensor("B", *HALF),
                 tensor("C", *HALF), tensor("D", *WIDE, none=True), tensor("z", *HALF, none=True),
                 tensor("dt_bias", *WIDE, none=True), flag("dt_softplus"),
                 tensor("state_batch_indices", *INDEX, none=True), _ACCEPTED, _STEP_OUT),
    "causal_conv1d": (tensor("x", *WIDE), tensor("weight", *WIDE), tensor("bias", *WIDE, none=True),
                      choice("activation", None, "silu"), tensor("initial_state", *WIDE, none=True),
                      flag("output_final_state"), tensor("cu_seqlens", *INDEX, none=True),
                      tensor("seq_idx", *INDEX, none=True), integer("norm_heads", 0, 0, 1 << 24),
                      integer("head_dim", 128, 1, 1 << 24)),
    "causal_conv1d_step": (tensor("x", *WIDE), tensor("conv_states", *WIDE, written="always"), tensor("weight", *WIDE),
                           tensor("bias", *WIDE, none=True), choice("activation", None, "silu"),
                           tensor("cache_indices", *INDEX, none=True),
                           tensor("out", *WIDE, none=True, written="always")),
    "scan": (tensor("a", *WIDE), tensor("b", *WIDE), tensor("initial_state", *WIDE, none=True), flag("reverse"),
             flag("output_final_state")),
    "fft_conv": (tensor("u", *HALF), tensor("k", "fp32"), tensor("d", *WIDE, none=True),
                 Argument("causal", "flag", default=True), tensor("pre_gate", *HALF, none=True),
                 tensor("post_gate", *HALF, none=True), choice("precision", "half", "half", "split")),
    "tune": (Argument("function", "other", default=REQUIRED), Argument("effort", "other"), flag("again")),
    "prefetch": (Argument("ops", "other", default=()), integer("jobs", 1, 1)),
}
