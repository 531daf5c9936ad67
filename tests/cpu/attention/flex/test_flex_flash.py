"""flash_attn with score_mod, mask_mod and block_mask on the CPU: flex_attention on (B, S, H, D), what is refused."""
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tkq
from tests.helpers.attention import flex_gallery as gallery

B, H, S = 2, 4, 72


def make(D=64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, S, h, D, generator=g).bfloat16().requires_grad_() for h in (H, 2, 2)]


def same(found, wanted):
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)


def test_as_flex_attention():
    """Results and gradients, also of a captured tensor; the softcap first."""
    q, k, v = make()
    slopes, do = torch.rand(H, requires_grad=True), torch.randn(B, S, H, 64).bfloat16()
    mask = create_block_mask(gallery.causal, None, None, S, S, "cpu", 64)
    o, lse = tkq.flash_attn(q, k, v, softmax_scale=0.2, softcap=3.0, return_lse=True, score_mod=gallery.alibi(slopes),
                            block_mask=mask)
    assert o.is_contiguous() and o.shape == q.shape

    def capped(score, b, h, q_idx, kv_idx):
        return 3.0 * torch.tanh(score / 3.0) + slopes[h] * (kv_idx - q_idx)

    wanted, wanted_lse = tkq.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), capped, mask, 0.2, True, True)
    same((o, lse), (wanted.transpose(1, 2), wanted_lse))
    leaves = q, k, v, slopes
    same(torch.autograd.grad(o, leaves, do), torch.autograd.grad(wanted, leaves, do.transpose(1, 2)))


def test_mask_mod_alone():
    q, k, v = make()
    wanted = tkq.flash_attn(q, k, v, causal=True, softcap=5.0)
    found = tkq.flash_attn(q, k, v, softcap=5.0, mask_mod=gallery.causal)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_compiled():
    q, k, v = (x.detach() for x in make())
    slopes = torch.rand(H)
    call = lambda q: tkq.flash_attn(q, k, v, score_mod=gallery.alibi(slopes), mask_mod=gallery.causal)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(q), call(q))


@pytest.mark.parametrize("name, value", [("causal", True), ("window_size", (8, None)), ("deterministic", True),
                                         ("sinks", torch.zeros(H))])
def test_what_is_refused(name, value):
    q, k, v = make()
    with pytest.raises(NotImplementedError, match=f"flash_attn: {name} with score_mod, mask_mod or block_mask"):
        tkq.flash_attn(q, k, v, mask_mod=gallery.causal, **{name: value})


def test_errors_name_flash_attn():
    q, k, v = make()
    mask = create_block_mask(gallery.causal, None, None, S, S, "cpu", 64)
    with pytest.raises(ValueError, match="flash_attn: mask_mod and block_mask: allowed is one"):
        tkq.flash_attn(q, k, v, mask_mod=gallery.causal, block_mask=mask)
    with pytest.raises(TypeError, match="flash_attn: score_mod is 3"):
        tkq.flash_attn(q, k, v, score_mod=3)
    with pytest.raises(NotImplementedError, match="flash_attn: score_mod: aten.lgamma"):
        tkq.flash_attn(q, k, v, score_mod=lambda s, b, h, q, kv: torch.lgamma(s))
    with pytest.raises(ValueError, match="flash_attn: block_mask is of 72 queries"):
        tkq.flash_attn(q[:, 1:], k, v, block_mask=mask)
    with pytest.raises(NotImplementedError, match="flash_attn: head_dim is 264, supported with score_mod.*: q is "):
        tkq.flash_attn(*make(264), score_mod=gallery.causal_score)
    with pytest.raises(ValueError, match="k: is .2, 72, 2., expected 4 dimensions|k.*rank|k.*dimensions"):
        tkq.flash_attn(q, k[..., 0], v, score_mod=gallery.causal_score)
