"""Windows with limits on both sides, the left one far, on a GPU: against float64, at all alignments of both edges with
tiles of keys and of rows. Which spec a call has: tests/cpu/attention/test_attention_launch_cpu.py."""
import pytest
import torch

import tkq
from tests.helpers.attention.inputs import compare, judge, make
from tkq.attention.ops import LONG, LONG_WINDOW, SHORT

# 65, 1153: the last task has rows of one warpgroup; 1: of one row.
SIZES = ((640, 640), (1300, 1300), (1290, 1353), (1000, 1500), (65, 1999), (1, 1290), (2112, 2112), (63, 700),
         (1153, 1153), (1500, 1601))
WINDOWS = {"causal": ((512, 0), (575, 0), (576, 0), (600, 0), (1023, 0), (1024, 0)),
           "right": ((512, 511), (513, 64), (512, 63), (640, 127), (575, 1), (512, 900), (576, 511))}


@pytest.mark.parametrize("kind", WINDOWS)
def test_sizes(kind):
    for left, right in WINDOWS[kind]:
        for rows, keys in SIZES:
            if left < keys - 1 and (kind == "causal" or right < rows - 1):  # otherwise there is no such limit
                compare(*make(1, rows, keys, 2, 2, 128), f"{rows} x {keys}", left=left, right=right)


@pytest.mark.parametrize("kind", WINDOWS)
def test_hard_data(kind):
    q, k, v = make(1, 1290, 1353, 2, 2, 128)
    for left, right in WINDOWS[kind][::2]:
        options = dict(left=left, right=right)
        compare(q * 20, k, v, "large scores", **options)
        compare(q, k, v * 1000 + 500, "large values with a mean", **options)
        compare(-q.abs(), k.abs() * 8, v, "all scores far below zero", **options)


@pytest.mark.parametrize("kind", WINDOWS)
def test_more_tasks_than_blocks(kind):
    for left, right in WINDOWS[kind][-3:]:
        for shape in ((3, 1300, 1300, 40, 8), (1, 4097, 4097, 5, 5), (1, 3000, 5000, 6, 3)):
            compare(*make(*shape, 128), f"{shape}", left=left, right=right)


def test_the_public_way():
    """With gradients' lse and without: the same bits."""
    q, k, v = make(1, SHORT + 70, SHORT + 70, 2, 1, 128)
    for window in ((1023, 0), (LONG_WINDOW, 0), (LONG_WINDOW, 511)):
        o, lse = tkq.flash_attn(q, k, v, window_size=window, return_lse=True)
        judge(o, lse, q, k, v, f"{window}", left=window[0], right=window[1])
        assert torch.equal(tkq.flash_attn(q, k, v, window_size=window), o)


def test_more_queries_than_keys():
    q, k, v = make(1, SHORT + 200, SHORT + 100, 2, 1, 128)
    o, lse = tkq.flash_attn(q, k, v, window_size=(1023, 0), return_lse=True)
    judge(o, lse, q, k, v, left=1023, right=0)
    assert not o[:, :100].any() and torch.isinf(lse[..., :100]).all(), "the first rows see no key"


def test_softcap_and_sinks():
    q, k, v = make(1, 1300, 1400, 4, 2, 128)
    sinks = torch.randn(4, device="cuda")
    compare(q, k, v, left=600, right=0, softcap=20.0, sinks=sinks)


def test_layouts_and_other_head_dims():
    packed = torch.randn(1, 1300, 3, 4, 128, device="cuda", dtype=torch.bfloat16)
    compare(*packed.unbind(2), "slices", left=700, right=0)
    compare(*make(1, 1300, 1300, 2, 2, 104), "D 104", left=700, right=0)


def test_it_has_gradients():
    q, k, v = (x.requires_grad_() for x in make(1, LONG, LONG, 1, 1, 128))
    tkq.flash_attn(q, k, v, window_size=(1023, 0)).float().square().sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in (q, k, v))
