"""The backward of flash_attn against FA4 and cuDNN, including everything that a call launches.

    python -m bench.ops.attention_backward [--sections backward,gqa,deterministic] [--quick | --shapes 1024x64,4096x128]

Shapes: a sequence's length and the head dimension; B * S = 16384 and H * D = 2048, full and causal. gqa: one K/V head
to 4 query heads. deterministic: what that costs, beside our own as they usually are. FLOPs: 2.5 times the forward's. A
result is judged against the formula in float32 on two heads.
Results go to OUT/attention_backward.json after every case.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import torch

from bench.core import harness
from bench.core.accuracy import EQUAL
from bench.core.command import Bench, Job, main, mean_misses, rate_misses
from bench.core.results import Bound
from bench.ops.attention_forward import QUICK, SHAPES, TOKENS, WIDTH
from bench.peers import common
from tkq.reference import attention_backward as reference_attention
from tkq.testing.timing import relative_error

BF16 = torch.bfloat16
RIVALS, AT_LEAST, MEAN_AT_LEAST = ("FA4", "cuDNN"), 0.97, 1.02
WIDE_AT_LEAST = 440  # TFLOP/s at head_dim 256, S 8192
SAME_SHAPES = ((1024, 128), (4096, 128), (16384, 128), (4096, 64), (4096, 256))  # what determinism costs: no bound


@dataclasses.dataclass(frozen=True)
class Shape:
    """batch and, unless given, heads follow from length and dim; kv_heads: 0 for as many as query heads."""

    length: int
    dim: int
    causal: bool
    kv_heads: int = 0
    query_heads: int = 0

    @property
    def batch(self) -> int:
        return TOKENS // self.length

    @property
    def heads(self) -> int:
        return self.query_heads or WIDTH // self.dim

    @property
    def flops(self) -> float:
        return 10 * self.batch * self.heads * self.length**2 * self.dim * (0.5 if self.causal else 1)

    def __str__(self):
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads else "")
        return f"B{self.batch} S{self.length} {heads} D{self.dim} {'causal' if self.causal else 'full'}"


def jobs(section: str, shapes) -> Iterator[Job]:
    for length, dim in shapes:
        for causal in (False, True):
            shape = Shape(length, dim, causal, WIDTH // dim // 4 if section == "gqa" else 0)
            question = harness.Question(section, "attention_backward", str(shape), "TFLOP/s", shape.flops,
                                        Bound(RIVALS, AT_LEAST), equal_error=EQUAL)
            yield Job(question, ours(shape), "attention_backward", tuple(PEERS), inputs(shape), error(shape),
                      dict(shape=shape))


def deterministic(shapes) -> Iterator[Job]:
    for length, dim in shapes:
        for causal in (False, True):
            shape = Shape(length, dim, causal)
            question = harness.Question("deterministic", "attention_backward", str(shape), "TFLOP/s", shape.flops,
                                        alike=("FA4, deterministic",), equal_error=EQUAL)
            yield Job(question, ours(shape, same=True), "attention_backward_deterministic", tuple(SAME), inputs(shape),
                      error(shape), dict(shape=shape))


def inputs(shape: Shape) -> Callable[[int], tuple]:
    """i -> (do, q, k, v, o, lse), o and lse by our own forward, or by PyTorch's where we have none."""
    import tkq

    def forward(q, k, v):
        try:
            return tkq.flash_attn(q, k, v, causal=shape.causal, return_lse=True)
        except NotImplementedError:
            found = torch.ops.aten._scaled_dot_product_flash_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), 0.0, shape.causal)
            return found[0].transpose(1, 2), found[1]

    def make(i):
        g = torch.Generator("cuda").manual_seed(i)
        new = lambda h: torch.randn(shape.batch, shape.length, h, shape.dim, device="cuda", dtype=BF16, generator=g)
        q, do = new(shape.heads), new(shape.heads)
        k, v = new(shape.kv_heads or shape.heads), new(shape.kv_heads or shape.heads)
        return do, q, k, v, *forward(q, k, v)

    return make


