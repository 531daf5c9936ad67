"""tkq.nn.KimiDeltaAttention and Mamba2 in eager PyTorch: in float64, and as a peer in the layers' own type, whose rule,
gates and norm are float32 and whose every other result is rounded as eager modules round theirs."""
import torch
import torch.nn.functional as F

from tkq.reference.linear_attention import linear_attn as recurrence
from tkq.reference.ssd import mamba2_ssd as scan

EXACT = torch.float64


def weights(layer, dtype=EXACT) -> dict:
    """A layer's parameters by name: leaves of a type of their own."""
    return {name: p.detach().to(dtype, copy=True).requires_grad_() for name, p in layer.named_parameters()}


def _wide(x):
    return x if x.dtype == EXACT else x.float()


def _conv(x, w, name):
    taps = w[f"{name}.weight"]
    y = F.conv1d(F.pad(x.mT, (taps.shape[2] - 1, 0)), taps, w.get(f"{name}.bias"), groups=len(taps))
    return F.silu(y).mT


def _norm(x, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def kimi(layer, x, w):
    """A KimiDeltaAttention's y, of the first tokens x, in x's type. w: of `weights`."""
    dtype, heads = x.dtype, layer.num_v_heads
    q, k, v = (_wide(_conv(F.linear(x, w[f"{n}_proj.weight"]), w, f"{n}_conv1d")).unflatten(-1, (count, -1))
               for n, count in (("q", layer.num_heads), ("k", layer.num_heads), ("v", heads)))
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    low, A, dt = F.linear(x, w["f_proj.0.weight"]), _wide(w["A_log"]).exp()[:, None], _wide(w["dt_bias"])
    g = (_wide(F.linear(low, w["f_proj.1.weight"])) + dt).unflatten(-1, (heads, -1))
    g = -A * F.softplus(g) if layer.lower_bound is None else layer.lower_bound * (A * g).sigmoid()
    beta = _wide(F.linear(x, w["b_proj.weight"])).sigmoid() * (2.0 if layer.allow_neg_eigval else 1.0)
    o, _ = recurrence(q, k, v, g, beta=beta)
    gate = F.linear(F.linear(x, w["g_proj.0.weight"]), w["g_proj.1.weight"], w["g_proj.1.bias"])
    o = _norm(_wide(o.to(dtype)), layer.o_norm.eps) * _wide(w["o_norm.weight"]) * _wide(gate).unflatten(
        -1, (heads, -1)).sigmoid()
    return F.linear(o.to(dtype).flatten(-2), w["o_proj.weight"])


def mamba2(layer, u, w):
    """A Mamba2's out, likewise."""
    dtype, N, G = u.dtype, layer.d_state, layer.ngroups
    mixed = F.linear(u, w["in_proj.weight"], w.get("in_proj.bias"))
    z, mixed, dt = mixed.split([layer.d_inner, layer.d_inner + 2 * G * N, layer.nheads], -1)
    x, B, C = _conv(mixed, w, "conv1d").split([layer.d_inner, G * N, G * N], -1)
    x, B, C = (_wide(t).unflatten(-1, (heads, -1)) for t, heads in ((x, layer.nheads), (B, G), (C, G)))
    D = w["D"].unflatten(0, (layer.nheads, -1)) if layer.D_has_hdim else w["D"]
    y, _ = scan(x, _wide(dt), -_wide(w["A_log"]).exp(), B, C, _wide(D), None, _wide(w["dt_bias"]), None, True,
                layer.dt_limit)
    y = _wide(y.to(dtype)).flatten(-2) * F.silu(_wide(z))
    if layer.norm is not None:
        y = (_norm(y.unflatten(-1, (G, -1)), layer.norm.eps).flatten(-2) * _wide(w["norm.weight"]))
    return F.linear(y.to(dtype), w["out_proj.weight"], w.get("out_proj.bias"))


def error(found, want) -> float:
    return ((found.double() - want.double()).norm() / want.double().norm()).item()


def assert_as_near(layer, of, x, dy):
    """The layer's result and all its gradients are at most twice as far from float64's as eager PyTorch's of its own
    type are. Of gradients of few numbers, as gates' are, whose errors are luck, the peer's worst counts."""
    found = {}
    for name, dtype in (("exact", EXACT), ("peer", x.dtype)):
        w, wide = weights(layer, dtype), x.detach().to(dtype, copy=True).requires_grad_()
        y = of(layer, wide, w)
        y.backward(dy.to(dtype))
        found[name] = {"y": y.detach(), "x": wide.grad, **{n: p.grad for n, p in w.items()}}
    leaf = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(leaf)
    assert y.dtype == x.dtype and y.shape == x.shape
    y.backward(dy)
    mine = {"y": y.detach(), "x": leaf.grad, **{n: p.grad for n, p in layer.named_parameters()}}
    exact, peer = found["exact"], found["peer"]
    worst = max(error(peer[name], want) for name, want in exact.items())
    for name, want in exact.items():
        bound = error(peer[name], want) if want.numel() > 100 else worst
        assert error(mine[name], want) <= 2 * bound, name
