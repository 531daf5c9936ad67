"""norm_backward: the gradients of rmsnorm and layernorm, from torch tensors to one launch."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ...dtypes import WIDTH
from ...reference import norms_backward
from ...rows.persistent import launch as rows
from ...rows.persistent.spec import MAX_ROWS, RowSpec, Stream
from ...runtime.call import check, dtypes
from ..spec import KINDS, MAX_N
from . import launch

_CLASSES = {"rmsnorm": "RMSNormBackward", "layernorm": "LayerNormBackward"}
_SUMS = {"rmsnorm": (1,), "layernorm": (2,)}

# _Call by what a call looks like. An entry says that such a call was checked, so a hit needs no check of its own.
_calls: dict = {}


class _Call(NamedTuple):
    """A launcher, None where nothing is wanted, and which tensors it fills. dx, dresidual, dbias: their types, None for
    one that it does not: where dx and dresidual are wanted in one type, dresidual is dx."""

    run: Optional[object]
    dx: Optional[torch.dtype]
    dresidual: Optional[torch.dtype]
    dweight: bool
    dbias: Optional[torch.dtype]


def norm_backward(kind: str, dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor,
                  mean: Optional[Tensor] = None, *, dresidual_out: Optional[Tensor] = None, weight_offset: float = 0.0,
                  needs: tuple = (True, True, False), dx_dtype: Optional[torch.dtype] = None,
                  dresidual_dtype: Optional[torch.dtype] = None, dbias_dtype: Optional[torch.dtype] = None):
    """The backward pass of rmsnorm or layernorm over the rows of x, in one launch; see `tkq.norms.backward.kernel`.

    Column sums (dweight, dbias) are added up in float32 in an order that depends on M, N and the device alone: the same
    bits every time.

    Args:
        kind: "rmsnorm" or "layernorm".
        dy, x: (M, N), bf16, fp16 or fp32, not necessarily the same; the gradient of the output, and what was
            normalised. The last dimension is contiguous, rows may be any distance apart.
        weight: (N,), contiguous, or None for ones.
        rstd, mean: (M,) float32, what the forward divided by and subtracted; mean for layernorm only.
        dresidual_out: (M, N) gradient to be added to dx: that of x where it is an output too (prenorm).
        weight_offset: the weight that counts is weight + weight_offset.
        needs: of (dx, dweight, dbias), which are wanted. What is not costs nothing.
        dx_dtype: x's type where not given.
        dresidual_dtype: also return dx rounded to this type, as the gradient of a residual that was added to the input.
        dbias_dtype: the weight's type where not given, float32 without a weight.

    Returns:
        (dx, dweight, dbias, dresidual), contiguous, None for what is not wanted; dweight in the weight's type.
        dresidual is the tensor dx itself where both are wanted in one type.

    Raises:
        TypeError, ValueError: a dtype, shape, layout or device that is not as above.
        NotImplementedError: N > 262144, or M > 2^30.
        RuntimeError: a GPU other than Hopper.
    """
    if not needs[0] and dresidual_dtype is None:
        dresidual_out = None
    return (_launch if dy.is_cuda else _on_cpu)(kind, dy, x, weight, rstd, mean, dresidual_out, weight_offset, needs,
                                                dx_dtype, dresidual_dtype, dbias_dtype)


def _launch(kind, dy, x, weight, rstd, mean, dresidual_out, weight_offset, needs, dx_dtype, dresidual_dtype,
            dbias_dtype):
    key = _key(kind, dy, x, weight, rstd, mean, dresidual_out, weight_offset, needs, dx_dtype, dresidual_dtype,
               dbias_dtype)
    call = _calls.get(key)
    if call is None:
        _check(kind, dy, x, weight, rstd, mean, dresidual_out)
        call = _calls[key] = _call(kind, dy, x, weight, dresidual_out, weight_offset, needs, dx_dtype, dresidual_dtype,
                                   dbias_dtype)
    M, N, device = x.shape[0], x.shape[1], x.device
    dx = torch.empty(M, N, dtype=call.dx, device=device) if call.dx else None
    dresidual = torch.empty(M, N, dtype=call.dresidual, device=device) if call.dresidual else None
    make = torch.empty if M else torch.zeros
    dweight = make(N, dtype=weight.dtype, device=device) if call.dweight else None
    dbias = make(N, dtype=call.dbias, device=device) if call.dbias else None
    if M and call.run:
        call.run((dy, x) if dresidual_out is None else (dy, x, dresidual_out), _given(dx, dresidual),
                 None if weight is None else (weight,), (rstd,) if mean is None else (rstd, mean), None,
                 _given(dweight, dbias))
    if dresidual_dtype is not None and dresidual is None:
        dresidual = dx
    return dx, dweight, dbias, dresidual


def _given(*tensors):
    return tuple(t for t in tensors if t is not None) or None


def _bias_dtype(weight, dbias_dtype):
    return dbias_dtype or (torch.float32 if weight is None else weight.dtype)


def _key(kind, dy, x, weight, rstd, mean, dresidual_out, *rest):
    """Everything that the checks, the spec and the alignment depend on. Strides count by their multiples of 16 bytes,
    and by whether rows overlap nothing."""
    w = weight is not None and (weight.dtype, weight.shape, weight.stride(), weight.device, weight.data_ptr() & 15)
    m = mean is not None and (mean.dtype, mean.shape == rstd.shape, mean.stride(), mean.device)
    d = dresidual_out is not None and (*_look(dresidual_out), dresidual_out.shape == x.shape)
    return (kind, *_look(dy), *_look(x), dy.shape == x.shape, x.dim(), x.shape[-1], x.shape[0] > 1,
            x.shape[0] > MAX_ROWS, rstd.dtype, rstd.shape[0] == x.shape[0], rstd.dim(), rstd.stride(), rstd.device,
            w, m, d, *rest)


def _look(t):
    stride = t.stride()
    return t.dtype, t.device, t.data_ptr() & 15, stride[0] & 7, stride[-1]


def _call(kind, dy, x, weight, dresidual_out, weight_offset, needs, dx_dtype, dresidual_dtype, dbias_dtype) -> _Call:
    dx = (dx_dtype or x.dtype) if needs[0] else None
    dresidual = None if dresidual_dtype == dx else dresidual_dtype
    dweight = bool(needs[1]) and weight is not None
    dbias = _bias_dtype(weight, dbias_dtype) if needs[2] else None
    spec = spec_of(kind, dy, x, weight, dresidual_out, weight_offset, dx, dresidual, dweight, dbias)
    run = launch.launcher(spec, x.device) if spec.stores or spec.columns else None
    return _Call(run, dx, dresidual, dweight, dbias)


def spec_of(kind, dy, x, weight, dresidual_out, weight_offset, dx, dresidual, dweight, dbias) -> RowSpec:
    """What has to be compiled. dx, dresidual, dbias: their types, None for what is not wanted; dweight: is it?"""
    loads = [("dy", dy), ("x", x)] + ([] if dresidual_out is None else [("dresidual_out", dresidual_out)])
    stores = tuple(Stream(name, dtypes.name_of(t)) for name, t in (("dx", dx), ("dresidual", dresidual)) if t)
    weights = () if weight is None else (rows.stream("weight", weight),)
    columns = (Stream("dweight", weights[0].dtype),) if dweight else ()
    columns += (Stream("dbias", dtypes.name_of(dbias)),) if dbias else ()
    N, tensors = x.shape[1], [t for _, t in loads]
    vector = rows.vector(N, tensors, max([s.width // 8 for s in stores], default=1))
    return RowSpec(
        "tkq.norms.backward.kernel", _CLASSES[kind], N, tuple(rows.stream(name, t) for name, t in loads), stores,
        weights,
        ("rstd", "mean") if kind == "layernorm" else ("rstd",), (), columns, vector, rows.bulk(N, tensors),
        _SUMS[kind] if stores else (), (("weight_offset", float(weight_offset)),) if weight_offset else ())


def _check(kind, dy, x, weight, rstd, mean, dresidual_out):
    """Raises what `norm_backward` promises."""
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, allowed are {', '.join(KINDS)}")
    check.dtype("x", x, tuple(WIDTH))
    check.rank("x", x, 2)
    M, N = x.shape
    if not 1 <= N <= MAX_N or M > MAX_ROWS:
        raise NotImplementedError(f"norm_backward: x: got shape ({M}, {N}), allowed are 1 to {MAX_N} columns and at "
                                  f"most {MAX_ROWS} rows")
    if kind == "rmsnorm" and mean is not None:
        raise ValueError("mean: rmsnorm has none")
    rows, numbers = (tuple(WIDTH), (M, N)), (("fp32",), (M,))
    given = [("dy", dy, *rows), ("dresidual_out", dresidual_out, *rows), ("x", x, *rows), ("rstd", rstd, *numbers),
             ("mean", mean, *numbers), ("weight", weight, tuple(WIDTH), (N,))]
    needed = ("dy", "x", "rstd", "mean") if kind == "layernorm" else ("dy", "x", "rstd")
    check.each(*(one for one in given if one[1] is not None or one[0] in needed))


def _on_cpu(kind, dy, x, weight, rstd, mean, dresidual_out, weight_offset, needs, dx_dtype, dresidual_dtype,
            dbias_dtype):
    """By the reference; float64 is allowed here."""
    dx, dweight, dbias = norms_backward.norm_backward(kind, dy, x, weight, rstd, mean, dresidual_out, weight_offset)
    dx_dtype = dx_dtype or x.dtype
    rounded = dx.to(dx_dtype) if needs[0] else None
    dresidual = None
    if dresidual_dtype is not None:
        dresidual = rounded if needs[0] and dresidual_dtype == dx_dtype else dx.to(dresidual_dtype)
    return (rounded, dweight.to(weight.dtype) if needs[1] and weight is not None else None,
            dbias.to(_bias_dtype(weight, dbias_dtype)) if needs[2] else None, dresidual)
