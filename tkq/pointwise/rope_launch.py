"""From torch tensors to a launch of the rotary kernel."""
import math
from typing import NamedTuple

from .. import runtime
from ..runtime.call import alloc, dtypes
from ..runtime.call.dispatch import Shapes, added
from ..runtime.call.replay import CallCache
from ..runtime.device import arch
from .plan import MAX_UNITS, RopeConfig, columns, plan_rope
from .rope_check import Rotation, check_call
from .spec import RopeSpec

# Launchers by what a call looks like; as many as there are kinds of call. What varies within a kind, the kernel checks.
_launchers: dict = {}
# Of calls with positions from an integer, dispatchers of launchers for whole accesses, which refuse what they cannot
# take: by what a dispatcher does not look at, which are heads and the kind of pairs.
_launch_cache: dict = {}
call_cache = CallCache()  # of `launch_simple`: x, x2, cos, sin, offset, interleaved, inverse, in_place


def launch_simple(rotation, x, x2=None, in_place=False):
    """(out, out2) of x (B, S, H, D) rotated by a table of rows for positions offset .. offset + S, and of x2 (B, S, H2,
    D) if there is one, with as little Python as it takes; None where that is not known yet, or was refused, or is not
    what the rotation says. in_place: out is x."""
    try:
        cos, sin, offset, offsets, ids, starts, interleaved, inverse = rotation
        batch, length, heads, width = shape = tuple(x.shape)
        rows, half = cos.shape
        heads2 = 0 if x2 is None else x2.shape[2]
        most = heads if heads > heads2 else heads2
        known = _launch_cache[interleaved, most if most < 8 else 8]
        if (0 <= offset <= rows - length and 2 * batch * length * most * width <= MAX_UNITS
                and offsets is ids is starts is None):
            make, pitch, dtype, out2 = alloc.maker(x.get_device()), heads * width, x.dtype, None
            if not in_place:
                out = make(shape, (length * pitch, pitch, width, 1), dtype)
            elif width == 2 * half and x.is_contiguous():
                out = x
            else:
                return None
            if heads2:
                pitch = heads2 * width
                out2 = make((batch, length, heads2, width), (length * pitch, pitch, width, 1), dtype)
            arguments = x, out, x2, out2, cos, sin, None, None, offset, -1.0 if inverse else 1.0
            known(*arguments)
        else:
            return None
    except Exception:  # nothing is known, or it was refused
        return None
    call_cache.add((x, x2, cos, sin, offset, interleaved, inverse, in_place), known, arguments, (out, out2))
    return out, out2


def launch(rotation, x, out, x2=None, out2=None, config=None):
    """out = x rotated, and out2 = x2 if there is one.

    rotation: a Rotation, or the plain tuple of its fields. config: another than the plan's, for tests and tuning."""
    try:
        _run(rotation, x, out, x2, out2, config)
    except Exception:
        # The compiled function checks types, shapes, strides, addresses and devices; words for a user are found when
        # they are needed.
        check_call((x,) if x2 is None else (x, x2), Rotation(*rotation))
        raise


