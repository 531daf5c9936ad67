"""torch.autocast: which ops it casts for, and where it must not reach.

As torch's, by what an op is: products cast (gemm, grouped_gemm, flash_attn, flash_attn_varlen, flex_attention,
linear_attn, gated_delta_rule, mamba2_ssd, their steps and ssd_step, hedgehog, based, linear_cross_entropy,
causal_conv1d and its step, fft_conv). The others keep the types they are given: norms, softmax, losses and scan, which
torch raises to float32, compute in float32 whatever they are given, and write it where they are asked to; fp8_gemm and
the quantisers have their types by name.
"""
import functools

import torch
from torch import Tensor

from .check import under_autocast

_CAST = (torch.float32, torch.bfloat16, torch.float16)
on = torch._C._is_any_autocast_enabled  # for some device: what is asked of every call. `lowered` asks the slow one


def lowered(*tensors):
    """The tensors in autocast's type, where it is on for the first one's device. As torch has it float64 stays, and so
    does what is no tensor; float8 too, which torch has no rule for."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "meta"
    if not under_autocast(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x for x in tensors)


def apart(reference):
    """For a reference in plain PyTorch, whose products autocast would round: it computes in the types that it says."""
    @functools.wraps(reference)
    def run(*args, **options):
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not kinds:
            return reference(*args, **options)
        # one is entered twice; an ExitStack Dynamo does not trace
        with torch.autocast(kinds[0], enabled=False), torch.autocast(kinds[-1], enabled=False):
            return reference(*args, **options)

    return run
