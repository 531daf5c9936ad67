"""fla's gradients of gates of tokens with the versions of Triton for which it refuses them."""

from __future__ import annotations


def allow() -> None:
    """With Triton 3.4 to 3.7.0 on Hopper fla refuses the launch that makes dq, dk and dg beside a gate: in blocks of 64
    columns of k its result is wrong (fla's issue 640). Benches have 128 columns, which are one block, and judge each
    result before its time counts: of their cases the refusal is lifted, by the flag that it looks at."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True
