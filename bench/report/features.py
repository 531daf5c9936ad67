"""The features of tkq and of other libraries on an H100: the README's table, with evidence from their sources.

A cell is a text and its evidence, names that a test looks up in the source of what is installed, without importing it:
``module:function(a, b)`` has these parameters, ``module:name`` is defined there; with ``!`` before it, it is not.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bench.core import markdown

# by column: the distribution whose source was read, and its version
READ = {"FA4": ("flash-attn-4", "4.0.0b36"), "QuACK": ("quack-kernels", "0.6.5"), "Liger": ("liger-kernel", "0.8.5"),
        "torch": ("torch", "2.13.0")}
COLUMNS = ("tkq", *READ)


@dataclass(frozen=True)
class Cell:
    text: str
    evidence: tuple[str, ...] = ()


def yes(*evidence: str) -> Cell:
    return Cell("yes", evidence)


def no(*evidence: str) -> Cell:
    return Cell("no", tuple(f"!{each}" for each in evidence))


ATTENTION, FA4 = "tkq.attention.ops", "flash_attn.cute.interface"
LIGER, LOSSES, GEMM = "liger_kernel.transformers.functional", "tkq.losses.ops", "quack.gemm_interface"
F = "torch.nn.functional"
COMPILED = Cell("compiled")

# by feature; a column without a cell: the library has no such operation
FEATURES: dict[str, dict[str, Cell]] = {
    "attention: sliding window, softcap, sinks": {
        "tkq": yes(f"{ATTENTION}:flash_attn(window_size, softcap, sinks)"),
        "FA4": yes(f"{FA4}:flash_attn_func(window_size, softcap, learnable_sink)"),
        "torch": Cell("compiled", ("torch.nn.attention.flex_attention:flex_attention(score_mod, block_mask)",)),
    },
    "attention: variable-length sequences": {
        "tkq": yes("tkq.attention.varlen_ops:flash_attn_varlen(cu_seqlens_q)"),
        "FA4": yes(f"{FA4}:flash_attn_varlen_func(cu_seqlens_q)"),
        "torch": yes("torch.nn.attention.varlen:varlen_attn"),
    },
    "attention: user-defined masks and score functions": {
        "tkq": yes("tkq.attention.flex.ops:flex_attention(score_mod, block_mask)"),
        "FA4": yes(f"{FA4}:flash_attn_func(score_mod, mask_mod)"),
        "torch": Cell("compiled", ("torch.nn.attention.flex_attention:flex_attention(score_mod, block_mask)",)),
    },
    "attention: paged KV cache": {
        "tkq": yes("tkq.attention.decode.ops:flash_attn_with_kvcache(block_table)"),
        "FA4": yes(f"{FA4}:flash_attn_varlen_func(page_table)"),
        "torch": yes("torch.nn.attention.varlen:varlen_attn(block_table)"),
    },
    "attention: deterministic backward": {
        "tkq": yes(f"{ATTENTION}:flash_attn(deterministic)"),
        "FA4": yes(f"{FA4}:flash_attn_func(deterministic)"),
        "torch": yes("torch:use_deterministic_algorithms"),
    },
    "rmsnorm with fused residual add, both outputs": {
        "tkq": yes("tkq.norms.ops:rmsnorm(residual, prenorm)"),
        "QuACK": yes("quack.rmsnorm:rmsnorm(residual, prenorm)"),
        "Liger": yes(f"{LIGER}:liger_fused_add_rms_norm(X, R)"),
        "torch": COMPILED,
    },
    "layernorm with gradients": {
        "tkq": yes("tkq.norms.ops:layernorm(weight, bias)"),
        "QuACK": Cell("two functions, fp32 weights", ("quack.rmsnorm:layernorm_fwd", "quack.rmsnorm:layernorm_bwd",
                                              "!quack.rmsnorm:layernorm")),
        "Liger": yes(f"{LIGER}:liger_layer_norm"),
        "torch": yes(f"{F}:layer_norm"),
    },
    "norm with float8 output": {
        "tkq": yes("tkq.norms.quant_ops:rmsnorm_quant(granularity)"),
        "QuACK": no("quack.rmsnorm:rmsnorm(scale)", "quack.rmsnorm:rmsnorm_quant"),
        "Liger": no(f"{LIGER}:liger_rms_norm(scale)"),
        "torch": COMPILED,
    },
    "log-softmax": {
        "tkq": yes("tkq.softmax.ops:log_softmax"),
        "QuACK": no("quack.softmax:log_softmax"),
        "Liger": no(f"{LIGER}:liger_log_softmax"),
        "torch": yes(f"{F}:log_softmax"),
    },
    "cross entropy: label smoothing, z-loss, softcap": {
        "tkq": yes(f"{LOSSES}:cross_entropy(label_smoothing, z_loss, softcap)"),
        "QuACK": no("quack.cross_entropy:cross_entropy(label_smoothing)", "quack.cross_entropy:cross_entropy(softcap)"),
        "Liger": yes(f"{LIGER}:liger_cross_entropy(label_smoothing, lse_square_scale, softcap)"),
        "torch": Cell("label smoothing", (f"{F}:cross_entropy(label_smoothing)", f"!{F}:cross_entropy(softcap)")),
    },
    "fused linear cross entropy": {
        "tkq": yes("tkq.losses.linear_ops:linear_cross_entropy"),
        "QuACK": yes("quack.linear_cross_entropy:chunked_linear_cross_entropy(chunk_size)"),
        "Liger": yes(f"{LIGER}:liger_fused_linear_cross_entropy"),
        "torch": yes(f"{F}:linear_cross_entropy"),
    },
    "preference and distillation losses": {
        "tkq": no(f"{LOSSES}:jsd", f"{LOSSES}:kl_div"),
        "QuACK": no("quack.cross_entropy:kl_div"),
        "Liger": yes(f"{LIGER}:liger_jsd", f"{LIGER}:liger_fused_linear_kl_div", "liger_kernel.ops.grpo_loss"),
        "torch": Cell("not fused", (f"{F}:kl_div",)),
    },
    "rope: interleaved, partial, packed sequences": {
        "tkq": yes("tkq.pointwise.rope_ops:rope(interleaved, cu_seqlens)"),
        "QuACK": yes("quack.rotary:apply_rotary_emb(interleaved, cu_seqlens)"),
        "Liger": Cell("partial", (f"{LIGER}:liger_rope(rotary_dim)", f"!{LIGER}:liger_rope(interleaved)",
                                         f"!{LIGER}:liger_rope(cu_seqlens)")),
    },
    "gemm with a user-defined epilogue": {
        "tkq": yes("tkq.gemm.dense.ops:gemm(activation)"),
        "QuACK": yes("quack.epilogue.frontend:gemm_epilogue"),
        "torch": COMPILED,
    },
    "float8 gemm: row-wise and block-wise scales": {
        "tkq": yes("tkq.gemm.fp8.ops:fp8_gemm(scale_a, scale_b)"),
        "QuACK": Cell("tensor-wise", (f"{GEMM}:gemm(alpha)", f"!{GEMM}:gemm(scale_a)")),
        "torch": yes(f"{F}:scaled_mm(scale_a, scale_recipe_a)"),
    },
    "grouped gemm, group sizes on the GPU": {
        "tkq": Cell("16-bit, float8", ("tkq.gemm.grouped.ops:grouped_gemm(offsets, scale_a)",)),
        "QuACK": Cell("16-bit", (f"{GEMM}:gemm(cu_seqlens_m, cu_seqlens_k)",)),
        "Liger": Cell("16-bit, MoE", ("liger_kernel.ops.fused_moe",)),
        "torch": Cell("16-bit, float8", (f"{F}:grouped_mm", f"{F}:scaled_grouped_mm")),
    },
    "CPU tensors": {
        "tkq": yes("tkq.reference:flash_attn"), "FA4": Cell("no"), "QuACK": Cell("no"), "Liger": Cell("no"),
        "torch": Cell("yes"),
    },
    "GPUs other than Hopper": {
        "tkq": Cell("none"), "FA4": Cell("Ampere, Blackwell", ("flash_attn.cute.flash_fwd_sm100",
                                                               "flash_attn.cute.flash_fwd_sm120")),
        "QuACK": Cell("Ampere, Blackwell", ("quack.gemm_sm80", "quack.gemm_sm100", "quack.gemm_sm120")),
        "Liger": Cell("all that Triton supports"), "torch": Cell("all"),
    },
    "precompiled kernels, no compiler at run time": {
        "tkq": yes("tkq.runtime.compile.bundling:write"), "FA4": Cell("no"), "QuACK": Cell("no"), "Liger": Cell("no"),
        "torch": Cell("yes"),
    },
}


def table() -> str:
    """The README's table."""
    rows = ((name, *(cells[column].text if column in cells else "" for column in COLUMNS))
            for name, cells in FEATURES.items())
    return markdown.table(("", *COLUMNS), rows)


