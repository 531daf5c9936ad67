"""What a caller may pass to a step."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.step.spec import DIMS
from tkq.runtime import arguments
from tkq.runtime.call import check, memory

LINEAR, DELTA, SSD = "linear_attn_step", "gated_delta_rule_step", "ssd_step"
MOST = 65535  # sequences, heads: blocks of a launch along a dimension of the grid

_POOL = "state", "state_indices", "num_accepted_tokens", "out"
_linear_tensors = arguments.checker(LINEAR, "q", "k", "v", "g", *_POOL)
_delta_tensors = arguments.checker(DELTA, "q", "k", "v", "g", "beta", *_POOL)
_ssd_tensors = arguments.checker(SSD, "state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_batch_indices",
                                 "num_accepted_tokens", "out")
linear_options = arguments.checker(LINEAR, "scale", "state_v_first")
delta_options = arguments.checker(DELTA, "scale", "use_qk_l2norm_in_kernel", "state_v_first")
ssd_options = arguments.checker(SSD, "dt_softplus")


class LinearCall(NamedTuple):
    """What linear_attn_step takes, but for out, in the order of its op's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    state: Tensor
    scale: float | None
    indices: Tensor | None
    accepted: Tensor | None
    v_first: bool


class DeltaCall(NamedTuple):
    """The same of gated_delta_rule_step."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    state: Tensor
    scale: float | None
    l2norm: bool
    indices: Tensor | None
    accepted: Tensor | None
    v_first: bool


class SsdCall(NamedTuple):
    """The same of ssd_step."""

    state: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    indices: Tensor | None
    accepted: Tensor | None


def check_linear(call: LinearCall, out=None):
    """Raises what linear_attn_step promises of its tensors, but for strides."""
    q, k, v, g, state, _, indices, accepted, v_first = call
    _linear_tensors(q, k, v, g, state, indices, accepted, out)
    sizes = _check_operands(LINEAR, q, k, v, g=g, state=state, state_indices=indices, num_accepted_tokens=accepted,
                            out=out)
    if g is not None:
        N, T, HV, K, _ = sizes
        check.rank(f"{LINEAR}: g", g, 1, 3, 4)
        check.shape(f"{LINEAR}: g", g, {1: (HV,), 3: (N, T, HV), 4: (N, T, HV, K)}[g.dim()])
    _check_pool(LINEAR, state, sizes, v_first)
    _check_rows(LINEAR, "state_indices", state, sizes[:2], indices, accepted)
    _check_out(LINEAR, q, v, out)


def check_delta(call: DeltaCall, out=None):
    """Raises what gated_delta_rule_step promises of its tensors, but for strides."""
    q, k, v, g, beta, state, _, _, indices, accepted, v_first = call
    _delta_tensors(q, k, v, g, beta, state, indices, accepted, out)
    sizes = N, T, HV, K, _ = _check_operands(DELTA, q, k, v, g=g, beta=beta, state=state, state_indices=indices,
                                             num_accepted_tokens=accepted, out=out)
    if g is not None:
        check.rank(f"{DELTA}: g", g, 3, 4)
        check.shape(f"{DELTA}: g", g, (N, T, HV) if g.dim() == 3 else (N, T, HV, K))
    check.shape(f"{DELTA}: beta", beta, (N, T, HV))
    _check_pool(DELTA, state, sizes, v_first)
    _check_rows(DELTA, "state_indices", state, sizes[:2], indices, accepted)
    _check_out(DELTA, q, v, out)


def check_ssd(call: SsdCall, out=None):
    """Raises what ssd_step promises of its tensors, but for strides."""
    state, x, dt, A, B, C, D, z, dt_bias, _, indices, accepted = call
    _ssd_tensors(state, x, dt, A, B, C, D, z, dt_bias, indices, accepted, out)
    check.same_device(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state_batch_indices=indices,
                      num_accepted_tokens=accepted, out=out)
    check.rank(f"{SSD}: x", x, 3, 4)
    tokens = x.shape[:-2]
    (N, *_), (H, P), T = tokens, x.shape[-2:], x.shape[1] if x.dim() == 4 else 1
    check.rank(f"{SSD}: B", B, x.dim())
    G, K = B.shape[-2:]
    check.shape(f"{SSD}: B", B, (*tokens, None, None))
    check.shape(f"{SSD}: C", C, tuple(B.shape))
    for name, t in (("B", B), ("C", C), ("z", z)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{SSD}: {name} is {t.dtype}, x is {x.dtype}; both must have one dtype")
    if z is not None:
        check.shape(f"{SSD}: z", z, tuple(x.shape))
    _check_heads(SSD, "x", H, "B", G)
    _check_sizes(SSD, (("B", K, "states"), ("x", P, "columns")), (("x", N, "sequences"), ("x", H, "heads")))
    for name, t, head, more in (("dt", dt, (*tokens, H), (P,)), ("A", A, (H,), (P, K)), ("D", D, (H,), (P,)),
                                ("dt_bias", dt_bias, (H,), (P,))):
        if t is not None:
            check.rank(f"{SSD}: {name}", t, len(head), len(head) + len(more))
            check.shape(f"{SSD}: {name}", t, head if t.dim() == len(head) else (*head, *more))
            if name != "D" and t.dim() > len(head) and any(
                    n > 1 and s for n, s in zip(more, t.stride()[len(head):])):
                raise NotImplementedError(f"{SSD}: {name}: strides are {t.stride()}, numbers that differ within a "
                                          f"head; supported are one for each head, as {head} or expanded from it")
    _check_pool(SSD, state, (N, T, H, K, P), True)
    _check_rows(SSD, "state_batch_indices", state, (N, T), indices, accepted)
    if accepted is not None and x.dim() == 3:
        raise ValueError(f"{SSD}: num_accepted_tokens: x has no dimension of tokens, shape {tuple(x.shape)}; allowed "
                         "is with (N, T, H, P)")
    _check_out(SSD, x, x, out)


def _check_operands(op, q, k, v, **others):
    """(N, T, HV, K, V) of q, k and v, which go together. others: more tensors of the call, by name, or None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{op}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v, **others)
    (N, T, H, K), (HV, V) = q.shape, v.shape[2:]
    check.shape(f"{op}: k", k, (N, T, H, K))
    check.shape(f"{op}: v", v, (N, T, None, None))
    _check_heads(op, "v", HV, "q", H)
    _check_sizes(op, (("q", K, "K"), ("v", V, "V")), (("q", N, "sequences"), ("v", HV, "heads")))
    return N, T, HV, K, V


