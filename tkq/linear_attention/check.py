"""What a caller may pass to linear_attn."""
from tkq.linear_attention.spec import HEAD_DIMS, VALUE_DIMS
from tkq.runtime import arguments
from tkq.runtime.call import check
from tkq.runtime.call.autocast import lowered

__all__ = ["check_call", "check_layouts", "lowered", "options"]
OP = "linear_attn"
MOST = 65535  # sequences, heads: blocks of a launch along a dimension of the grid

_tensors = arguments.checker(OP, "q", "k", "v", "g", "initial_state")
options = arguments.checker(OP, "scale", "output_final_state")


def check_call(q, k, v, g, initial_state):
    """Raises what the public function promises of its tensors, but for strides."""
    _tensors(q, k, v, g, initial_state)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{OP}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v, g=g, initial_state=initial_state)
    (B, S, H, K), (HV, V) = q.shape, v.shape[2:]
    check.shape(f"{OP}: k", k, (B, S, H, K))
    check.shape(f"{OP}: v", v, (B, S, None, None))
    if not H or not HV or HV % H:
        raise ValueError(f"{OP}: v has {HV} heads, q has {H}; allowed are from 1 on, v's a multiple of q's")
    _check_sizes(q, v)
    if g is not None:
        _check_gates(g, (B, S, HV))
    if initial_state is not None:
        check.shape(f"{OP}: initial_state", initial_state, (B, HV, K, V))


def _check_sizes(q, v):
    for name, size, columns, allowed in (("q", q.shape[3], "K", HEAD_DIMS), ("v", v.shape[3], "V", VALUE_DIMS)):
        if size not in allowed:
            raise NotImplementedError(f"{OP}: {name}: {columns} is {size}, supported are multiples of 16 from "
                                      f"{allowed[0]} to {allowed[-1]}")
    for name, x, i, what in (("q", q, 0, "sequences"), ("v", v, 2, "heads")):
        if x.shape[i] > MOST:
            raise NotImplementedError(f"{OP}: {name}: has {x.shape[i]} {what}, supported are up to {MOST}")


def _check_gates(g, tokens):
    """tokens: (B, S, HV)."""
    if g.dim() == 4:
        raise NotImplementedError(f"{OP}: g: has 4 dimensions, shape {tuple(g.shape)}, a decay for each column of k; "
                                  f"supported are ({tokens[2]},) and {tuple(tokens)}")
    check.rank(f"{OP}: g", g, 1, 3)
    check.shape(f"{OP}: g", g, tokens[2:] if g.dim() == 1 else tokens)


def check_layouts(*operands):
    """What TMA cannot take of q, k and v: strides and addresses."""
    for name, x in zip("qkv", operands):
        if not x.numel():
            continue
        check.last_dim_contiguous(f"{OP}: {name}", x)
        for i in range(3):
            if x.stride(i) % 8 and x.shape[i] > 1:
                raise ValueError(f"{OP}: {name}: strides are {x.stride()}; stride {i} must be a multiple of 8 elements "
                                 "(16 bytes): call .contiguous()")
        if x.data_ptr() % 16:
            raise ValueError(f"{OP}: {name}: begins at an address that is not a multiple of 16 bytes: call .clone()")
