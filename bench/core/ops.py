"""The operations that `python -m tkq bench` can time, by their public names, and the files of cases that time them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.core.command import Bench, Job

# timed beside the peers to show what memory allows, or what something costs or brings; no rivals
ROOFS = ("copy", "add", "copy + add", "read")
OWN = ("tkq apart", "plain", "32/32", "all keys", "all keys, causal", "as usual", "example", "half of the head dim",
       "own kernel", "plain causal")
LIBRARIES = ("torch", "torch._addmm_activation", "cuBLAS", "cuDNN", "flash SDPA")  # compile nothing
TUNING = ("QuACK tuned", "torch.compile autotuned")  # choose by timings of their own


def is_own(name: str) -> bool:
    """Is a candidate tkq itself, in another form? Models have their forms behind a comma: "tkq, fp8_block"."""
    return name in OWN or name.startswith("tkq,")


def is_rival(name: str) -> bool:
    """Is it another library's implementation of the same?"""
    return name not in ROOFS and not is_own(name)


@dataclass(frozen=True)
class Part:
    """Cases of one file: those of some sections, whose operation is one of these (of all, without any).

    what: the variant in tables, after the operation's name.
    """

    bench: str
    sections: tuple[str, ...]
    ops: tuple[str, ...] = ()
    what: str = ""

    def has(self, section: str, op: str) -> bool:
        return section in self.sections and (not self.ops or op in self.ops)


