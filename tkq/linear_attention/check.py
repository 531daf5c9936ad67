"""What a caller may pass to linear_attn and gated_delta_rule."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tkq.linear_attention.spec import COLUMN_DIMS, HEAD_DIMS, VALUE_DIMS
from tkq.runtime import arguments
from tkq.runtime.call import check
from tkq.runtime.call.autocast import lowered

__all__ = ["DELTA", "OP", "Where", "check_call", "check_delta_call", "check_indices", "check_layouts", "columns_of",
           "delta_every", "delta_options", "every_option", "for_tma", "lowered", "options", "refuse_recorded", "turned"]
OP, DELTA = "linear_attn", "gated_delta_rule"
MOST = 65535  # sequences, heads: blocks of a launch along a dimension of the grid

_WHERE = "cu_seqlens", "state_indices"
_tensors = arguments.checker(OP, "q", "k", "v", "g", "initial_state", *_WHERE)
_delta_tensors = arguments.checker(DELTA, "q", "k", "v", "g", "beta", "initial_state", *_WHERE)
options = arguments.checker(OP, "scale", "output_final_state", "state_v_first")
every_option, delta_every = (arguments.checker(op, "checkpoint_every") for op in (OP, DELTA))
delta_options = arguments.checker(DELTA, "scale", "output_final_state", "state_v_first")


class Where(NamedTuple):
    """Where sequences and states lie, as the public functions have it."""

    cu_seqlens: Optional[Tensor] = None
    state_indices: Optional[Tensor] = None
    state_v_first: bool = False


BATCH = Where()


def check_call(q, k, v, g, initial_state, where=BATCH):
    """Raises what linear_attn promises of its tensors, but for strides. initial_state: (.., K, V)."""
    _tensors(q, k, v, g, initial_state, *where[:2])
    tokens = _check_operands(OP, q, k, v, where, g=g, initial_state=initial_state)
    if g is not None:
        check.rank(f"{OP}: g", g, 1, 3, 4)
        check.shape(f"{OP}: g", g, tokens[2:] if g.dim() == 1 else (*tokens, q.shape[3])[:g.dim()])


def check_delta_call(q, k, v, g, beta, initial_state, where=BATCH):
    """Raises what gated_delta_rule promises of its tensors, but for strides. initial_state: (.., K, V)."""
    _delta_tensors(q, k, v, g, beta, initial_state, *where[:2])
    tokens = _check_operands(DELTA, q, k, v, where, g=g, beta=beta, initial_state=initial_state)
    if g is not None:
        check.rank(f"{DELTA}: g", g, 3, 4)
        check.shape(f"{DELTA}: g", g, (*tokens, q.shape[3])[:g.dim()])
        if g.dim() == 4 and q.shape[3] not in COLUMN_DIMS:
            raise NotImplementedError(f"{DELTA}: q: K is {q.shape[3]}, supported with a g of four dimensions are "
                                      f"multiples of 16 from {COLUMN_DIMS[0]} to {COLUMN_DIMS[-1]}")
    check.shape(f"{DELTA}: beta", beta, tokens)


def _check_operands(op, q, k, v, where, **others):
    """(B, S, HV) of q, k and v, which go together. others: more tensors of the call, by name, or None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{op}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v, **others, cu_seqlens=where.cu_seqlens, state_indices=where.state_indices)
    (B, S, H, K), (HV, V) = q.shape, v.shape[2:]
    check.shape(f"{op}: k", k, (B, S, H, K))
    check.shape(f"{op}: v", v, (B, S, None, None))
    if not H or not HV or HV % H:
        raise ValueError(f"{op}: v has {HV} heads, q has {H}; allowed are from 1 on, v's a multiple of q's")
    _check_sizes(op, q, v)
    _check_states(op, others["initial_state"], sequences(op, q, where.cu_seqlens), (HV, K, V), where)
    return B, S, HV