def error(shape: Shape) -> Callable:
    """The largest relative error of dq, dk and dv of the first and the last K/V head of the first sequence."""

    def of(_, given, found):
        group = given[1].shape[2] // given[2].shape[2]
        worst = 0.0
        for h in (0, given[2].shape[2] - 1):
            queries, keys = range(h * group, (h + 1) * group), slice(h, h + 1)
            wanted = _wanted(given, queries, keys, shape.causal)
            for a, b, part in zip(found, wanted, (slice(queries.start, queries.stop), keys, keys)):
                worst = max(worst, relative_error(a[:1, :, part], b))
        return worst

    return of


def _wanted(given, queries: range, keys: slice, causal: bool) -> tuple:
    """The gradients of one K/V head by the formula in float32: of a query head at a time, whose matrices are large."""
    do, q, k, v, o, lse = given
    k, v = (x[:1, :, keys].float() for x in (k, v))
    parts = []
    for i in queries:
        one = slice(i, i + 1)
        parts.append(reference_attention.flash_attn_backward(
            do[:1, :, one].float(), q[:1, :, one].float(), k, v, o[:1, :, one].float(), lse[:1, one], None, causal))
    dq, dk, dv = zip(*parts)
    return torch.cat(dq, 2), sum(dk), sum(dv)


# ---- the candidates --------------------------------------------------------------------------------


def ours(shape: Shape, config=None, same=False) -> Callable:
    """same: gradients that are the same in each run."""
    from tkq.attention.arguments import Options
    from tkq.attention.backward import ops

    options = Options(shape.causal)

    def call(do, q, k, v, o, lse):
        if config is None:
            return ops.attention_backward((do, q, k, v, o, lse, None), None, options, deterministic=same)
        out = [torch.empty_like(x) for x in (q, k, v)]
        ops.run((do, q, k, v, o, lse, None), out, options, config=config)
        return out

    return call


def flash_attention_4(shape: Shape, same=False) -> Callable:
    from flash_attn.cute.interface import _flash_attn_bwd

    def call(do, q, k, v, o, lse):
        return _flash_attn_bwd(q, k, v, o, do, lse, causal=shape.causal, deterministic=same)[:3]

    return call


def flash_attention_3(shape: Shape) -> Callable:
    from flash_attn_config import CONFIG
    from flash_attn_interface import _flash_attn_backward

    if CONFIG["build_flags"]["FLASHATTENTION_DISABLE_BACKWARD"]:
        raise NotImplementedError("FA3 is built without its backward here")

    def call(do, q, k, v, o, lse):
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        _flash_attn_backward(do, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, softmax_scale=shape.dim**-0.5,
                             is_causal=shape.causal)
        return dq, dk, dv

    return call


def cudnn(shape: Shape) -> Callable:
    """By autograd, on a graph that was recorded for these inputs the first time."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    graphs = {}

    def recorded(q, k, v):
        with torch.enable_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            x = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
            o = torch.nn.functional.scaled_dot_product_attention(
                *x, is_causal=shape.causal, enable_gqa=q.shape[2] != k.shape[2])
            return o, x

    def call(do, q, k, v, o, lse):
        key = q.data_ptr()
        if key not in graphs:
            graphs[key] = recorded(q, k, v)
        o, x = graphs[key]
        return [t.transpose(1, 2) for t in torch.autograd.grad(o, x, do.transpose(1, 2), retain_graph=True)]

    return call


PEERS = {"FA4": flash_attention_4, "cuDNN": cudnn, "FA3": flash_attention_3}
common.PEERS["attention_backward"] = PEERS
SAME = {"as usual": ours, "FA4, deterministic": lambda shape: flash_attention_4(shape, same=True)}
common.PEERS["attention_backward_deterministic"] = SAME


def judge(cases) -> list[str]:
    wide = [case for case in cases if case.section == "backward" and " S8192 " in case.shape and " D256 " in case.shape]
    return [*[x for section in ("backward", "gqa")
              for x in mean_misses(section, [case for case in cases if case.section == section], MEAN_AT_LEAST,
                                   2 * len(SHAPES))],
            *rate_misses("backward", wide, WIDE_AT_LEAST)]


BENCH = Bench(
    "attention_backward", __doc__,
    {**{section: lambda shapes, section=section: jobs(section, shapes) for section in ("backward", "gqa")},
     "deterministic": deterministic},
    shapes={"backward": SHAPES, "gqa": SHAPES, "deterministic": SAME_SHAPES},
    quick=QUICK,
    default=("backward",),
    judge=judge,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
