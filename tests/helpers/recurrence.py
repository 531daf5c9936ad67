"""Scans' inputs, what they are compared with, and the rule by which."""
import torch

import tkq
from tests.helpers.convolution import DTYPES, gradient
from tkq.reference import recurrence as reference
from tkq.testing import assert_2x


def make(B, T, C, dtype="bf16", *, time=False, state="fp32", device="cuda"):
    """(a, b, initial_state) that require gradients. a: from -1 to 1, a tenth of it 0, 1 and -1. state: its dtype, None:
    there is none."""
    g = torch.Generator(device).manual_seed(0)
    randn = lambda: torch.randn((B, C, T) if time else (B, T, C), device=device, generator=g)
    a, b = randn().tanh(), randn()
    a = torch.where(randn().abs() < 0.13, a.sign() * (a.abs() > 0.6), a)
    a, b = (x.to(DTYPES[dtype]) for x in (a, b))
    a, b = (a.mT, b.mT) if time else (a, b)
    h0 = None if state is None else torch.randn(B, C, device=device, generator=g).to(DTYPES[state])
    return [None if t is None else t.requires_grad_() for t in (a, b, h0)]


def check(a, b, state=None, *, reverse=False, what=""):
    """Forward and backward, by the 2x rule, with the final state. Returns (h, final state, gradients)."""
    given = [t for t in (a, b, state) if t is not None]
    h, final = tkq.scan(a, b, state, reverse, True)
    assert h.dtype == a.dtype and final.dtype == torch.float32 and h.shape == a.shape
    dh, dfinal = gradient(h), gradient(final, 2)
    found = torch.autograd.grad((h, final), given, (dh, dfinal))
    with torch.no_grad():
        judged = {}
        for name, to in (("truth", torch.Tensor.double), ("peer", torch.Tensor.float)):
            cast = [None if t is None else to(t.detach()) for t in (a, b, state)]
            values = reference.scan(*cast, reverse)
            through = values[0] if name == "truth" else values[0].to(a.dtype)  # what is saved is rounded
            gradients = reference.scan_backward(to(dh), to(dfinal), cast[0], to(through), cast[2], reverse)
            judged[name] = *values, *gradients[:len(given)]
    names = "h", "final", "da", "db", "dstate"
    for name, ours, truth, peer in zip(names, (h, final, *found), judged["truth"], judged["peer"]):
        ulps = 2 if ours.dtype == torch.float32 else 1
        assert_2x(ours, truth, peer.to(ours.dtype), ulps=ulps, what=f"{what} {name}")
    return h, final, found