def _run(rotation, x, out, x2, out2, config):
    cos, sin, offset, offsets, ids, starts, interleaved, inverse = rotation
    *tokens, heads, width = x.shape
    *rows, half = cos.shape
    if offsets is None and ids is None and starts is None and len(rows) == 1 and len(tokens) == 2:
        kind, positions, index = "offset", None, None
        if not 0 <= offset <= rows[0] - tokens[1]:
            raise ValueError  # check_call has the words
    else:
        cos, sin, positions, kind = _positions(rotation, tokens)
        index = None if positions is None else positions.dtype
    size = x.itemsize
    bits = 16 | x.data_ptr() | (width | _strides(x) | (2 * half if interleaved else half)) * size
    elements = x.numel()
    if elements and not cos.shape[-2]:
        raise ValueError
    if x2 is not None:
        bits |= x2.data_ptr() | _strides(x2) * size
        heads = max(heads, x2.shape[-2])
        elements += x2.numel()
    vector = _fitting((bits & -bits) // size, interleaved, cos, sin)
    key = (kind, x.dtype, cos.dtype, index, half, width, vector, len(tokens), heads if heads < 8 else 8, interleaved,
           x2 is None, x.get_device(), config)
    kernel = _launchers.get(key)
    if kernel is None or elements > MAX_UNITS:
        tensors = (x,) if x2 is None else (x, x2)
        check_call(tensors, Rotation(*rotation))
        kernel = _checked(key, tensors, cos, bool(interleaved), vector, kind, index, config)
    if elements:
        given = x, out, x2, out2, cos, sin, positions, starts, offset, -1.0 if inverse else 1.0
        if kind == "offset" and len(tokens) == 2 and vector * size == 16 and config is None:  # the plan's own config
            place = bool(interleaved), min(8, heads)
            _launch_cache[place] = added(_launch_cache.get(place), kernel.run, given, Shapes({}, {}, columns=(0, 4)))
        kernel.run(*given)


def _strides(x):
    """A number that has every power of two that all strides but the last have."""
    strides = x.stride()
    return strides[0] | strides[-3] | strides[-2]


def _fitting(vector, interleaved, cos, sin):
    """The elements of x in one access, at most `vector`, for which cos and sin begin where they can be loaded."""
    size = cos.itemsize
    bits = cos.data_ptr() | sin.data_ptr() | (cos.stride()[0] | sin.stride()[0]) * size
    while bits & 15 and bits & (min(16, (vector // 2 if interleaved and vector > 1 else vector) * size) - 1):
        vector //= 2
    return vector


def _positions(rotation, tokens):
    """cos and sin as (rows, R / 2); offsets or ids or None; how a token finds its row.

    Raises a ValueError without words, which check_call has, for what the compiled function cannot see."""
    cos, sin, offset, offsets, ids, starts = rotation[:6]
    length = tokens[-1]
    if offset < 0 or ((offset or offsets is not None) and (ids is not None or cos.dim() == 3)):
        raise ValueError
    if starts is not None and (starts.shape[0] < 2 or not (offsets is None or len(offsets) == len(starts) - 1)):
        raise ValueError
    if cos.dim() == 3:
        batch = tokens[0] if len(tokens) == 2 else 1
        if cos.shape[0] not in (1, batch) or cos.shape[1] != length or sin.shape != cos.shape:
            raise ValueError
        same = cos.shape[0] == 1 and len(tokens) == 2  # for every sequence
        return cos.flatten(0, 1), sin.flatten(0, 1), None, "offset" if same else "token"
    if ids is not None:
        if ids.shape[-1] != length:
            raise ValueError
        return cos, sin, ids.expand(tokens), "ids"
    return cos, sin, offsets, "offset" if offsets is None else "offsets"


class _Kernel(NamedTuple):
    run: object
    spec: RopeSpec
    config: RopeConfig


def _checked(key, tensors, cos, interleaved, vector, kind, index, config):
    """The kernel for a call that was found right."""
    x, kernel = tensors[0], _launchers.get(key)
    if kernel is None:
        arch.require_hopper(x.device)
        rotary_dim, varlen = 2 * cos.shape[-1], x.dim() == 3
        spec = RopeSpec(dtypes.name_of(x.dtype), dtypes.name_of(cos.dtype), rotary_dim, x.shape[-1] - rotary_dim,
                        interleaved, vector, kind, index and dtypes.name_of(index), varlen, len(tensors))
        config = config or plan_rope(spec, max(t.shape[-2] for t in tensors))
        kernel = _launchers[key] = _Kernel(runtime.function(recipe(spec, config)), spec, config)
    groups = sum(-(-t.shape[-2] // kernel.config.heads_each) for t in tensors)
    units = math.prod(x.shape[:-2]) * groups * columns(kernel.spec).chunks
    if units > MAX_UNITS:
        raise NotImplementedError(f"rope: {units} units of work in one call, allowed are {MAX_UNITS}; split the batch")
    return kernel


def recipe(spec: RopeSpec, config: RopeConfig):
    """The recipe of a spec and the config that it runs with."""
    return runtime.Recipe("tkq.pointwise.rope:Rope", (spec, config))
