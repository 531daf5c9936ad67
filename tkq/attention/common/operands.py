"""What a launch of the forward or the backward takes, as torch passes it and the kernel's host function unpacks it:
torch's tensors on one side, the DSL's on the other."""
from typing import Any, NamedTuple


class Operands(NamedTuple):
    """q, o (B, Sq, H, D), k, v (B, Sk, Hk, D), lse (B, H, Sq) fp32 or None, sinks (H,) or None. varlen: q, o (total,
    H, D), k, v (total, Hk, D), lse (H, total)."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any = None
    sinks: Any = None


class BackwardOperands(NamedTuple):
    """q, o, k, v as of ``Operands``; do: o's gradient. lse (B, H, Sq) fp32; dlse: its gradient, or None. varlen: (H,
    total)."""

    do: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    dlse: Any = None


class Gradients(NamedTuple):
    """Of q, or None, of k and of v: what the backward writes."""

    dq: Any
    dk: Any
    dv: Any


class Sequences(NamedTuple):
    """Of varlen: cu_q, cu_k (B + 1,), seqused_q, seqused_k (B,) or None, all int32."""

    cu_q: Any
    cu_k: Any
    seqused_q: Any = None
    seqused_k: Any = None


class Scalars(NamedTuple):
    """scale: of the scores. softcap, left, right: ignored where the spec has none. num_sms: of the device."""

    scale: Any
    softcap: Any
    left: Any
    right: Any
    num_sms: Any
