"""Linear attention in segments, the delta rule's forward by blocks, beside the same calls on the CPU; for a
sanitizer.

    python -m tests.helpers.sanitizer.segment_calls [FAMILY ...] [--list]

As `tests/helpers/sanitizer/calls.py`, whose command line this has.
"""
import sys

import torch

import tkq
from tests.helpers.sanitizer.calls import grad, main, on, randn


def segments(device):
    """One head of 2,048 tokens, which is computed in segments; the delta rule's 24, by blocks, too; one with
    gates of columns and a lower bound; the delta rule's gradients."""
    q, k, v, g, initial = on(
        device, randn(0, 1, 2048, 1, 64), randn(1, 1, 2048, 1, 64) / 8, randn(2, 1, 2048, 1, 64),
        -randn(3, 1, 2048, 1, dtype=torch.float32).abs(), randn(4, 1, 1, 64, 64, dtype=torch.float32))
    yield "linear_attn in segments", tkq.linear_attn(q, k, v, g, initial_state=initial, output_final_state=True)
    yield "gated_delta_rule in segments", tkq.gated_delta_rule(q, k, v, g, g.exp(), None, initial, True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, g.exp())]
    yield "gradients of gated_delta_rule in segments", grad((tkq.gated_delta_rule(*leaves),), leaves, (v,))
    v, gates = v.repeat(1, 1, 24, 2), g.repeat(1, 1, 24)
    yield "gated_delta_rule in segments by blocks", (tkq.gated_delta_rule(q, k, v, gates, gates.exp()),)
    q, k, v, x = on(device, *(randn(i, 1, 2048, 1, 128) for i in range(4)))
    yield "gated_delta_rule of bounded gates in segments", tkq.gated_delta_rule(
        q, k, v, x, g.exp(), None, None, True, True, use_gate_in_kernel=True, gate_lower_bound=-5.0)


def blocks(device):
    """The delta rule's forward by blocks; with gates of columns and a lower bound, which the rule's kernel makes."""
    q, k, v, x, g = on(device, *(randn(i, 1, 200, 2, 128) for i in (0, 1)), *(randn(i, 1, 200, 4, 128) for i in (2, 3)),
                       -randn(4, 1, 200, 4, dtype=torch.float32).abs())
    yield "gated_delta_rule by blocks", (tkq.gated_delta_rule(q, k / 16, v, g, g.exp()),)
    yield "gated_delta_rule of bounded gates", (tkq.gated_delta_rule(
        q, k, v, x, g.exp(), None, None, False, True, use_gate_in_kernel=True, gate_lower_bound=-5.0),)


FAMILIES = {f.__name__: f for f in (segments, blocks)}

if __name__ == "__main__":
    sys.exit(main(FAMILIES))
