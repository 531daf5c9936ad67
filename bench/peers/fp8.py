"""The baselines of float8 GEMM, for bench/ops/fp8_gemm.py and bench/tune/fp8.py. A GEMM is called with
(a, b, scale_a, scale_b) as tkq takes them, and the two scales again in the order of memory that torch wants."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from bench.peers import deepgemm, gemm

FP8 = torch.float8_e4m3fn


def torch_mm(kind: str) -> Callable:
    """torch's own (cuBLASLt, CUTLASS): f(a, b, scale_a, scale_b), to bf16, fast accumulation but for blocks."""
    if kind in ("tensor", "row"):
        return lambda a, b, sa, sb: torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16, use_fast_accum=True)
    wide = F.ScalingType.BlockWise128x128 if kind == "1x128_128x128" else F.ScalingType.BlockWise1x128
    one = F.ScalingType.BlockWise1x128

    def run(a, b, sa, sb):
        return F.scaled_mm(a, b, sa, one, sb, wide, output_dtype=torch.bfloat16)

    return run


def torch_scales(kind: str, scale_a, scale_b):
    """The same scales in the orders of memory, or b's by columns, of which torch takes the first that it does not
    refuse."""
    if kind not in ("1x128_128x128", "1x128_1x128"):
        return [(scale_a, scale_b)]
    tall = scale_a.t().contiguous().t()
    tall = tall.as_strided(tall.shape, (1, tall.shape[0]))  # of one row, too
    down, across = scale_b.t().contiguous().t(), scale_b.contiguous()
    padded = F.pad(scale_b, (0, 0, 0, -scale_b.shape[0] % 4)).t().contiguous().t()
    found = [(tall, down), (tall, across), (tall, padded)]
    # of blocks it may be square
    return found if kind == "1x128_128x128" else [*found, (tall, across.t()), (tall, down.t())]


_order: dict = {}  # kind -> which of torch_scales torch takes on this machine


def both_orders(kind: str, given: tuple) -> tuple:
    """(a, b, scale_a, scale_b) and torch's scale_a and scale_b."""
    a, b, *scales = given
    orders = torch_scales(kind, *scales)
    if kind not in _order:
        _order[kind] = 0
        for i, (sa, sb) in enumerate(orders):
            try:
                torch_mm(kind)(a, b, sa, sb)
                _order[kind] = i
                break
            except Exception as problem:
                print(f"torch, {kind}, order {i}: {str(problem)[:200]}".replace("\n", " "), flush=True)
    return (*given, *orders[_order[kind]])


def _torch(kind: str) -> Callable:
    f = torch_mm(kind)
    return lambda a, b, sa, sb, torch_a, torch_b: f(a, b, torch_a, torch_b)


def _quack(tuned: bool) -> Callable:
    """It knows one factor for all, on the host: the scales are left out, which costs it nothing."""
    def make(kind: str) -> Callable:
        if kind != "tensor":
            raise NotImplementedError(f"QuACK has no product of scales by {kind}")
        run = gemm.quack(tuned)
        return lambda a, b, *_: run(a, b)

    return make


def _plain(kind: str) -> Callable:
    """tkq's own product without an epilogue: what a fused one is to cost no more than."""
    import tkq

    return lambda a, b, sa, sb, *_: tkq.fp8_gemm(a, b, sa, sb)


PEERS = {"fp8_gemm": {"torch": _torch, "QuACK": _quack(False), "QuACK tuned": _quack(True),
                      deepgemm.NAME: deepgemm.fp8},
         "fp8_plain": {"plain": _plain}}


def names(kind: str) -> tuple[str, ...]:
    """The libraries that have products with such scales."""
    deep = (deepgemm.NAME,) if kind in ("1x128_128x128", "1x128_1x128") else ()
    return (*bound_names(kind), *deep)


def bound_names(kind: str) -> tuple[str, ...]:
    """Those of them that a bound is beside."""
    return ("torch", "QuACK", "QuACK tuned") if kind == "tensor" else ("torch",)


def operands(m: int, n: int, k: int, kind: str, seed: int) -> tuple:
    """randn, quantised by torch: (a, b, scale_a, scale_b)."""
    g = torch.Generator("cuda").manual_seed(seed)

    def quantised(rows, block):
        x = torch.randn(rows, k, device="cuda", generator=g)
        down, right = (b or size for b, size in zip(block, x.shape))
        x = x.view(rows // down, down, k // right, right)
        scale = x.abs().amax((1, 3), keepdim=True) / 448
        return (x / scale).to(FP8).view(rows, k), scale.view(rows // down, k // right)

    of_a, of_b = {"tensor": ((0, 0),) * 2, "row": ((1, 0),) * 2, "1x128_128x128": ((1, 128), (128, 128)),
                  "1x128_1x128": ((1, 128),) * 2}[kind]
    (a, sa), (b, sb) = quantised(m, of_a), quantised(n, of_b)
    if kind == "tensor":
        return a, b.t(), sa.view(()), sb.view(())
    return a, b.t(), sa.t().contiguous().t(), sb.t() if kind == "row" else sb.t().contiguous()
