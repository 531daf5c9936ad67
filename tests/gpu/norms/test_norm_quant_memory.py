"""The norms that quantise, on the GPU: every way for x to lie in memory, no rows at all, the same bits every time."""
import pytest
import torch

import tkq
from tests.gpu.norms.test_norm_quant import check_quantised
from tests.helpers.norms.options import DTYPES, EPS, KINDS, make, poison  # noqa: F401  a fixture

GRANULARITIES = pytest.mark.parametrize("granularity", ["row", "1x128"])


def call(kind, x, extra, granularity, **more):
    return getattr(tkq, kind + "_quant")(x, **extra, eps=EPS, granularity=granularity, **more)


def same(found, wanted):
    bits = lambda t: t.contiguous().view(torch.uint8)
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(found, wanted, strict=True))


@GRANULARITIES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 1000), (0, 131072)])
def test_no_rows(kind, granularity, shape):
    x, extra = make(shape, "bf16", weight="bf16", residual="bf16")
    q, scale, h = call(kind, x, extra, granularity, prenorm=True)
    assert q.shape == h.shape == shape and q.dtype == torch.float8_e4m3fn
    assert scale.shape == (0, 1 if granularity == "row" else -(-shape[-1] // 128))


@pytest.mark.slow
@GRANULARITIES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x, N, room, first", [
    ("bf16", 1024, 1032, 8), ("bf16", 1024, 1026, 1), ("bf16", 1001, 1009, 3), ("fp32", 4096, 4100, 4),
    ("bf16", 16384, 16408, 16), ("bf16", 131072, 131080, 8), ("bf16", 7, 16, 1)])
def test_rows_with_a_stride_are_read_in_place(kind, granularity, x, N, room, first):
    """Around the views there is NaN: a read too far shows."""
    whole, extra = make((21, N), x, weight="fp32", residual=x)

    def view(t):
        wide = torch.full((21, room), float("nan"), device=t.device, dtype=DTYPES[x])
        return wide[:, first:first + N].copy_(t)

    given = {"weight": extra["weight"], "residual": view(extra["residual"])}
    check_quantised(kind, view(whole), {"weight": extra["weight"]}, granularity, "x")
    check_quantised(kind, view(whole), given, granularity, "x and residual")


@GRANULARITIES
@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions(kind, granularity):
    """Scales have a row for each row; of views without a single row stride they are those of a copy."""
    x, extra = make((3, 5, 2, 256), "bf16", weight="bf16")
    wanted = call(kind, x.reshape(-1, 256), extra, granularity)
    q, scale = call(kind, x, extra, granularity)
    assert q.shape == x.shape and same((q.view(-1, 256), scale), wanted)
    for view in (x.permute(2, 0, 1, 3), x[:, 1:3], x[:1].expand(4, 5, 2, 256), x[0, 0, :1].expand(7, 256)):
        q, scale = call(kind, view, extra, granularity)
        other, other_scale = call(kind, view.contiguous(), extra, granularity)
        assert q.shape == view.shape and q.is_contiguous() and same((q, scale), (other, other_scale))


@pytest.mark.slow
@GRANULARITIES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N, vectors", [(1000, "bf16"), (16384, "fp32"), (131072, "bf16"), (262144, "fp32")])
def test_the_same_bits_every_time(kind, granularity, N, vectors):
    x, extra = make((77, N), "bf16", weight=vectors, bias=vectors, residual="bf16")
    first = call(kind, x, extra, granularity, prenorm=True)
    for _ in range(10):
        assert same(call(kind, x, extra, granularity, prenorm=True), first)
