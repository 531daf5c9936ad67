"""What a caller may pass to hedgehog."""
from tkq.linear_attention.check import MOST, check_layouts
from tkq.linear_attention.hedgehog.spec import FEATURES, HEAD_DIMS
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "hedgehog"
NAMES = "q", "k", "v", "q_map", "k_map", "linear_factor", "window_factor"  # the tensors

_tensors = arguments.checker(OP, *NAMES)
WINDOW = 64
_size = arguments.checker(OP, "window_size")


def check_window(size):
    """Raises what hedgehog promises of window_size."""
    if _size(size) != WINDOW:
        raise NotImplementedError(f"{OP}: window_size: is {size}, supported is {WINDOW}")


def check_call(*given):
    """Raises what hedgehog promises of its tensors (NAMES), but for strides."""
    q, k, v, q_map, k_map, linear, window = _tensors(*given)
    check.same_device(**dict(zip(NAMES, given)))
    for name, x in zip(NAMES[1:5], (k, v, q_map, k_map)):
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} is {x.dtype}, q is {q.dtype}; q, k, v and the maps must have one dtype")
    check.rank(f"{OP}: q", q, 4)
    check.rank(f"{OP}: q_map", q_map, 3)
    (B, _, H, D), F = q.shape, q_map.shape[2]
    for name, x, shape in zip(NAMES[1:], (k, v, q_map, k_map, linear, window),
                              (q.shape, q.shape, (H, D, None), (H, D, F), (H,), (H,))):
        check.shape(f"{OP}: {name}", x, shape)
    for name, size, what, allowed in (("q", D, "columns", HEAD_DIMS), ("q_map", F, "columns", FEATURES)):
        if size not in allowed:
            raise NotImplementedError(f"{OP}: {name}: has {size} {what}, supported are {allowed[0]} and {allowed[1]}")
    for size, what in ((B, "sequences"), (H, "heads")):
        if size > MOST:
            raise NotImplementedError(f"{OP}: q: has {size} {what}, supported are up to {MOST}")


def check_hedgehog_layouts(q, k, v, q_map, k_map):
    """What TMA cannot take of these: strides and addresses."""
    check_layouts(OP, q, k, v, names="qkv")
    check_layouts(OP, q_map[None], k_map[None], names=NAMES[3:5])
