"""The launches of Based in plain PyTorch, chunk by chunk as the kernels have them: exactly, in float64, or rounded
where the kernels round."""
import math

import torch

from tkq.linear_attention.based.gradients import OfOutputs, times
from tkq.linear_attention.based.layout import columns
from tkq.linear_attention.config import CHUNK
from tkq.reference.based import based


def features(x):
    """(.., 16) -> (.., 160), each product rounded to x's type."""
    made = []
    for places in columns():
        product = torch.ones_like(x[..., 0]) if places is not None else torch.zeros_like(x[..., 0])
        for i in places or ():
            product = product * x[..., i]
        made.append(product)
    return torch.stack(made, -1)


def weights(scale, like):
    """(160,): what a product of features is multiplied by."""
    def of(places):
        square = len(places or ()) == 2 and places[0] == places[1]
        return scale**len(places or ()) * (0.5 if square else 1.0)

    return torch.tensor([of(places) for places in columns()], dtype=like.dtype, device=like.device)


def launched(given, scale, factor=1.0):
    """As `launch.launch`. float64 stays float64, nothing is rounded; what is of 16 bits is computed in float32, its
    operands are rounded as the kernel's are."""
    q, k, v, norm, reverse = given
    heads, wide = max(q.shape[2], v.shape[2]), torch.promote_types(q.dtype, torch.float32)
    fq, fk, q, k, v = (of_heads(x, heads, wide) for x in (features(q), features(k), q, k, v))
    of_q, of_k = features(q), features(k)  # not rounded: sums are of exact products
    o, sums = torch.zeros_like(v), torch.zeros_like(v[..., 0])
    state, moments = v.new_zeros(*v.shape[:2], 160, v.shape[3]), v.new_zeros(*v.shape[:2], 160)
    exact = weights(scale, v)
    for at, before in chunks(v.shape[2], reverse):
        w = scale * (q[:, :, at] @ k[:, :, at].mT)
        w = 1 + w + w * w / 2
        w = w.triu() if reverse else w.tril()
        p = 2.0**-max(0, math.floor(math.log2(max(before, 1))))
        o[:, :, at] = fq[:, :, at] @ narrow(exact[:, None] * state * p, given) / p + narrow(w, given) @ v[:, :, at]
        sums[:, :, at] = w.sum(-1) + (of_q[:, :, at] @ (exact * moments)[..., None])[..., 0]
        state = state + fk[:, :, at].mT @ v[:, :, at]
        moments = moments + of_k[:, :, at].sum(2)
    o = o / sums[..., None] if norm else o * factor
    return o.transpose(1, 2).to(given.v.dtype), sums.transpose(1, 2).contiguous() if norm else None


def of_heads(x, heads, wide):
    """(B, heads, S, ..)"""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).to(wide)


def chunks(tokens, reverse):
    """(a chunk's tokens, how many are in the chunks before) in the order in which they are visited."""
    starts = range(0, tokens, CHUNK)
    for i, start in enumerate(reversed(starts) if reverse else starts):
        yield slice(start, start + CHUNK), i * CHUNK


def narrow(x, given):
    """As an operand."""
    return x.to(given[0].dtype).to(x.dtype)


def prepared(saved, do):
    """As `gradients.prepare`."""
    o, sums = saved[3:]
    if sums is None:
        return OfOutputs(do, None, 1.0)
    factor = times(do.dtype, do.shape[1])
    to = (do.to(sums.dtype) * (factor / sums)[..., None]).to(do.dtype)
    return OfOutputs(to, (to.to(sums.dtype) * o.to(sums.dtype)).sum(-1), factor)


def launched_gradient(given, scale, factor):
    """As `gradients.launch_gradient`."""
    x, y, a, b, delta, reverse = given
    heads = max(z.shape[2] for z in (x, a, b))
    wide = torch.promote_types(x.dtype, torch.float32)
    fy, x, y, a, b = (of_heads(z, heads, wide) for z in (features(y), x, y, a, b))
    dx, exact = torch.zeros_like(x), weights(scale, x)
    delta = torch.zeros_like(x[..., 0]) if delta is None else delta.transpose(1, 2).to(wide)
    state, moments = a.new_zeros(*a.shape[:2], a.shape[3], 160), a.new_zeros(*a.shape[:2], 16, 17)
    for at, before in chunks(x.shape[2], reverse):
        d, s = a[:, :, at] @ b[:, :, at].mT, scale * (x[:, :, at] @ y[:, :, at].mT)
        less = delta[:, :, None, at] if reverse else delta[:, :, at, None]
        w = (d - less) * (1 + s)
        w = narrow(w.triu() if reverse else w.tril(), given)
        p = 2.0**-max(0, math.floor(math.log2(max(before, 1))))
        far = chain(a[:, :, at] @ narrow(state * exact * p, given) / p, x[:, :, at])
        ones = torch.cat((scale * scale * x[:, :, at], torch.full_like(x[:, :, at, :1], scale)), -1)
        taken = ones @ moments.mT
        far = far - (taken if reverse else taken * delta[:, :, at, None])
        dx[:, :, at] = (scale * (w @ y[:, :, at]) + far) * factor
        state = state + b[:, :, at].mT @ fy[:, :, at]
        with_one = torch.cat((y[:, :, at], torch.ones_like(y[:, :, at, :1])), -1)
        weighted = y[:, :, at] * (delta[:, :, at, None] if reverse else 1.0)
        moments = moments + weighted.mT @ with_one
    return dx.transpose(1, 2).to(given.x.dtype)


def chain(d, x):
    """Gradients of features (.., 160) at x (.., 16) to those of x."""
    found = [torch.zeros_like(x[..., 0]) for _ in range(16)]
    for column, places in enumerate(columns()):
        for n, i in enumerate(places or ()):
            others = [x[..., j] for m, j in enumerate(places) if m != n]
            found[i] = found[i] + d[..., column] * (others[0] if others else 1.0)
    return torch.stack(found, -1)


def layer_exact(layer, x, weights):
    """tkq.nn.BasedAttention in float64. weights: the layer's by name, in float64."""
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).unflatten(-1, (layer.num_heads, -1)) for name in "qkv")
    return based(q, k, v, use_norm=layer.use_norm)[0].flatten(-2) @ weights["o_proj.weight"].T


def check_layer(layer, x):
    """Results and gradients against float64."""
    x = x.requires_grad_()
    wide = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    wide_x = x.detach().double().requires_grad_()
    y, want = layer(x), layer_exact(layer, wide_x, wide)
    dy = torch.randn_like(y)
    y.backward(dy)
    want.backward(dy.double())
    for mine, of in ((y, want), (x.grad, wide_x.grad), *((p.grad, wide[name].grad)
                                                         for name, p in layer.named_parameters())):
        assert (mine.double() - of).norm() < 0.03 * of.norm()
