"""torch's scaled_dot_product_attention and varlen attention with tkq enabled, beside torch's own."""
import itertools
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.process.no_output import no_word
from tkq.integrations import sdpa, sdpa_kernels
from tkq.testing import assert_2x

if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
    pytest.skip("this torch has no registry of flash attentions", allow_module_level=True)
BF16, FLASH = torch.bfloat16, SDPBackend.FLASH_ATTENTION
CHECKOUT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def quiet(capfd, caplog):
    with no_word(capfd, caplog):
        yield


@pytest.fixture
def runs(monkeypatch):
    """How often tkq's kernels were launched: forwards, backwards."""
    counts = {"forward": 0, "backward": 0}

    def counted(module, name):
        run = module.run

        def wrapper(*args, **options):
            counts[name] += 1
            return run(*args, **options)

        monkeypatch.setattr(module, "run", wrapper)

    for module in (sdpa_kernels.ops, sdpa_kernels.varlen_ops):
        counted(module, "forward")
    for module in (sdpa_kernels.backward_ops, sdpa_kernels.backward_varlen_ops):
        counted(module, "backward")
    return counts


def tensors(Sq, Sk, H, Hk, D, dtype=BF16, by_heads=False, B=2):
    """q, k, v (B, H, S, D): views of (B, S, H, D), or by_heads contiguous as they are; and a gradient."""
    g = torch.Generator("cuda").manual_seed(Sq + D)

    def make(S, heads):
        shape = (B, heads, S, D) if by_heads else (B, S, heads, D)
        x = torch.randn(shape, device="cuda", generator=g).to(dtype)
        return x if by_heads else x.transpose(1, 2)

    return [make(S, heads).requires_grad_() for S, heads in ((Sq, H), (Sk, Hk), (Sk, Hk))] + [make(Sq, H)]


def attend(q, k, v, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def with_gradients(call, q, k, v, do):
    o = call(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), do)


def truth(q, k, v, do, **options):
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        return with_gradients(lambda *x: attend(*x, **options), *wide, do.double())


@pytest.mark.parametrize("sizes, causal, scale", (
    ((200, 200, 4, 4, 64), True, None), ((200, 200, 4, 2, 64), False, 0.1),
    pytest.param((200, 200, 4, 2, 128, torch.float16), True, None, marks=pytest.mark.slow),
    ((77, 130, 4, 4, 64, BF16, True), False, None),
    ((200, 200, 4, 4, 128, BF16, True), True, None)))
def test_dense(runs, sizes, causal, scale):
    q, k, v, do = tensors(*sizes)

    def call(*x):
        return attend(*x, causal, scale)

    with sdpa_kernel(FLASH):
        theirs = with_gradients(call, q, k, v, do)
    assert not any(runs.values())
    with sdpa.enabled():
        mine = with_gradients(call, q, k, v, do)
    assert runs == {"forward": 1, "backward": 1}
    right = truth(q, k, v, do, causal=causal, scale=scale)
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), mine, right, theirs):
        assert a.stride() == c.stride(), name  # torch.compile relies on it
        assert_2x(a, b, c, ulps=2, what=name)
    with sdpa_kernel(FLASH):
        assert torch.equal(call(q, k, v), theirs[0]) and runs["forward"] == 1  # as before


def test_it_comes_before_other_backends(runs):
    q, k, v, _ = tensors(200, 200, 4, 4, 64)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, FLASH], set_priority=True), sdpa.enabled(), torch.no_grad():
        attend(q, k, v, True)
    assert runs["forward"] == 1


