"""torch.compile with CUDA graphs of its own: calls that keep counters, first called under its warm-up and again."""
import pytest
import torch

import tkq


@pytest.mark.parametrize("name", ("cross_entropy", "flash_attn", "rmsnorm"))
def test_reduce_overhead(name):
    x, target = torch.randn(512, 4096, device="cuda").bfloat16(), torch.randint(4096, (512,), device="cuda")
    q, k, v = torch.randn(3, 2, 700, 4, 128, device="cuda").bfloat16()
    call, inputs = {
        "cross_entropy": (tkq.cross_entropy, (x, target)),
        "flash_attn": (lambda q, k, v: tkq.flash_attn(q, k, v, causal=True), (q, k, v)),
        "rmsnorm": (lambda x: tkq.rmsnorm(x), (x,))}[name]
    compiled, want = torch.compile(call, mode="reduce-overhead"), call(*inputs)
    for _ in range(4):
        torch.testing.assert_close(compiled(*inputs), want)
