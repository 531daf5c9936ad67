"""tkq.flex_attention on the GPU against float64, both directions: random masks, scores, sizes, strides, lists that
serve several heads. One function of each kind, whose captured tensors are what is random: two kernels in all, and two
of wide heads."""
import math
import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tkq
from tests.helpers.attention import flex_gallery as gallery
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x

TABLE = 64


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned():
        yield


def functions(allowed, weights, sizes):
    """allowed: (TABLE, TABLE, TABLE) bool, of patches of queries and keys. sizes: of a patch, and how far a batch
    element and a head go on in the first dimension."""
    rows, columns, of_batch, of_head = sizes

    def mask_mod(b, h, q, kv):
        return allowed[(b * of_batch + h * of_head) % TABLE, q // rows % TABLE, kv // columns % TABLE]

    def score_mod(score, b, h, q, kv):
        return score * weights[q % 7, h % 5] + weights[(kv - q) % 11, b]

    return score_mod, mask_mod


class Drawn:
    def __init__(self, seed):
        self.r, self.g = random.Random(seed), torch.Generator("cuda").manual_seed(seed)

    def one_of(self, *values):
        return self.r.choice(values)

    def tensor(self, batch, heads, rows, columns):
        """In one of several orders in memory, NaN behind every end."""
        order = self.one_of((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3))
        shape = [(batch, heads, rows, columns)[d] for d in order]
        wide = [*(n + self.one_of(0, 3) for n in shape[:3]), columns + 8]
        around = torch.full(wide, math.nan, device="cuda").bfloat16()
        inside = around[tuple(slice(0, n) for n in shape)]
        inside.copy_(torch.randn(shape, device="cuda", generator=self.g))
        return inside.permute([order.index(d) for d in range(4)])


def case(seed, dims):
    """(q, k, v, do), the functions, the block mask, scale. dims: those to draw from, of q and k, of v."""
    d = Drawn(seed)
    batch, (heads, kv_heads) = d.one_of(1, 2, 3), d.one_of((1, 1), (4, 4), (6, 2), (4, 1))
    Sq, Sk = d.r.randint(40, 400), d.r.randint(40, 400)
    D, Dv = (d.one_of(*of) for of in dims)
    q, do = d.tensor(batch, heads, Sq, D), d.tensor(batch, heads, Sq, Dv)
    k, v = d.tensor(batch, kv_heads, Sk, D), d.tensor(batch, kv_heads, Sk, Dv)
    allowed = torch.rand(TABLE, TABLE, TABLE, device="cuda", generator=d.g) < d.one_of(0.05, 0.5, 0.95)
    weights = torch.randn(11, 7, device="cuda", generator=d.g)
    each = d.one_of((None, None), (batch, None), (None, heads), (batch, heads))
    sizes = d.one_of(1, 16, 128), d.one_of(1, 32, 200), 0 if each[0] is None else 1, 0 if each[1] is None else 5
    score_mod, mask_mod = functions(allowed, weights, sizes)
    mask = create_block_mask(mask_mod, *each, Sq, Sk, "cuda", 128)
    return (q, k, v, do), score_mod, mask_mod, mask, d.one_of(None, 0.05, 0.5)


def test_drawn():
    """All in one test: of several begun together, all would wait for the worker that compiles their two kernels."""
    for seed in range(12):
        check(seed, ((72, 96, 128), (72, 128)))


@pytest.mark.slow
def test_drawn_wide():
    for seed in range(12):
        check(seed, ((136, 192, 256), (136, 256)))


def check(seed, dims):
    (q, k, v, do), score_mod, mask_mod, mask, scale = case(seed, dims)
    batch, heads, Sq, _ = q.shape
    seen = gallery.visible(mask_mod, batch, heads, Sq, k.shape[2], "cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = tkq.flex_attention(*leaves, score_mod, mask, scale, True, True)
    gallery.judge((o.detach(), lse.detach()), (q, k, v), score_mod, seen, f"seed {seed}", scale)
    ours, exact, low = torch.autograd.grad(o, leaves, do), *(_dense(q, k, v, score_mod, seen, scale, do, dtype)
                                                             for dtype in (torch.float64, q.dtype))
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, exact, low):
        for of_head in zip(*(x.flatten(0, 1) for x in (a, b, c))):
            assert_2x(*of_head, 1, f"seed {seed} {name}")


def _dense(q, k, v, score_mod, seen, scale, do, dtype):
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(gallery.dense(*leaves, score_mod, seen, scale, dtype)[0], leaves, do.to(dtype))
