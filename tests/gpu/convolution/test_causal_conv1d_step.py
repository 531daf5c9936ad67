"""Steps of causal_conv1d on the GPU: against the convolution of all tokens, indices that no row has, strides."""
import torch

import tkq
from tests.helpers.convolution import make
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.reference import convolution as reference
from tkq.testing import assert_2x


def test_a_step_is_the_convolution():
    """Token for token the same bits, in rows of a pool; others stay as they are."""
    with torch.no_grad(), poisoned():
        x, weight, bias, _ = make(3, 40, 264)
        whole, last = tkq.causal_conv1d(x, weight, bias, "silu", None, True)
        pool = torch.full((8, 264, 4), 7.0, device="cuda", dtype=torch.bfloat16)
        rows = torch.tensor([6, 1, 2], device="cuda")
        pool[rows] = 0
        first = tkq.causal_conv1d_step(x[:, :9], pool, weight, bias, "silu", rows)
        others = [tkq.causal_conv1d_step(x[:, t], pool, weight, bias, "silu", rows) for t in range(9, 40)]
    assert torch.equal(torch.cat((first, torch.stack(others, 1)), 1), whole)
    assert torch.equal(pool[rows, :, 1:], last) and pool[[0, 3, 4, 5, 7]].eq(7).all()


def test_rows_that_are_not_there_and_strides():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 80, device="cuda").bfloat16()[..., 8:]
    weight, pool = torch.randn(72, 3, device="cuda"), torch.randn(5, 2, 72, device="cuda").mT
    rows = torch.tensor([4, -1, 5, 0], device="cuda", dtype=torch.int32)
    wide, narrow = pool.double(), pool.clone()
    truth = reference.causal_conv1d_step(x.double(), wide, weight.double(), None, None, rows)
    peer = reference.causal_conv1d_step(x.float(), narrow, weight, None, None, rows)
    out = torch.full((4, 72, 2), torch.nan, device="cuda", dtype=torch.bfloat16).mT
    assert tkq.causal_conv1d_step(x, pool, weight, cache_indices=rows, out=out) is out
    assert_2x(out, truth, peer.to(out.dtype))
    assert torch.equal(pool, narrow) and not out[1:3].any()


def test_replayed_calls_and_graphs():
    with torch.no_grad():
        x, weight, bias, _ = make(3, 1, 264)
        pools = [torch.zeros(3, 264, 3, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        rows = torch.arange(3, device="cuda")
        for _ in range(4):
            y = tkq.causal_conv1d_step(x, pools[0], weight, bias, "silu", rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = tkq.causal_conv1d_step(x, pools[1], weight, bias, "silu", rows)
        pools[1].zero_()
        for _ in range(4):
            graph.replay()
    assert torch.equal(y, z) and torch.equal(*pools)
