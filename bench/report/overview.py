"""The README's table and plot: a row for each family of operations, made of the summary's rows."""

from __future__ import annotations

from collections.abc import Mapping

from bench.core.markdown import table
from bench.core.results import Case, Report, geometric_mean
from bench.core.row_peers import of_row
from bench.report import summary

NORMS = "rmsnorm", "layernorm"
# By what the README calls it, the titles of the summary's rows that it is made of; 25 at most.
ROWS = {
    "`flash_attn`": ("flash_attn", "flash_attn, GQA", "flash_attn, sliding window"),
    "`flash_attn`, head_dim 512": ("flash_attn, head_dim 512",),
    "`flash_attn`, backward": ("flash_attn, backward",),
    "`flash_attn`, deterministic backward": ("flash_attn, deterministic backward",),
    "`flash_attn_varlen`, forward, backward": ("flash_attn_varlen", "flash_attn_varlen, backward"),
    "`flex_attention`, forward, backward": ("flex_attention", "flex_attention, backward"),
    "`flash_attn_with_kvcache`": tuple(f"flash_attn_with_kvcache{what}" for what in (
        "", ", mixed lengths", ", four queries", ", chunked prefill", ", short contexts")),
    "`mla_decode`": ("mla_decode, 16 heads", "mla_decode, 128 heads"),
    "`flash_attn_fp8`, `flash_attn_fp8_varlen`": tuple(
        f"flash_attn_fp8{what}" for what in ("", ", fast sums", "_varlen", "_varlen, fast sums")),
    "`gemm`": tuple(f"gemm{what}" for what in ("", ", b row-major", ", bias and activation", ", small M", ", batched")),
    "`fp8_gemm`": ("fp8_gemm", "fp8_gemm, scales 1x128 on both", "fp8_gemm, small M"),
    "`grouped_gemm`": ("grouped_gemm", "grouped_gemm, K-grouped"),
    "`quantize_fp8`": ("quantize_fp8", "quantize_fp8, with transpose"),
    "`rmsnorm`, `layernorm`, float8 outputs": (
        *NORMS, "rmsnorm, residual", "rmsnorm, per head", *(f"{norm}_quant" for norm in NORMS)),
    "`rmsnorm`, `layernorm`, backward": (*(f"{norm}, backward" for norm in NORMS), "rmsnorm, per head, backward"),
    "`softmax`, `cross_entropy`, `linear_cross_entropy`, forward, backward": (
        "softmax", "softmax, backward", "cross_entropy", "cross_entropy, backward", "cross_entropy_and_gradient",
        "linear_cross_entropy"),
    "`rope`, `swiglu`, `geglu`, forward, backward": (
        "rope_qk", *(f"{op}{what}" for op in ("rope", "swiglu", "geglu") for what in ("", ", backward"))),
    "`linear_attn`, forward, training": ("linear_attn", "linear_attn, forward and backward"),
    "`gated_delta_rule`, forward, training": tuple(f"gated_delta_rule{what}" for what in (
        "", ", forward and backward", ", with the gates of a layer", ", packed, forward and backward")),
    "`mamba2_ssd`, forward, training": ("mamba2_ssd", "mamba2_ssd, forward and backward"),
    "`based`, forward, training": ("based", "based, forward and backward"),
    "steps of linear attention": ("linear_attn_step", "gated_delta_rule_step", "ssd_step"),
    "`causal_conv1d`, forward, training": tuple(
        f"causal_conv1d{what}{ways}" for what in ("", ", packed", ", packed by seq_idx", ", normed heads")
        for ways in ("", ", forward and backward")),
    "`fft_conv`, forward, training": ("fft_conv", "fft_conv, forward and backward", "fft_conv, circular"),
    "`scan`, forward, training": tuple(
        f"scan{what}{ways}" for what in ("", ", fp32, of contiguous tokens")
        for ways in ("", ", forward and backward")),
}


def cases(reports: Mapping[str, Report]) -> dict[str, list[Case]]:
    """Of each row that has any."""
    found = summary.grouped(reports)
    rows = {name: [case for title in titles for _, case in found.get(title, ())] for name, titles in ROWS.items()}
    return {name: of for name, of in rows.items() if of}


def ratios(reports: Mapping[str, Report]) -> dict[str, list[float]]:
    """Of each row the speedup over the fastest baseline at each shape, without backticks: for the plot."""
    found = {name.replace("`", ""): summary.strongest(of) for name, of in cases(reports).items()}
    return {name: each for name, each in found.items() if each}


def rows(reports: Mapping[str, Report]) -> str:
    """The table."""
    lines = []
    for name, of in cases(reports).items():
        if speedups := summary.strongest(of):
            timed = ", ".join(peer.name for peer in of_row(of) if peer.timed)
            said = (f"{x:.2f}" for x in (geometric_mean(speedups), min(speedups), max(speedups)))
            lines.append((name, timed, str(len(speedups)), *said, summary.beside_roofs(of)))
    return table(("operation", "baselines", "shapes", "geomean", "min", "max", "vs. copy"), lines)
