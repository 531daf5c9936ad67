"""layernorm of long rows by its public function, as its users call it."""
import torch

import tkq
from tkq.testing import assert_2x

EPS = 1e-5


def check_calls(N, x, vectors):
    """Plain and recorded, in place of a wider tensor's rows too; and the gradients, which take what it saved."""
    def norm(t, w, b):
        return torch.nn.functional.layer_norm(t, (N,), w, b, EPS)

    g = torch.Generator("cuda").manual_seed(1)
    wide = torch.randn(21, N + 64, device="cuda", generator=g).to(getattr(torch, x))
    weight, bias = (torch.randn(N, device="cuda", generator=g).to(getattr(torch, vectors)) for _ in range(2))
    dy = torch.randn(21, N, device="cuda", generator=g).to(wide.dtype)
    leaves = [t.detach().clone().requires_grad_() for t in (wide[:, :N], weight, bias)]
    y = tkq.layernorm(*leaves, eps=EPS)
    exact, same = ([t.detach().to(dtype).requires_grad_() for t in leaves] for dtype in (torch.float64, torch.float32))
    assert_2x(y, norm(*exact), norm(*same).to(y.dtype), ulps=1)
    assert torch.equal(y, tkq.layernorm(wide[:, :N], weight, bias, eps=EPS))
    y.backward(dy)
    wanted = torch.autograd.grad(norm(*exact), exact, dy.double())
    alike = torch.autograd.grad(norm(*same), same, dy.float())
    for leaf, truth, like in zip(leaves, wanted, alike, strict=True):
        assert_2x(leaf.grad, truth, like.to(leaf.dtype), ulps=3, bias_ulps=0.05)
