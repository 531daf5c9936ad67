"""What a caller may pass to based."""
from tkq.linear_attention.based.spec import FEATURE_DIM, VALUE_DIMS
from tkq.linear_attention.check import MOST
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "based"

_tensors = arguments.checker(OP, "q", "k", "v")
options = arguments.checker(OP, "scale", "use_norm")


def check_call(q, k, v):
    """Raises what based promises of its tensors, but for strides."""
    _tensors(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{OP}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v)
    (B, S, H, D), (HV, V) = q.shape, v.shape[2:]
    check.shape(f"{OP}: k", k, (B, S, H, D))
    check.shape(f"{OP}: v", v, (B, S, None, None))
    if not H or not HV or HV % H:
        raise ValueError(f"{OP}: v has {HV} heads, q has {H}; allowed are from 1 on, v's a multiple of q's")
    if D != FEATURE_DIM:
        raise NotImplementedError(f"{OP}: q: has {D} columns, supported are {FEATURE_DIM}, of which the second order "
                                  "has 136 features")
    if V not in VALUE_DIMS:
        raise NotImplementedError(f"{OP}: v: V is {V}, supported are multiples of 16 from {VALUE_DIMS[0]} to "
                                  f"{VALUE_DIMS[-1]}")
    for name, size, what in (("q", B, "sequences"), ("v", HV, "heads")):
        if size > MOST:
            raise NotImplementedError(f"{OP}: {name}: has {size} {what}, supported are up to {MOST}")