OPS: dict[str, tuple[Part, ...]] = {
    "flash_attn": (
        Part("attention_forward", ("dense",)),
        Part("attention_forward", ("window",), what="sliding window"),
        Part("attention_forward", ("gqa",), what="GQA"),
        Part("attention_forward", ("mha",), what="GQA vs. MHA"),
        Part("attention_forward", ("wide",), what="head_dim 512"),
        Part("attention_backward", ("backward",), what="backward"),
        Part("attention_backward", ("deterministic",), what="deterministic backward"),
        Part("attention_backward_gqa", ("gqa",), what="GQA, backward"),
    ),
    "flash_attn_varlen": (
        Part("attention_forward", ("varlen",)),
        Part("attention_backward_varlen", ("backward",), what="backward"),
    ),
    "flash_attn_with_kvcache": (
        Part("decode", ("paged",)),
        Part("decode", ("mixed",), what="mixed lengths"),
        Part("decode", ("several",), what="four queries"),
        Part("decode", ("chunk",), what="chunked prefill"),
        Part("decode", ("short",), what="short contexts"),
    ),
    "mla_decode": (
        Part("mla", ("few",), what="16 heads"),
        Part("mla", ("many",), what="128 heads"),
        Part("mla", ("several",), what="several queries"),
        Part("mla", ("sparse",), what="sparse"),
        Part("mla", ("float8",), what="sparse, float8 rows"),
    ),
    "flex_attention": (
        Part("flex_attention", ("forward",)),
        Part("flex_attention", ("backward",), what="backward"),
    ),
    "create_block_mask": (Part("flex_attention", ("block_mask",)),),
    "flash_attn_fp8": (
        Part("attention_fp8", ("two_level",)),
        Part("attention_fp8", ("fast",), what="fast sums"),
    ),
    "flash_attn_fp8_varlen": (
        Part("attention_fp8", ("varlen",)),
        Part("attention_fp8", ("varlen_fast",), what="fast sums"),
    ),
    "gemm": (
        Part("gemm", ("large",)),
        Part("gemm", ("rows",), what="b row-major"),
        Part("gemm", ("epilogue",), what="bias and activation"),
        Part("gemm", ("few",), what="small M"),
        Part("gemm", ("batched",), what="batched"),
    ),
    "fp8_gemm": (
        Part("fp8_gemm", ("tensor", "row", "1x128_128x128")),
        Part("fp8_gemm", ("1x128_1x128",), what="scales 1x128 on both"),
        Part("fp8_gemm", ("epilogue",), what="bias and activation"),
        Part("fp8_gemm", ("few",), what="small M"),
    ),
    "grouped_gemm": (
        Part("grouped_gemm", ("bf16", "row", "1x128_128x128")),
        Part("grouped_gemm", ("gradient", "gradient_row", "gradient_1x128"), what="K-grouped"),
    ),
    "quantize_fp8": (
        Part("quantize", ("row", "1x128", "128x128", "tensor")),
        Part("quantize", ("transpose",), what="with transpose"),
    ),
    "rmsnorm": (
        Part("norms", ("forward",), ("rmsnorm",)),
        Part("norms", ("residual",), what="residual"),
        Part("norms", ("heads",), ("rmsnorm heads",), "per head"),
        Part("norms", ("heads",), ("rmsnorm heads backward",), "per head, backward"),
        Part("norm_backward", ("backward",), ("rmsnorm_backward",), "backward"),
    ),
    "layernorm": (
        Part("norms", ("forward",), ("layernorm",)),
        Part("norm_backward", ("backward",), ("layernorm_backward",), "backward"),
    ),
    "rmsnorm_quant": (
        Part("norms", ("quant",), ("rmsnorm_quant row", "rmsnorm_quant 1x128", "rmsnorm_quant + residual",
                                   "rmsnorm_quant + bias row", "rmsnorm_quant + bias 1x128")),
    ),
    "layernorm_quant": (
        Part("norms", ("quant",), ("layernorm_quant row", "layernorm_quant 1x128", "layernorm_quant + bias row",
                                   "layernorm_quant + bias 1x128")),
    ),
    "softmax": (Part("softmax", ("forward",)), Part("softmax", ("backward",), what="backward")),
    "cross_entropy": (
        Part("cross_entropy", ("forward", "mean")),
        Part("cross_entropy", ("backward",), what="backward"),
    ),
    "cross_entropy_and_gradient": (Part("cross_entropy", ("both",)),),
    "linear_cross_entropy": (Part("linear_cross_entropy", ("linear",)),),
    "rope": (
        Part("pointwise", ("rope",), ("rope",)),
        Part("pointwise", ("rope",), ("rope backward",), "backward"),
    ),
    "rope_qk": (Part("pointwise", ("rope",), ("rope_qk",)),),
    "swiglu": (
        Part("pointwise", ("gated",), ("swiglu",)),
        Part("pointwise", ("gated",), ("swiglu backward",), "backward"),
    ),
    "geglu": (
        Part("pointwise", ("gated",), ("geglu", "geglu_tanh")),
        Part("pointwise", ("gated",), ("geglu backward", "geglu_tanh backward"), "backward"),
    ),
    "linear_attn": (
        Part("linear_attention", ("forward",)),
        Part("linear_attention", ("training",), what="forward and backward"),
        Part("linear_attention", ("packed",), what="packed"),
        Part("linear_attention", ("packed_training",), what="packed, forward and backward"),
    ),
    "gated_delta_rule": (
        Part("gated_delta_rule", ("forward",)),
        Part("gated_delta_rule", ("training",), what="forward and backward"),
        Part("gated_delta_rule", ("gates",), what="with the gates of a layer"),
        Part("gated_delta_rule", ("packed",), what="packed"),
        Part("gated_delta_rule", ("packed_training",), what="packed, forward and backward"),
    ),
    "mamba2_ssd": (
        Part("mamba2_ssd", ("forward",)),
        Part("mamba2_ssd", ("training",), what="forward and backward"),
    ),
    "hedgehog": (
        Part("hedgehog", ("forward",)),
        Part("hedgehog", ("training",), what="forward and backward"),
    ),
    "based": (
        Part("based", ("forward",)),
        Part("based", ("training",), what="forward and backward"),
    ),
    "causal_conv1d": (
        Part("convolution", ("forward",)),
        Part("convolution", ("training",), what="forward and backward"),
        Part("convolution", ("packed",), what="packed"),
        Part("convolution", ("packed_training",), what="packed, forward and backward"),
        Part("convolution", ("numbered",), what="packed by seq_idx"),
        Part("convolution", ("numbered_training",), what="packed by seq_idx, forward and backward"),
        Part("convolution", ("normed",), what="normed heads"),
        Part("convolution", ("normed_training",), what="normed heads, forward and backward"),
    ),
    "fft_conv": (
        Part("fft_conv", ("forward",)),
        Part("fft_conv", ("training",), what="forward and backward"),
        Part("fft_conv", ("circular",), what="circular"),
    ),
    "causal_conv1d_step": (Part("convolution", ("step",)),),
    "scan": (
        Part("scan", ("forward",)),
        Part("scan", ("training",), what="forward and backward"),
        Part("scan", ("time",), what="fp32, of contiguous tokens"),
        Part("scan", ("time_training",), what="fp32, of contiguous tokens, forward and backward"),
    ),
    "linear_attn_step": (Part("linear_steps", ("gate",)),),
    "gated_delta_rule_step": (Part("linear_steps", ("gdn", "kda")),),
    "ssd_step": (Part("linear_steps", ("ssd",)),),
}
# files that measure something else by a main of their own: clocks, the docs' kernels, starting, a whole model
EXTRAS = {"sustained": "sustained", "fp8_sums": "fp8_accumulation_error", "chapters": "chapters",
          "cold_start": "cold_start", "llama": "llama"}
