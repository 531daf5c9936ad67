"""Convolutions' inputs, what they are compared with, and the rule by which."""
from dataclasses import dataclass
from typing import Optional

import torch

import tkq
from tkq.reference import convolution as reference
from tkq.testing import assert_2x

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = "x", "weight", "bias", "initial_state"


@dataclass(frozen=True)
class Options:
    """weight: dtype of weight and bias, None: as x. states: how many initial ones. time: are tokens contiguous?"""

    weight: Optional[str] = None
    bias: bool = True
    states: Optional[int] = None
    time: bool = False
    scale: float = 1.0
    device: str = "cuda"


def make(B, S, C, W=4, dtype="bf16", **options):
    """(x, weight, bias, initial_state) that require gradients; None of what is not there. options: as `Options`."""
    o = Options(**options)
    g = torch.Generator(o.device).manual_seed(0)
    randn = lambda *shape: torch.randn(shape, device=o.device, generator=g)
    of_x, of_weight = DTYPES[dtype], DTYPES[o.weight or dtype]
    x = (randn(B, C, S).mT if o.time else randn(B, S, C)).mul(o.scale).to(of_x)
    state = None if o.states is None else randn(o.states, C, W - 1).mul(o.scale).to(of_x)
    found = x, randn(C, W).div(W**0.5).to(of_weight), randn(C).to(of_weight) if o.bias else None, state
    return [None if t is None else t.requires_grad_() for t in found]


def gradient(x, seed=1):
    g = torch.Generator(x.device).manual_seed(seed)
    return torch.randn(x.shape, device=x.device, generator=g).to(x.dtype)


def check(x, weight, bias=None, state=None, *, activation="silu", cu=None, dfinal=False, heads=(0, 128)):
    """Forward and backward, by the 2x rule. Returns (y, final state, the gradients)."""
    given = [t for t in (x, weight, bias, state) if t is not None]
    y, final = tkq.causal_conv1d(x, weight, bias, activation, state, True, cu, None, *heads)
    dy = gradient(x)
    wanted = [dy] if not dfinal else [dy, gradient(final, 2)]
    found = torch.autograd.grad([y, final][:len(wanted)], given, wanted)
    with torch.no_grad():
        leaves = [None if t is None else t.detach() for t in (x, weight, bias, state)]
        judged = {}
        for name, to in (("truth", torch.Tensor.double), ("peer", torch.Tensor.float)):
            cast = [None if t is None else to(t) for t in leaves]
            forward = reference.causal_conv1d(*cast[:3], activation, cast[3], cu, *heads)
            backward = reference.causal_conv1d_backward(to(dy), to(wanted[1]) if dfinal else None, *cast[:3],
                                                        activation, cast[3], cu, *heads)
            judged[name] = [*forward, *(t for t in backward if t is not None)]
    names = ["y", "final", *(f"d{n}" for n, t in zip(NAMES, leaves, strict=True) if t is not None)]
    tokens = x.shape[0] * x.shape[1]
    for name, ours, truth, peer in zip(names, (y, final, *found), judged["truth"], judged["peer"], strict=True):
        sums = tokens**0.5 if name in ("dweight", "dbias") else 0.0  # of as many products, whatever cancels
        ulps = 2 if ours.dtype == torch.float32 else 1
        assert ours.dtype == (x.dtype if name in ("y", "dx") else ours.dtype)
        assert_2x(ours, truth, peer.to(ours.dtype), ulps=ulps + dfinal, cancelled=4 * sums, what=name)
    return y, final, found
