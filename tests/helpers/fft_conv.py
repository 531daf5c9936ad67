"""Long convolutions' inputs, what they are compared with, and the rule by which."""
import torch

import tkq
from tkq.reference import long_convolution as reference
from tkq.testing import assert_2x

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = "u", "k", "d", "pre_gate", "post_gate"
# Beside torch.fft's in float32, whose error is nothing, a result has its own rounding and that of fp16 operands, eight
# times one after the other: of the largest number as many ulps of the result's type.
ULPS = {"bf16": 1, "fp16": 3}
# A whole sequence's error is that of the whole circle of 32768 points, also of what y has no part of: an impulse in the
# last token leaves one number of y, which may be a small one. Where one frequency is most of a result, its roundings to
# fp16 are alike in all numbers: emulated, du of 28 constant filters went beyond the rule 4 times, by up to 0.12 ulps.
WHOLE = {"ulps": 2, "bias_ulps": 1 / 8}
NOTHING: dict = {}
SUMS = 4e-3  # of a filter's gradient: relative to its length, error of fp16 operands
# Of split operands: more than torch.fft's rounded error, and of a filter's gradient. A product without a low part
# leaves off ten times as much.
SPLIT = 2e-5


def make(B, H, L, taps, dtype="bf16", gates="", d=False, device="cuda"):
    """{name: tensor or None} that require gradients. gates: "pre", "post", "pre post"."""
    g = torch.Generator(device).manual_seed(0)
    randn = lambda *shape: torch.randn(shape, device=device, generator=g)
    found = dict(u=randn(B, H, L).to(DTYPES[dtype]), k=randn(H, taps) / taps**0.5, d=randn(H) if d else None)
    found |= {f"{name}_gate": randn(B, H, L).to(DTYPES[dtype]) if name in gates.split() else None
              for name in ("pre", "post")}
    return {name: None if t is None else t.requires_grad_() for name, t in found.items()}


def check(given, causal=True, gradients=True, what="", precision="half", more=NOTHING):
    """By the 2x rule, each sequence by itself; a filter's gradient by its length. Split, as torch.fft in float32. more:
    what else `assert_2x` is told."""
    name = next(name for name, t in DTYPES.items() if t == given["u"].dtype)
    cast = lambda to: [None if t is None else to(t.detach()) for t in given.values()]
    call = lambda a: [*a[:3], causal, *a[3:]]
    split, allowed = precision == "split", {"ulps": ULPS[name]} | more
    y = tkq.fft_conv(*call(list(given.values())), precision)
    close = split_close if split else lambda *x: sequences_close(*x[:3], allowed, x[3])
    close(y, reference.fft_conv(*call(cast(torch.Tensor.double))), reference.fft_conv(*call(cast(torch.Tensor.float))),
          f"{what} y")
    if not gradients:
        return y
    g = torch.Generator(y.device).manual_seed(1)
    dy = torch.randn(y.shape, device=y.device, generator=g).to(y.dtype)
    leaves = {n: t for n, t in given.items() if t is not None}
    found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    truth, peer = (dict(zip(NAMES, reference.fft_conv_backward(to(dy), *call(cast(to))), strict=True))
                   for to in (torch.Tensor.double, torch.Tensor.float))
    for n, t in found.items():
        if n in ("k", "d"):
            filters_close(t, truth[n], f"{what} d{n}", SPLIT if split else SUMS)
        else:
            close(t, truth[n], peer[n], f"{what} d{n}")
    return y


def filters_close(ours, truth, what, most):
    """Each head's gradient by itself (of d, a number of each head, all of them)."""
    lengths = truth.norm(dim=-1), (ours.double() - truth).norm(dim=-1)
    for h, (length, error) in enumerate(zip(*(x.reshape(-1).tolist() for x in lengths), strict=True)):
        assert error <= most * length, f"{what} {h}: error {error / length:.2e}, allowed {most:.2e}"


def split_close(ours, truth, peer, what):
    """Each sequence's error, of its length, is that of float32's result rounded."""
    peer = peer.to(ours.dtype)
    length, error, allowed = (x.double().norm(dim=-1) for x in (truth, ours - truth, peer - truth))
    bad = ~(error <= 1.01 * allowed + SPLIT * length)
    assert not bad.any(), f"{what} {bad.nonzero()[0].tolist()}: error {(error / length)[bad][0]:.2e}, rounding's " \
                          f"{(allowed / length)[bad][0]:.2e}"


def sequences_close(ours, truth, peer, allowed, what):
    for b in range(ours.shape[0]):
        for h in range(ours.shape[1]):
            assert_2x(ours[b, h], truth[b, h], peer[b, h].to(ours.dtype), what=f"{what} {b} {h}", block=None, **allowed)
