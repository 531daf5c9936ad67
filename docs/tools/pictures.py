"""python -m docs.tools.pictures: the pictures of "Write your own kernel", by tkq.viz from the examples' classes, of
linear attention's roles and of a long convolution's passes."""
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "write_your_own"


def pictures() -> dict:
    """{name of a file: picture}"""
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    from cutlass import BFloat16
    from write_a_flash_attention import FlashAttention
    from write_a_gemm import Gemm
    from write_a_reduction import Softmax

    from tkq import viz

    return {
        "softmax_tv.svg": viz.tv_layout(Softmax(BFloat16, 1000)),
        "gemm_tile.svg": viz.shared_tile(Gemm.a),
        "gemm_pipeline.svg": viz.pipeline(Gemm()),
        "flash_attention_pipeline.svg": flash_attention(FlashAttention(causal=True)),
        "linear_attention_roles.svg": viz.pipeline(delta_rule()),
        "fft_conv_passes.svg": viz.fft_passes(262144),
    }


def delta_rule():
    """The forward of the gated delta rule, K and V of 128."""
    from tkq.linear_attention.engine.kernel import LinearAttention
    from tkq.linear_attention.plan import plan
    from tkq.linear_attention.spec import LinearSpec

    spec = LinearSpec("bf16", 128, 128, gate="token", delta="bf16")
    return LinearAttention(spec, plan(spec))


def flash_attention(kernel):
    """The pipes of the example, which is not on the template and so not known to ``viz.pipeline``."""
    from tkq import viz
    from tkq.tile import register_split

    few, many = register_split(2)
    every = "one of each warp of 2 consumers"
    pipes = [viz.Pipe(name, str(kernel.tile), stages, kernel.tile.bytes, 8, every)
             for name, stages in zip("QKV", kernel.stages)]
    mail = viz.Pipe("task", "a task", 2, 0, 8, every)
    return viz.Pipeline(
        "FlashAttention: tasks of 128 rows of Q, K and V in tiles of 128 keys",
        viz.Role("producer", "warp 0", few, ("each task: K(n) Q | K(n-1) V(n) | .. | V(0), the next task's number",)),
        viz.Role("consumers", "warps 4 to 11, 2 warpgroups of 64 rows", many, (
            "S = Q K(n)', mask, softmax | S = Q K(i-1)' and O += P V(i), softmax of S under P V | .. | O += P V(0)",)),
        (*pipes, mail))


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.save(FOLDER / name)
