"""Linear attention in segments, beside the same calls on the CPU; for a sanitizer.

    python -m tests.helpers.sanitizer.segment_calls [FAMILY ...] [--list]

As `tests/helpers/sanitizer/calls.py`, whose command line this has.
"""
import sys

import torch

import tkq
from tests.helpers.sanitizer.calls import main, on, randn


def segments(device):
    """One head of 2,048 tokens, which is computed in segments; forward."""
    q, k, v, g, initial = on(
        device, randn(0, 1, 2048, 1, 64), randn(1, 1, 2048, 1, 64) / 8, randn(2, 1, 2048, 1, 64),
        -randn(3, 1, 2048, 1, dtype=torch.float32).abs(), randn(4, 1, 1, 64, 64, dtype=torch.float32))
    yield "linear_attn in segments", tkq.linear_attn(q, k, v, g, initial_state=initial, output_final_state=True)
    yield "gated_delta_rule in segments", tkq.gated_delta_rule(q, k, v, g, g.exp(), None, initial, True)


FAMILIES = {f.__name__: f for f in (segments,)}

if __name__ == "__main__":
    sys.exit(main(FAMILIES))