WITHOUT = ("sustained",)  # those that take --without: they have peers that compile for long

# --against: by name, the candidates it means
AGAINST: dict[str, tuple[str, ...]] = {
    "torch.compile": ("torch.compile", "torch.compile autotuned"),
    "cudnn": ("cuDNN",),
    "cublas": ("cuBLAS",),
    "quack": ("QuACK",),
    "quack-tuned": ("QuACK tuned",),
    "fa4": ("FA4", "FA4, deterministic"),
    "liger": ("Liger", "Liger CuTe"),
    "deepgemm": ("DeepGEMM",),
    "fa3": ("FA3",),
    "flex": ("FlexAttention",),
    "flex-fa4": ("FlexAttention on FA4",),
    "fla": ("fla", "fla parallel", "fla chunks"),
    "flashinfer": ("FlashInfer", "FlashInfer, segments"),
    "flashmla": ("FlashMLA", "FlashMLA, float8"),
    "flashqla": ("FlashQLA",),
    "flashkda": ("FlashKDA",),
    "mamba": ("mamba_ssm",),
    "causal-conv1d": ("causal-conv1d",),
    "accelerated-scan": ("accelerated_scan",),
    "flashfftconv": ("FlashFFTConv",),
    "torch": ("torch", "torch._addmm_activation", "flash SDPA", "torch SDPA"),
}
USUAL = tuple(name for name in AGAINST if name != "quack-tuned")  # that one compiles 44 kernels
CUBLAS_IN_TORCH = ("fp8_gemm",)  # where the candidate "torch" is a product of cuBLASLt's
PACKAGES = {"quack": "quack-kernels", "quack-tuned": "quack-kernels", "fa4": "flash-attn-4", "liger": "liger-kernel",
            "torch.compile": "triton", "flex": "triton", "flex-fa4": "flash-attn-4",
            "fla": "flash-linear-attention", "flashinfer": "flashinfer-python", "mamba": "mamba-ssm",
            "causal-conv1d": "causal-conv1d", "accelerated-scan": "accelerated-scan"}
MODULES = {"deepgemm": ("deep_gemm", "vllm"), "fa3": ("flash_attn_interface",),
           "flashmla": ("flash_mla",), "flashqla": ("flash_qla",),  # that one of them is there says it
           "flashkda": ("flash_kda",),
           "flashfftconv": ("flashfftconv",)}


def bench_of(name: str) -> Bench:
    """The cases of bench/ops/NAME.py, or of one of `EXTRAS`."""
    return importlib.import_module(f"bench.{'studies' if name in EXTRAS else 'ops'}.{name}").BENCH


def extra_of(name: str):
    """One of `EXTRAS`: a module with a main."""
    return importlib.import_module(f"bench.studies.{EXTRAS[name]}")


