"""What the norms' public functions refuse, and in which words. Nothing is launched before."""
from typing import Optional

import torch
from torch import Tensor

from ..runtime import arguments
from ..runtime.call import check
from .backward.per_head_plan import MAX_D
from .spec import MAX_N

_KINDS = "rmsnorm", "layernorm", "rmsnorm_quant", "layernorm_quant"
_TENSORS = {kind: arguments.checker(kind, "x", "weight", "bias", "residual") for kind in _KINDS}
EPS = {kind: arguments.checker(kind, "eps") for kind in _KINDS}  # TypeError, ValueError unless eps is allowed


def norm(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor],
         residual: Optional[Tensor] = None, launched: bool = False) -> None:
    """Raises what `tkq.rmsnorm` and `tkq.layernorm` promise of tensors; launched: of a GPU's."""
    _TENSORS[kind](x, weight, bias, residual)
    check.rows(kind, MAX_N, x, dict(weight=weight, bias=bias), dict(residual=residual), launched)


def options(kind: str, weight: Optional[Tensor], weight_offset: float, prenorm: bool,
            residual_dtype: Optional[torch.dtype]) -> None:
    """Options that would do nothing."""
    if weight is None and weight_offset:
        raise ValueError(f"{kind}: weight_offset is {weight_offset}, but there is no weight that it could be added to")
    if residual_dtype is not None and not prenorm:
        raise ValueError(f"{kind}: residual_dtype is {residual_dtype}, but the sum is returned with prenorm=True only")


def gradient_of_heads(kind: str, x: Tensor, weight: Optional[Tensor]) -> None:
    """A gradient is recorded: what its kernel cannot do is said now."""
    if weight is not None and weight.dim() == 2 and x.shape[-1] > MAX_D:
        raise NotImplementedError(f"{kind}: a gradient with a weight for each head: x: got heads of {x.shape[-1]} "
                                  f"columns, allowed are 1 to {MAX_D}")
