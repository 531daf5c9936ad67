"""What a caller may pass to linear_attn and gated_delta_rule."""
import torch

from tkq.linear_attention.spec import HEAD_DIMS, VALUE_DIMS
from tkq.runtime import arguments
from tkq.runtime.call import check
from tkq.runtime.call.autocast import lowered

__all__ = ["DELTA", "OP", "check_call", "check_delta_call", "check_layouts", "delta_options", "for_tma", "lowered",
           "options"]
OP, DELTA = "linear_attn", "gated_delta_rule"
MOST = 65535  # sequences, heads: blocks of a launch along a dimension of the grid

_tensors = arguments.checker(OP, "q", "k", "v", "g", "initial_state")
_delta_tensors = arguments.checker(DELTA, "q", "k", "v", "g", "beta", "initial_state")
options = arguments.checker(OP, "scale", "output_final_state")
delta_options = arguments.checker(DELTA, "scale", "output_final_state")


def check_call(q, k, v, g, initial_state):
    """Raises what linear_attn promises of its tensors, but for strides."""
    _tensors(q, k, v, g, initial_state)
    tokens = _check_operands(OP, q, k, v, g=g, initial_state=initial_state)
    if g is not None:
        check.rank(f"{OP}: g", g, 1, 3, 4)
        check.shape(f"{OP}: g", g, tokens[2:] if g.dim() == 1 else (*tokens, q.shape[3])[:g.dim()])


def check_delta_call(q, k, v, g, beta, initial_state):
    """Raises what gated_delta_rule promises of its tensors, but for strides."""
    _delta_tensors(q, k, v, g, beta, initial_state)
    tokens = _check_operands(DELTA, q, k, v, g=g, beta=beta, initial_state=initial_state)
    if g is not None:
        check.rank(f"{DELTA}: g", g, 3, 4)
        check.shape(f"{DELTA}: g", g, (*tokens, q.shape[3])[:g.dim()])
    check.shape(f"{DELTA}: beta", beta, tokens)


def _check_operands(op, q, k, v, **others):
    """(B, S, HV) of q, k and v, which go together. others: more tensors of the call, by name, or None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{op}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v, **others)
    (B, S, H, K), (HV, V) = q.shape, v.shape[2:]
    check.shape(f"{op}: k", k, (B, S, H, K))
    check.shape(f"{op}: v", v, (B, S, None, None))
    if not H or not HV or HV % H:
        raise ValueError(f"{op}: v has {HV} heads, q has {H}; allowed are from 1 on, v's a multiple of q's")
    _check_sizes(op, q, v)
    if others["initial_state"] is not None:
        check.shape(f"{op}: initial_state", others["initial_state"], (B, HV, K, V))
    return B, S, HV


def _check_sizes(op, q, v):
    for name, size, columns, allowed in (("q", q.shape[3], "K", HEAD_DIMS), ("v", v.shape[3], "V", VALUE_DIMS)):
        if size not in allowed:
            raise NotImplementedError(f"{op}: {name}: {columns} is {size}, supported are multiples of 16 from "
                                      f"{allowed[0]} to {allowed[-1]}")
    for name, x, i, what in (("q", q, 0, "sequences"), ("v", v, 2, "heads")):
        if x.shape[i] > MOST:
            raise NotImplementedError(f"{op}: {name}: has {x.shape[i]} {what}, supported are up to {MOST}")


def check_layouts(op, q, k, v, g=None):
    """What TMA cannot take of q, k and v: strides and addresses; of gates for each column likewise."""
    for name, x in zip("qkvg", (q, k, v, g if g is not None and g.dim() == 4 else q)):
        if not x.numel():
            continue
        unit = 16 // x.element_size()
        check.last_dim_contiguous(f"{op}: {name}", x)
        for i in range(3):
            if x.stride(i) % unit and x.shape[i] > 1:
                raise ValueError(f"{op}: {name}: strides are {x.stride()}; stride {i} must be a multiple of {unit} "
                                 "elements (16 bytes): call .contiguous()")
        if x.data_ptr() % 16:
            raise ValueError(f"{op}: {name}: begins at an address that is not a multiple of 16 bytes: call .clone()")


def for_tma(do):
    """A gradient that came in, copied where TMA cannot read it."""
    try:
        check_layouts(OP, do, do, do)
    except ValueError:
        return do.clone(memory_format=torch.contiguous_format)
    return do
