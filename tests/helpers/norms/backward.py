"""norm_backward's inputs, and its results by the 2x rule."""
import contextlib

import torch

from tkq.norms.backward.ops import norm_backward
from tkq.reference import norms_backward
from tkq.testing import assert_2x

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = ["rmsnorm", "layernorm"]
EPS = 1e-5
NAN = float("nan")


@contextlib.contextmanager
def poisoned():
    """torch.empty gives NaN: outputs and the workspace are full of it before the kernel runs."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def statistics(kind, x):
    """(rstd, mean or None), as the forward saves them."""
    wide = x.double()
    mean = wide.mean(-1) if kind == "layernorm" else None
    centred = wide - mean[:, None] if kind == "layernorm" else wide
    rstd = torch.rsqrt(centred.square().mean(-1) + EPS)
    return rstd.float(), None if mean is None else mean.float()


def make(M, N, dy="bf16", x="bf16", weight="bf16", scale=1.0, mean=0.0, seed=0):
    g = torch.Generator("cuda").manual_seed(seed + N)

    def randn(dtype, *shape):
        return torch.randn(shape, device="cuda", generator=g).to(DTYPES[dtype])

    return (randn(dy, M, N), (torch.randn(M, N, device="cuda", generator=g) * scale + mean).to(DTYPES[x]),
            None if weight is None else randn(weight, N))


def judge(kind, dy, x, weight, rstd, mean, got, *, dresidual_out=None, weight_offset=0.0, what=""):
    """Each result against float64, beside the same formula in float32 and one rounding."""
    truth, peer = (norms_backward.norm_backward(kind, *[None if t is None else t.to(dtype) for t in (
        dy, x, weight, rstd, mean, dresidual_out)], weight_offset) for dtype in (torch.float64, torch.float32))
    dx, dweight, dbias, dresidual = got
    # dx of a row of one number is 0, and PyTorch has just that: it takes g from its mean, which it is, before it
    # multiplies. Ours is g * rstd, exact, less the rounded one; with one number eps makes rstd 300
    gradient = dy if weight is None else dy.float() * (weight.float() + weight_offset)
    terms = (gradient * rstd[:, None]).abs().max().item() if (kind, x.shape[1]) == ("layernorm", 1) else 0.0
    for name, ours, i, ulps in (("dx", dx, 0, 2), ("dresidual", dresidual, 0, 2), ("dweight", dweight, 1, 4),
                                ("dbias", dbias, 2, 4)):
        if ours is not None:
            assert_2x(ours, truth[i], peer[i].to(ours.dtype), ulps=ulps, what=f"{kind} {name} {what}",
                      cancelled=terms * (i == 0))


def check(kind, dy, x, weight=None, what="", **options):
    rstd, mean = statistics(kind, x)
    options.setdefault("needs", (True, weight is not None, kind == "layernorm"))
    with poisoned():
        got = norm_backward(kind, dy, x, weight, rstd, mean, **options)
    given = {k: v for k, v in options.items() if k in ("dresidual_out", "weight_offset")}
    judge(kind, dy, x, weight, rstd, mean, got, what=f"{tuple(x.shape)} {what}", **given)
    return got
