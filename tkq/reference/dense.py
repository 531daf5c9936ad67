"""The matrix product and its epilogue in plain PyTorch: the path of CPU tensors, the oracle of the tests."""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tkq.runtime.call import autocast

_ACTIVATIONS = {"relu": torch.relu, "silu": F.silu, "gelu": F.gelu,
                "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@autocast.apart
def gemm(a: Tensor, b: Tensor, out_dtype: Optional[torch.dtype] = None, *, bias: Optional[Tensor] = None,
         activation: str = "", c: Optional[Tensor] = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """activation(alpha * a @ b + beta * c + bias), computed in float32 (float64 stays float64), rounded once.

    activation: "", "relu", "silu", "gelu", "gelu_tanh", or gated: "swiglu", "geglu", "geglu_tanh" of the columns
    (gate | up), the same with "_interleaved" of (gate 0, up 0, gate 1, ..)."""
    x = _upcast(a) @ _upcast(b)
    x = x if alpha == 1.0 else x * alpha
    x = x if c is None else x + beta * c.to(x.dtype)
    x = x if bias is None else x + bias.to(x.dtype)
    return activate(x, activation).to(out_dtype or a.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of this name, of a tensor."""
    if not activation:
        return x
    if activation in _ACTIVATIONS:
        return _ACTIVATIONS[activation](x)
    if ":" in activation:
        raise NotImplementedError(f"gemm: activation is {activation}, a function of device numbers: it runs on CUDA "
                                  "tensors only, and has no gradient")
    from tkq.reference.pointwise import gated  # which needs tkq.reference, which has this module's gemm

    name, interleaved, _ = activation.partition("_interleaved")
    return gated(name, x, None, "interleaved" if interleaved else "split")


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
