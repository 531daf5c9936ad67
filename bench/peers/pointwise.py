"""The baselines of rope, swiglu and geglu. Only this file imports Liger and QuACK's rotary embedding.

Layouts are tkq's: rope (x or q and k of (B, S, H, D), cos, sin (S, D / 2)); gated (gate, up) of (M, N), their backward
(dy, gate, up). Roofs move the same bytes: `copy` one read and one write, `add` two reads and one write, `copy + add`
(two launches) three and two. A peer that writes over its inputs does so here too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.peers import liger_cute
from bench.peers.common import _compiled, copied

# ---- rope --------------------------------------------------------------------------------------------------------


def _turned(x, cos, sin):
    """Half-split, float32 inside: what a model writes, for torch.compile to fuse."""
    a, b = x.float().chunk(2, -1)
    c, s = cos[None, :, None], sin[None, :, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def _quack_rope(conjugate: bool = False) -> Callable:
    if conjugate:
        from quack.rotary import apply_rotary

        return lambda x, cos, sin: apply_rotary(x, cos, sin, conjugate=True)
    from quack.rotary import apply_rotary_emb

    return lambda x, cos, sin: apply_rotary_emb(x, cos, sin)


def _quack_rope_qk() -> Callable:
    turn = _quack_rope()
    return lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))


def _liger_rope_qk() -> Callable:
    """In place, with tables (1, S, D) of two equal halves, made before the clock runs: once for each table."""
    from liger_kernel.ops.rope import rope_forward

    whole = {}

    def turn(q, k, cos, sin):
        key = cos.data_ptr()
        if key not in whole:
            whole[key] = [torch.cat((t, t), -1)[None].contiguous() for t in (cos, sin)]
        a, b, _, _ = rope_forward(q.transpose(1, 2), k.transpose(1, 2), *whole[key])
        return a.transpose(1, 2), b.transpose(1, 2)

    return turn


# ---- gated -------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def _gated(kind: str) -> Callable:
    return lambda gate, up: (_ACTIVATIONS[kind](gate.float()) * up.float()).to(gate.dtype)


def _gated_backward(kind: str) -> Callable:
    """The formula, in float32, for torch.compile to fuse."""
    from tkq.reference.pointwise import gated_backward

    return lambda dy, gate, up: gated_backward(kind, dy, gate, up)


def _liger(kind: str) -> Callable:
    if kind == "swiglu":
        from liger_kernel.ops.swiglu import swiglu_forward as forward
    else:
        from liger_kernel.ops.geglu import geglu_forward as forward
    return lambda gate, up: forward(gate, up)[2]


def _liger_backward(kind: str) -> Callable:
    """Writes dgate and dup over gate and up."""
    if kind == "swiglu":
        from liger_kernel.ops.swiglu import swiglu_backward as backward
    else:
        from liger_kernel.ops.geglu import geglu_backward as backward
    return lambda dy, gate, up: backward(gate, up, dy)


def _forward_peers(kind: str) -> dict[str, Callable[[], Callable]]:
    found = {
        "add": lambda: torch.add,
        "torch": lambda: lambda gate, up: _ACTIVATIONS[kind](gate) * up,
        "torch.compile": lambda: _compiled(_gated(kind)),
    }
    return {**found, "Liger": lambda: _liger(kind)} if kind != "geglu" else found


def _backward_peers(kind: str) -> dict[str, Callable[[], Callable]]:
    found = {
        "copy + add": lambda: lambda dy, gate, up: (copied(dy), torch.add(gate, up)),
        "torch.compile": lambda: _compiled(_gated_backward(kind)),
    }
    return {**found, "Liger": lambda: _liger_backward(kind)} if kind != "geglu" else found


PEERS: dict[str, dict[str, Callable[..., Callable]]] = liger_cute.added_to({
    "rope": {
        "copy": lambda: lambda x, cos, sin: copied(x),
        "QuACK": _quack_rope,
        "torch.compile": lambda: _compiled(_turned),
    },
    "rope backward": {
        "copy": lambda: lambda x, cos, sin: copied(x),
        "QuACK": lambda: _quack_rope(conjugate=True),
        "torch.compile": lambda: _compiled(lambda x, cos, sin: _turned(x, cos, -sin)),
    },
    "rope_qk": {
        "copy": lambda: lambda q, k, cos, sin: (copied(q), copied(k)),
        "QuACK": _quack_rope_qk,
        "torch.compile": lambda: _compiled(lambda q, k, cos, sin: (_turned(q, cos, sin), _turned(k, cos, sin))),
        "Liger": _liger_rope_qk,  # last: what it leaves in the inputs is another's input in the next round
    },
    **{kind: _forward_peers(kind) for kind in _ACTIVATIONS},
    **{f"{kind} backward": _backward_peers(kind) for kind in _ACTIVATIONS},
})