def sequences(op, q, cu_seqlens, name="q"):
    """How many. name: q's, in an error's words."""
    if cu_seqlens is None:
        return q.shape[0]
    check.rank(f"{op}: cu_seqlens", cu_seqlens, 1)
    count = cu_seqlens.shape[0] - 1
    if count < 0:
        raise ValueError(f"{op}: cu_seqlens: has no number, allowed is one more than sequences")
    if q.shape[0] != 1:
        raise ValueError(f"{op}: {name}: has {q.shape[0]} sequences, with cu_seqlens allowed is 1, with the tokens of "
                         "all")
    if count > MOST - 2:  # those of no sequence have two blocks
        raise NotImplementedError(f"{op}: cu_seqlens: has {count} sequences, supported are up to {MOST - 2}")
    _check_numbers(op, "cu_seqlens", cu_seqlens)
    return count


def _check_states(op, states, count, of_each, where):
    """of_each: (HV, K, V)."""
    heads, K, V = of_each
    shape = (V, K) if where.state_v_first else (K, V)
    if where.state_indices is not None:
        check_indices(op, where.state_indices, count, states)
        count = None
    if states is not None:
        check.shape(f"{op}: initial_state", states.mT if where.state_v_first else states, (count, heads, *shape))


def check_indices(op, indices, count, pool, name="initial_state"):
    """Of `count` sequences. name: the pool's, in an error's words."""
    check.shape(f"{op}: state_indices", indices, (count,))
    _check_numbers(op, "state_indices", indices)
    if pool is None:
        raise ValueError(f"{op}: {name}: is None, with state_indices expected is the pool of states")


def _check_numbers(op, name, x):
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name}: strides are {x.stride()}, allowed is contiguous: call .contiguous()")


def _check_sizes(op, q, v):
    for name, size, columns, allowed in (("q", q.shape[3], "K", HEAD_DIMS), ("v", v.shape[3], "V", VALUE_DIMS)):
        if size not in allowed:
            raise NotImplementedError(f"{op}: {name}: {columns} is {size}, supported are multiples of 16 from "
                                      f"{allowed[0]} to {allowed[-1]}")
    for name, x, i, what in (("q", q, 0, "sequences"), ("v", v, 2, "heads")):
        if x.shape[i] > MOST:
            raise NotImplementedError(f"{op}: {name}: has {x.shape[i]} {what}, supported are up to {MOST}")


def columns_of(g):
    """Gates for each column, which are read as q, k and v are; None for others."""
    return g if g is not None and g.dim() == 4 else None


def check_layouts(op, *operands, names="qkv"):
    """What TMA cannot take of q, k and v, or of others: strides and addresses."""
    check.rows_of_16_bytes(op, **dict(zip(names, operands)))


def for_tma(x, first=False):
    """A dense tensor, copied where TMA cannot read it. torch.compile and torch.export do not know where a tensor
    begins: theirs are copied, unless it is where other memory does (first: of a projection's columns the first)."""
    fits = check.strides_fit_16_bytes(x) and _begins_at_16_bytes(x, first)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _begins_at_16_bytes(x, unknown):
    """unknown: what is said of a tracer's tensor, which has no memory."""
    if torch.compiler.is_dynamo_compiling() or isinstance(x, FakeTensor):
        return unknown
    try:
        return x.data_ptr() % 16 == 0
    except RuntimeError:
        return unknown


def turned(op, state, v_first):
    """A state as the engine has it, (.., K, V), and back."""
    if v_first is not True or state is None:
        return state
    check.tensor(f"{op}: initial_state", state)
    check.rank(f"{op}: initial_state", state, 4)
    return state.mT


def refuse_recorded(op, *tensors):
    """NotImplementedError where a call with a pool would be recorded: a state that is written over is gone."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise NotImplementedError(f"{op}: state_indices: with a tensor that requires a gradient, which is not "
                                  "supported; call it under torch.no_grad(), or pass initial_state without indices")