FIRST = """
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends as order
from torch.nn.functional import scaled_dot_product_attention as attend
from tkq.integrations import sdpa, sdpa_kernels

runs, run = [], sdpa_kernels.ops.run
sdpa_kernels.ops.run = lambda *args: runs.append(1) or run(*args)
with sdpa.enabled():
    x = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
    attend(x, x, x)
assert len(runs) == 1, runs
attend(x, x, x)
assert len(runs) == 1, runs
print(order(with_priority=True)[0].name)
"""
FORKED = """
import os
import torch
from torch.nn.attention import current_flash_attention_impl
from tkq.integrations import sdpa

torch.zeros(1, device="cuda")
child = os.fork()
with sdpa.enabled():
    assert current_flash_attention_impl() == "tkq"
assert current_flash_attention_impl() is None
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def alone(code):
    return subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], cwd=CHECKOUT, text=True,
                          capture_output=True)  # Python's own word on forks


def test_it_is_enabled_before_the_first_call_of_a_process():
    """At which torch puts cuDNN's attention first on this GPU, over the order that is there."""
    done = alone(FIRST)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() != "CUDNN_ATTENTION":
        pytest.skip(f"this torch chooses {done.stdout.strip()} first: nothing is proved")


@pytest.mark.slow
def test_it_is_enabled_where_cuda_cannot_start():
    """In a process forked after CUDA has started: for tensors on the CPU, so it goes without a word."""
    done = alone(FORKED)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_what_is_left_to_torch(runs):
    q, k, v, do = tensors(96, 200, 4, 4, 64)
    flash = torch.ops.aten._scaled_dot_product_flash_attention

    def dropped(*x):
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(*x, dropout_p=0.5)

    with sdpa_kernel(FLASH), torch.no_grad():
        before, causal = dropped(q, k, v), flash(q, k, v, 0.0, True)[0]
    with sdpa_kernel(FLASH), sdpa.enabled():
        with torch.no_grad():
            assert torch.equal(dropped(q, k, v), before) and torch.equal(flash(q, k, v, 0.0, True)[0], causal)
        assert all(torch.isfinite(x).all() for x in with_gradients(dropped, q, k, v, do))
    with sdpa.enabled(), torch.no_grad():  # what torch has no flash for
        attend(q.float(), k.float(), v.float(), False)
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(96, 200, device="cuda", dtype=torch.bool))
    assert not any(runs.values())


@pytest.mark.parametrize("window", [pytest.param((-1, -1), marks=pytest.mark.slow), (-1, 0), (40, 0)])
def test_varlen(runs, window):
    from torch.nn.attention.varlen import varlen_attn

    g = torch.Generator("cuda").manual_seed(1)
    q, k, v, do = (torch.randn(450, 4, 64, device="cuda", generator=g).to(BF16) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cu = torch.tensor([0, 100, 100, 350, 450], device="cuda", dtype=torch.int32)

    def call(q, k, v):
        return varlen_attn(q, k, v, cu, cu, 250, 250, window_size=window)

    theirs = with_gradients(call, q, k, v, do)
    with sdpa.enabled():
        mine = with_gradients(call, q, k, v, do)
    assert runs == {"forward": 1, "backward": 1}

    def by_sequence(q, k, v):
        parts = []
        for a, b in itertools.pairwise(cu.tolist()):
            behind = torch.arange(b - a, device="cuda")[:, None] - torch.arange(b - a, device="cuda")
            mask = torch.ones_like(behind, dtype=torch.bool) if window == (-1, -1) else behind >= 0
            mask = mask if window[0] < 0 else mask & (behind <= window[0])
            part = F.scaled_dot_product_attention(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        right = with_gradients(by_sequence, *wide, do.double())
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), mine, right, theirs):
        assert_2x(a, b, c, ulps=2, what=name)


@pytest.mark.slow
def test_compiled(runs):
    """inductor checks sizes and strides of what comes back."""
    torch._dynamo.reset()
    q, k, v, do = tensors(200, 200, 4, 2, 64)

    def twice(q, k, v):
        return attend(q * 2.0, k, v, True) + 1.0

    with sdpa.enabled():
        mine = with_gradients(torch.compile(twice), q, k, v, do)
        eager = with_gradients(twice, q, k, v, do)
    assert runs == {"forward": 2, "backward": 2}
    for name, a, b in zip(("o", "dq", "dk", "dv"), mine, eager):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, msg=name)


def test_captured(runs):
    q, k, v, _ = (x.detach() for x in tensors(200, 200, 4, 4, 64))
    with sdpa.enabled(), torch.no_grad():
        attend(q, k, v, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = attend(q, k, v, True)
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert torch.equal(o, attend(q, k, v, True))
    assert runs["forward"] == 3