def _check_heads(op, name, heads, of, shared):
    if not shared or not heads or heads % shared:
        raise ValueError(f"{op}: {name} has {heads} heads, {of} has {shared}; allowed are from 1 on, {name}'s a "
                         f"multiple of {of}'s")


def _check_sizes(op, columns, counts):
    for name, size, what in columns:
        if size not in DIMS:
            raise NotImplementedError(f"{op}: {name}: {what} is {size}, supported are multiples of 16 from "
                                      f"{DIMS[0]} to {DIMS[-1]}")
    for name, size, what in counts:
        if size > MOST:
            raise NotImplementedError(f"{op}: {name}: has {size} {what}, supported are up to {MOST}")


def _check_pool(op, state, sizes, v_first):
    _, _, HV, K, V = sizes
    check.shape(f"{op}: state", state, (None, HV, V, K) if v_first else (None, HV, K, V))
    check.settled(f"{op}: state", state)
    check.refuse_overlap(op, state=state)


def _check_rows(op, name, state, sizes, indices, accepted):
    """Which rows of the pool belong to which sequences."""
    N, T = sizes
    if accepted is not None:
        check.shape(f"{op}: num_accepted_tokens", accepted, (N,))
        if indices is None:
            raise ValueError(f"{op}: num_accepted_tokens is given without {name}; allowed is with {name} ({N}, {T}), a "
                             "row of the pool for each token")
        check.shape(f"{op}: {name}", indices, (N, T))
    elif indices is not None:
        check.shape(f"{op}: {name}", indices, (N,))
    elif state.shape[0] < N:
        raise ValueError(f"{op}: state: has {state.shape[0]} rows for {N} sequences; allowed without {name} are at "
                         "least as many")


def _check_out(op, q, v, out):
    if out is not None:
        check.shape(f"{op}: out", out, tuple(v.shape))
        if out.dtype != q.dtype:
            raise TypeError(f"{op}: out is {out.dtype}, results are {q.dtype}")
        check.refuse_overlap(op, out=out)


def written(op, call, out):
    """Of calls that torch.compile does not trace, before anything runs: what autograd asks of tensors that are written
    to, that they lie apart, and that out is where a launch can write it, though on the op's way it is copied to."""
    check.refuse_inference(op, state=call.state)
    if out is not None:
        check.refuse_inference(op, out=out)
        check.rows_of_16_bytes(op, out=out)
    read = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor) and name != "state"}
    memory.refuse_shared(op, {"state": call.state, "out": out}, read)


def changed(state, out):
    """A backward that saved one of them raises."""
    torch.autograd.graph.increment_version(state)
    if out is not None:
        torch.autograd.graph.increment_version(out)