def section() -> str:
    versions = ", ".join(" ".join(read) for read in READ.values())
    return (f"{table()}\n\nFrom the sources of {versions}. `bench/report/features.py` names the evidence, and a "
            "test looks it up in the installed packages. Empty: no such operation. Compiled: `torch.compile` generates "
            "a kernel from plain PyTorch.")


# ---- whether it is so ----------------------------------------------------------------------------------------------


def installed(column: str) -> bool:
    """Is what was read there, in the version that was read?"""
    if column == "tkq":
        return True
    name, version = READ[column]
    try:
        return metadata.version(name).partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def wrong(column: str) -> list[str]:
    """Evidence of a column that its installed sources do not show."""
    claims = (claim for cells in FEATURES.values() if column in cells for claim in cells[column].evidence)
    return [claim for claim in claims if not _shown(claim)]


def _shown(claim: str) -> bool:
    """Something is missing only where its module is there, and a parameter only where its function is."""
    named = claim.removeprefix("!")
    of = named.partition("(")[0] if "(" in named else named.partition(":")[0]
    return _is_there(of) and _is_there(named) is not claim.startswith("!")


def _is_there(claim: str) -> bool:
    module, colon, name = claim.partition(":")
    path = _path(module)
    if path is None or not colon:
        return path is not None
    name, _, wanted = name.rstrip(")").partition("(")
    found = [node for node in _parsed(path) if name in _names(node)]
    if not found or not wanted:
        return bool(found)
    arguments = {a.arg for node in found if isinstance(node, ast.FunctionDef) for a in ast.walk(node.args)
                 if isinstance(a, ast.arg)}
    return set(wanted.split(", ")) <= arguments


@functools.cache
def _parsed(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def _names(node: ast.stmt) -> Iterable[str]:
    """What a statement of a module defines, or gives from elsewhere."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _path(module: str) -> Path | None:
    """A module's file, without importing anything; None where there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for folder in map(Path, spec.submodule_search_locations or () if spec else ()):
        for path in (folder.joinpath(*rest).with_suffix(".py"), folder.joinpath(*rest, "__init__.py")):
            if path.is_file():
                return path
    return None
