"""heads_backward: the gradients of a norm with a weight for each head, from torch tensors to a launch."""
from typing import Optional

import torch
from torch import Tensor

from ... import runtime
from ...runtime.call import dtypes
from ...runtime.device import arch
from ..alignment import vector
from .per_head_plan import PerHeadSpec, blocks, plan

_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits


def recipe(spec: PerHeadSpec, config=None):
    return runtime.Recipe("tkq.norms.backward.per_head_kernel:PerHeadBackward", (spec, config or plan(spec)))


def heads_backward(kind: str, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Optional[Tensor] = None, *,
                   dresidual_out: Optional[Tensor], weight_offset: float, needs: tuple, dx_dtype: torch.dtype,
                   dresidual_dtype: Optional[torch.dtype], dbias_dtype: Optional[torch.dtype]):
    """(dx, dweight, dbias, dresidual) of rmsnorm or layernorm; None for what is not needed, and for dresidual without
    its type.

    dy, x, dresidual_out: (R, H, D), the last dimension contiguous. weight: (H, D). rstd, and layernorm's mean: (R * H,)
    float32. needs: of dx, dweight and dbias. Sums are added up in float32, in an order that depends on the shape and
    the device alone.

    Raises:
        NotImplementedError: D > 4096, or more than 2^30 rows.
    """
    R, H, D = x.shape
    if R * H > _MAX_ROWS:
        raise NotImplementedError(f"backward of {kind} with a weight for each head: got {R * H} rows, allowed are "
                                  f"{_MAX_ROWS}")
    dx = torch.empty(R * H, D, dtype=dx_dtype, device=x.device) if needs[0] else None
    dresidual = torch.empty(R * H, D, dtype=dresidual_dtype, device=x.device) if dresidual_dtype else None
    make = torch.empty if x.numel() else torch.zeros
    dweight = make(H * D, dtype=weight.dtype, device=x.device) if needs[1] else None
    dbias = make(H * D, dtype=dbias_dtype, device=x.device) if needs[2] else None
    results = [None if t is None else t.view(*shape) for t, shape in
               ((dx, x.shape), (dweight, (H, D)), (dbias, (H, D)), (dresidual, x.shape))]
    if x.numel() and any(t is not None for t in results):
        _run(kind, (dy, x, weight, rstd, mean, dresidual_out), (dx, dresidual, dweight, dbias), weight_offset)
    return tuple(results)


def _spec(kind, given, made, offset):
    (dy, x, weight, _, _, dresidual_out), (dx, dresidual, dweight, dbias) = given, made
    streams = [t for t in (dy, x, dresidual_out, dx, dresidual) if t is not None]
    names = (None if t is None else dtypes.name_of(t.dtype)
             for t in (dy, x, weight, dx, dresidual, dresidual_out, dweight, dbias))
    return PerHeadSpec(kind, x.shape[-1], *names, bool(offset), vector(streams, (weight,)))


def _run(kind, given, made, offset):
    """given: dy, x, weight, rstd, mean, dresidual_out. made: dx, dresidual, dweight, dbias."""
    x, spec = given[1], _spec(kind, given, made, offset)
    arch.require_hopper(x.device)
    config, (R, H, D) = plan(spec), x.shape
    count = blocks(config, R * H, H, arch.num_sms(x.device))
    shares = count * (config.threads // config.threads_per_row) // H

    def partial(total):
        return None if total is None else torch.empty(shares, H * D, dtype=torch.float32, device=x.device)

    dx, dresidual, dweight, dbias = made
    dy, *others = *given, dx, dresidual, partial(dweight), partial(dbias), dweight, dbias  # as `Operands` has them
    runtime.function(recipe(spec, config))(dy, tuple(others), offset or None, count)