def unknown(what: str, given: Iterable[str], valid: Iterable[str]) -> str | None:
    """What is wrong with these names, with the valid ones; None if nothing is."""
    valid = tuple(valid)
    bad = [name for name in given if name not in valid]
    if not bad:
        return None
    near = difflib.get_close_matches(bad[0], valid, 1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{what}: unknown {', '.join(bad)}{hint} Valid: {', '.join(valid)}"


def absent(against: Iterable[str]) -> dict[str, str]:
    """Of these peers those that are not installed, with the reason."""
    found = {}
    for name in against:
        if name == "cudnn":
            import torch

            if not torch.backends.cudnn.is_available():
                found[name] = "PyTorch has no cuDNN here"
        elif name in MODULES:
            if not any(importlib.util.find_spec(module) for module in MODULES[name]):
                found[name] = f"{MODULES[name][0]} is not installed"
        elif name in PACKAGES:
            try:
                metadata.version(PACKAGES[name])
            except metadata.PackageNotFoundError:
                found[name] = f"{PACKAGES[name]} is not installed"
    return found


def meant(name: str, job: Job) -> tuple[str, ...]:
    """The candidates that a name of `AGAINST` means for a job."""
    in_torch = name == "cublas" and job.peer_op in CUBLAS_IN_TORCH
    return AGAINST[name] + (("torch",) if in_torch else ())


def beside(job: Job, against: Iterable[str]) -> tuple[str, ...]:
    """Of a job's peers those that are asked for, and what shows the roof or a cost."""
    wanted = {peer for name in against for peer in meant(name, job)}
    return tuple(name for name in job.peer_names if name in wanted or not is_rival(name))


# by (op, section) or op: the title of a case whose own name is not the public function's
NAMES = {("attention_forward", "varlen"): "flash_attn_varlen", "attention_forward": "flash_attn",
         ("attention_backward", "deterministic"): "flash_attn, deterministic backward",
         "flex_attention_backward": "flex_attention, backward", "attention_backward": "flash_attn, backward",
         "attention_backward_varlen": "flash_attn_varlen, backward",
         "both": "cross_entropy_and_gradient", "cross_entropy_mean": "cross_entropy, mean"}
NAMES |= {("gated_delta_rule", "gates"): "gated_delta_rule, gates of a layer"}
NAMES |= {(op, "training"): f"{op}, forward and backward" for op in (
    "linear_attn", "gated_delta_rule", "mamba2_ssd", "hedgehog", "based", "causal_conv1d", "scan", "fft_conv")}
NAMES |= {("scan", "time"): "scan, fp32", ("scan", "time_training"): "scan, fp32, forward and backward"}
NAMES |= {f"{op}_backward": f"{op}, backward" for op in ("rmsnorm", "layernorm", "softmax", "cross_entropy")}
# by the first word of an op: the other words as pages and pictures have them
_FP8 = {"tensor": "scales per tensor", "row": "scales per row", "1x128_128x128": "scales 1x128 and 128x128",
        "1x128_1x128": "scales 1x128 on both"}
_ONE = {"tensor": "scales per tensor", "row": "scales per row", "1x128": "scales 1x128", "128x128": "scales 128x128",
        "transpose": "with transpose"}
_GROUPED = {"row": _FP8["row"], "1x128_128x128": _FP8["1x128_128x128"], "gradient": "K-grouped, bf16",
            "gradient_row": f"K-grouped, {_FP8['row']}", "gradient_1x128": f"K-grouped, {_FP8['1x128_1x128']}"}
FUNCTIONS = {"quantize": "quantize_fp8"}
_CALLS = {"fp8_gemm": _FP8, "grouped_gemm": _GROUPED, "quantize_fp8": _ONE}
WORDS = {"fp8_gemm": _FP8, "gemm": _FP8, "quantize": _ONE, "rmsnorm_quant": _ONE,
         "layernorm_quant": _ONE, "grouped_gemm": _GROUPED, "rmsnorm": {"heads": "per head"}}


def shown(op: str, section: str) -> str:
    """The title of a case on pages and in pictures: the public function, then its variants behind commas."""
    name = NAMES.get((op, section), NAMES.get(op, op))
    if "," in name or " " not in name:
        return name
    function, *words = name.replace(" + ", "+").split()
    variants = [WORDS.get(function.partition("+")[0], {}).get(word, word) for word in words]
    function = FUNCTIONS.get(function, "fp8_gemm" if function == "gemm" and set(words) & set(_FP8) else function)
    return ", ".join((function.replace("+", " + "), *variants))


def shown_cost(name: str) -> str:
    """The title of a cost, "CPU per eager call: fp8_gemm row tkq": the words after the function as pages have them."""
    measured, _, call = name.partition(": ")
    function, word, *more = (*call.split(), "", "")
    word = _CALLS.get(function, {}).get(word)
    return f"{measured}: {', '.join(filter(None, (function, word, *more)))}" if word else name


def shown_picture(bench: str, section: str) -> str:
    """What a picture of a section of a file of cases shows, in words."""
    words = WORDS.get(bench, {})
    return shown(f"{bench} {section}", section) if section in words else f"{bench}_{section}".replace("_", " ")


def is_float8(op: str, unit: str) -> bool:
    """Does a case's operation multiply float8? Of those that are judged by operations."""
    words = {"fp8_gemm", "flash_attn_fp8", "flash_attn_fp8_varlen", *_FP8, "gradient_row", "gradient_1x128"}
    return unit == "TFLOP/s" and bool(words & set(op.split()))


def title(file: str, section: str, op: str) -> str | None:
    """A case's row in the summary table: the public function and its variant. None for a case outside `OPS`. file: the
    results file, whose name begins with that of the file of cases."""
    bench = max((part.bench for parts in OPS.values() for part in parts if file.startswith(part.bench)), key=len,
                default="")
    for name, parts in OPS.items():
        for part in parts:
            if part.bench == bench and part.has(section, op):
                return f"{name}, {part.what}" if part.what else name
    return None
