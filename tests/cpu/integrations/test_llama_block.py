"""A Llama block made of tkq's functions is the block that plain PyTorch computes, and so are its gradients."""
from dataclasses import dataclass, fields

import pytest
import torch
import torch.nn.functional as F

import tkq
from tkq import reference

B, S, H, HK, D, HIDDEN = 2, 7, 4, 2, 16, 96
WIDTH, EPS, THETA = H * D, 1e-5, 500000.0


@dataclass
class Weights:
    """Linear layers as (in, out)."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def random(cls, dtype):
        def matrix(rows, columns):
            return (torch.randn(rows, columns) / rows**0.5).to(dtype)

        norms = [(1 + 0.1 * torch.randn(WIDTH)).to(dtype) for _ in range(2)]
        return cls(norms[0], matrix(WIDTH, (H + 2 * HK) * D), matrix(WIDTH, WIDTH), norms[1],
                   matrix(WIDTH, 2 * HIDDEN), matrix(HIDDEN, WIDTH))

    def tensors(self):
        return [getattr(self, f.name) for f in fields(self)]


def block(x, w, packed):
    """tkq's functions. packed: gate and up in one tensor, q and k turned in place in the packed qkv."""
    cos, sin = tkq.rope_cos_sin(S, D, THETA, device="cpu")
    h = tkq.rmsnorm(x, w.attention_norm, eps=EPS)
    qkv = (h @ w.qkv).view(B, S, H + 2 * HK, D)
    if packed:
        tkq.rope(qkv[:, :, :H + HK], cos, sin, inplace=True)
        q, k, v = qkv.split((H, HK, HK), 2)
    else:
        q, k, v = qkv.split((H, HK, HK), 2)
        q, k = tkq.rope_qk(q, k, cos, sin)
    x = x + reference.flash_attn(q, k, v, causal=True)[0].flatten(2) @ w.out
    h = tkq.rmsnorm(x, w.mlp_norm, eps=EPS) @ w.gate_up
    y = tkq.swiglu(h) if packed else tkq.swiglu(*h.split(HIDDEN, -1))
    return x + y @ w.down


def plain_block(x, w):
    """Nothing of tkq: complex numbers for the rotation, torch's attention, norm and activation."""
    angles = torch.arange(S)[:, None] * THETA ** (-torch.arange(0, D, 2).double() / D)
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def turned(t):
        a, b = t.double().chunk(2, -1)
        z = torch.complex(a, b) * turn
        return torch.cat((z.real, z.imag), -1).to(t.dtype)

    q, k, v = (F.rms_norm(x, (WIDTH,), w.attention_norm, EPS) @ w.qkv).view(B, S, -1, D).split((H, HK, HK), 2)
    q, k, v = (t.transpose(1, 2) for t in (turned(q), turned(k), v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + o.transpose(1, 2).flatten(2) @ w.out
    gate, up = (F.rms_norm(x, (WIDTH,), w.mlp_norm, EPS) @ w.gate_up).chunk(2, -1)
    return x + (F.silu(gate) * up) @ w.down


@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward(packed):
    torch.manual_seed(0)
    w = Weights.random(torch.float32)
    x = torch.randn(B, S, WIDTH)
    inputs = [t.requires_grad_() for t in (x, *w.tensors())]
    got, want = block(x, w, packed), plain_block(x, w)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(want)
    for mine, theirs in zip(torch.autograd.grad(got, inputs, dy), torch.autograd.grad(want, inputs, dy)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_in_bfloat16_it_is_as_near_to_the_truth_as_torch(packed):
    torch.manual_seed(1)
    w, x = Weights.random(torch.bfloat16), torch.randn(B, S, WIDTH).bfloat16()
    wide = Weights(*(t.double() for t in w.tensors()))
    with torch.no_grad():
        truth, torch_s = plain_block(x.double(), wide), plain_block(x, w)
        error, theirs = ((y.double() - truth).norm() / truth.norm() for y in (block(x, w, packed), torch_s))
    assert error <= 1.5 * theirs, f"{error:.2e}, PyTorch {theirs:.2e}"


@pytest.mark.parametrize("packed", [False, True])
def test_compiled(packed):
    torch.manual_seed(2)
    w, x = Weights.random(torch.float32), torch.randn(B, S, WIDTH)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(lambda x: block(x, w, packed), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), block(x, w, packed))
