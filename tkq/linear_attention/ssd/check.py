"""What a caller may pass to mamba2_ssd."""
from tkq.linear_attention.check import MOST, check_layouts
from tkq.linear_attention.spec import HEAD_DIMS, VALUE_DIMS
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "mamba2_ssd"
NAMES = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"  # the tensors

_tensors = arguments.checker(OP, *NAMES)
every_option = arguments.checker(OP, "checkpoint_every")
options = arguments.checker(OP, "dt_softplus", "dt_limit", "return_final_states")


def check_call(*given):
    """Raises what mamba2_ssd promises of its tensors (NAMES), but for strides."""
    x, dt, A, B, C, D, z, dt_bias, initial_states = _tensors(*given)
    check.same_device(**dict(zip(NAMES, given)))
    for name, tensor in (("B", B), ("C", C), ("z", z)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{OP}: {name} is {tensor.dtype}, x is {x.dtype}; x, B, C and z must have one dtype")
    for name, tensor in (("x", x), ("B", B)):
        check.rank(f"{OP}: {name}", tensor, 4)
    (batch, S, H, P), (G, N) = x.shape, B.shape[2:]
    check.shape(f"{OP}: B", B, (batch, S, None, None))
    if not H or not G or H % G:
        raise ValueError(f"{OP}: x has {H} heads, B has {G}; allowed are from 1 on, x's a multiple of B's")
    check.shape(f"{OP}: C", C, (batch, S, G, N))
    check.shape(f"{OP}: dt", dt, (batch, S, H))
    check.shape(f"{OP}: A", A, (H,))
    _check_others(x, N, D, z, dt_bias, initial_states)
    for name, size, columns, allowed in (("x", P, "P", VALUE_DIMS), ("B", N, "N", HEAD_DIMS)):
        if size not in allowed:
            raise NotImplementedError(f"{OP}: {name}: {columns} is {size}, supported are multiples of 16 from "
                                      f"{allowed[0]} to {allowed[-1]}")
    for size, what in ((batch, "sequences"), (H, "heads")):
        if size > MOST:
            raise NotImplementedError(f"{OP}: x: has {size} {what}, supported are up to {MOST}")


def _check_others(x, N, D, z, dt_bias, initial_states):
    batch, _, H, P = x.shape
    if D is not None:
        check.rank(f"{OP}: D", D, 1, 2)
        check.shape(f"{OP}: D", D, (H, P)[:D.dim()])
    if z is not None:
        check.shape(f"{OP}: z", z, x.shape)
    if dt_bias is not None:
        check.shape(f"{OP}: dt_bias", dt_bias, (H,))
    if initial_states is not None:
        check.shape(f"{OP}: initial_states", initial_states, (batch, H, P, N))


def check_ssd_layouts(x, B, C, z):
    """What TMA cannot take of these: strides and addresses."""
    check_layouts(OP, x, B, C, z, names=("x", "B", "C", "z"))
