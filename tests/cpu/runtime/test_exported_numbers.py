"""Numbers that follow from a size, as 1 / x.shape[0] does, in a program that torch.export makes: at other sizes they
are others, in every op that takes numbers."""
import io

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tkq
from tkq.attention import arguments

AUTO = torch.export.Dim.AUTO
TRACED, OTHERS = 24, (40, 16)
WEIGHT, TABLE = torch.linspace(-1.0, 1.0, 16), torch.linspace(0.0, 1.0, 800).view(100, 8)
VOCABULARY = torch.linspace(-1.0, 1.0, 512).view(32, 16).bfloat16()


def rows(n):
    return (torch.linspace(-2.0, 2.0, n * 16).view(n, 16),)


def weighted(n):
    return *rows(n), WEIGHT


def classified(n):
    return *rows(n), torch.arange(n) % 16


def of_vocabulary(n):
    x, target = classified(n)
    return x.bfloat16(), VOCABULARY, target


def heads(n):
    return (torch.linspace(-1.0, 1.0, 2 * n * 2 * 16).sin().view(2, n, 2, 16).bfloat16(),)


def turned(n):
    return *heads(n), TABLE


def packed(n):
    return heads(n)[0][0].clone(), torch.tensor([0, 5, n], dtype=torch.int32)


def packed_and_turned(n):
    return *packed(n), TABLE


def operands(n):
    a, b = torch.linspace(-1.0, 1.0, n * 64), torch.linspace(-1.0, 1.0, 64 * 32)
    return a.view(n, 64).bfloat16(), b.view(64, 32).bfloat16()


def varlen(q, cu, longest=40, **options):
    return tkq.flash_attn_varlen(q, q, q, cu, cu, longest, longest, **options)


def all_terms(x):
    n = x.shape[0]
    return dict(ignore_index=n - 20, label_smoothing=1 / n, z_loss=1 / n, softcap=1.0 * n)


# what a call takes, all its tensors (of torch 2.9 a strict export knows no others), and the call: n is a size that is
# not known yet
CALLS = {
    "rmsnorm": (weighted, lambda x, w: tkq.rmsnorm(x, w, eps=1 / x.shape[0])),
    "rmsnorm, an int": (weighted, lambda x, w: tkq.rmsnorm(x, w, eps=x.shape[0])),
    "layernorm": (weighted, lambda x, w: tkq.layernorm(
        x, w, residual=x, prenorm=True, weight_offset=1 / x.shape[0])),
    "rmsnorm_quant": (weighted, lambda x, w: tkq.rmsnorm_quant(x, w, eps=1 / x.shape[0])),
    "layernorm_quant": (weighted, lambda x, w: tkq.layernorm_quant(x, w, weight_offset=1 / x.shape[0])),
    "softmax": (rows, lambda x: tkq.softmax(x, scale=1 / x.shape[0])),
    "log_softmax": (rows, lambda x: tkq.log_softmax(x, scale=x.shape[0], dim=0)),
    "cross_entropy": (classified, lambda x, t: tkq.cross_entropy(x, t, **all_terms(x))),
    "cross_entropy, an int": (classified, lambda x, t: tkq.cross_entropy(x, t, softcap=x.shape[0])),
    "cross_entropy_and_gradient": (classified, lambda x, t: tkq.cross_entropy_and_gradient(x, t, **all_terms(x))),
    "linear_cross_entropy": (of_vocabulary, lambda x, w, t: tkq.linear_cross_entropy(x, w, t, **all_terms(x))),
    "flash_attn, softmax_scale": (heads, lambda q: tkq.flash_attn(q, q, q, softmax_scale=1 / q.shape[1])),
    "flash_attn, softcap": (heads, lambda q: tkq.flash_attn(q, q, q, softcap=1.0 * q.shape[1])),
    "flash_attn, ints": (heads, lambda q: tkq.flash_attn(q, q, q, softmax_scale=q.shape[1], softcap=q.shape[1])),
    "flash_attn, window": (heads, lambda q: tkq.flash_attn(q, q, q, window_size=(q.shape[1] // 2, q.shape[1] // 4))),
    "flash_attn_varlen": (packed, lambda q, cu: varlen(q, cu, q.shape[0])),
    "flash_attn_varlen, options": (packed, lambda q, cu: varlen(
        q, cu, softmax_scale=1 / q.shape[0], softcap=1.0 * q.shape[0], window_size=(q.shape[0] // 8, 0))),
    "gemm, alpha": (operands, lambda a, b: tkq.gemm(a, b, alpha=1 / a.shape[0])),
    "gemm, an int": (operands, lambda a, b: tkq.gemm(a, b, alpha=a.shape[0], activation="silu")),
    "gemm, beta": (operands, lambda a, b: tkq.gemm(a, b, c=a[:, :32], beta=1 / a.shape[0])),
    "rope": (turned, lambda x, t: tkq.rope(x, t, t, seqlen_offsets=x.shape[1] // 4)),
    "rope_qk": (turned, lambda x, t: tkq.rope_qk(x, x, t, t, seqlen_offsets=x.shape[1] // 4)),
    "rope, max_seqlen": (packed_and_turned, lambda x, cu, t: tkq.rope(
        x, t, t, cu_seqlens=cu, max_seqlen=x.shape[0])),
    "rope_cos_sin": (heads, lambda x: tkq.rope_cos_sin(x.shape[1], 2 * x.shape[1], 100 * x.shape[1], device="cpu")),
}


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.forward = call


def exported(call, inputs, strict=False):
    free = tuple({i: AUTO for i, n in enumerate(x.shape) if n == TRACED} for x in inputs)
    return torch.export.export(Module(call), inputs, dynamic_shapes=free, strict=strict)


def results(found):
    return [t.float() for t in (found if isinstance(found, tuple) else (found,))]


FIRST = {name.partition(",")[0]: name for name in reversed(CALLS)}.values()  # of each op


# strictly, torch.compile traces it: each op once, its other numbers are found alike
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sampled(when=lambda name, strict: name in FIRST or not strict)
def test_numbers_that_follow_from_a_size(name, strict):
    inputs, call = CALLS[name]
    torch._dynamo.reset()
    program = exported(call, inputs(TRACED), strict).module()
    for n in (TRACED, *OTHERS):
        for found, wanted in zip(results(program(*inputs(n))), results(call(*inputs(n))), strict=True):
            assert torch.equal(found, wanted), n


def test_what_is_exported_may_be_saved_and_has_gradients():
    inputs, file = operands, io.BytesIO()
    torch.export.save(exported(CALLS["gemm, alpha"][1], inputs(TRACED)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    a, b = (t.requires_grad_() for t in inputs(OTHERS[0]))
    gradients = (torch.autograd.grad(f(a, b).float().square().sum(), (a, b))
                 for f in (program, CALLS["gemm, alpha"][1]))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("call, inputs, words", [
    (lambda q: tkq.flash_attn(q, q, q, window_size=(q.shape[1] - 20, 0)), heads, r"window_size: got \(-4, 0\)"),
    (lambda q: tkq.flash_attn(q, q, q, softmax_scale=q.shape[1] - 16), heads, "softmax_scale: got 0"),
    (lambda q: tkq.flash_attn(q, q, q, softcap=q.shape[1] - 20), heads, "softcap: got -4"),
    (lambda q, cu: varlen(q, cu, q.shape[0] - 20), packed, "max_seqlen_q: got -4"),
    (lambda a, b: tkq.gemm(a, b, c=a[:, :32], beta=a.shape[0] - 16), operands, "c is given and beta is 0"),
])
def test_a_number_that_is_not_allowed_is_refused_when_it_is_known(call, inputs, words):
    program = exported(call, inputs(TRACED)).module()
    with pytest.raises(ValueError, match=words):
        program(*inputs(16))


@pytest.mark.parametrize("left, right", [(-2, 0), (0, 1 << 30)])
def test_a_launch_takes_no_other_limits_than_a_call(left, right):
    with pytest.raises(ValueError):
        arguments.refuse_limits(left, right)


def test_an_eps_that_the_dispatcher_does_not_know():
    eps, (x,) = torch.tensor(0.5).numpy()[()], rows(3)  # a numpy.float32, which is a number and no float
    assert not isinstance(eps, float)
    with FlopCounterMode(display=False):  # the way through the dispatcher
        assert torch.equal(tkq.rmsnorm(x, eps=eps), tkq.rmsnorm(x, eps=0.5))
        assert torch.equal(tkq.rmsnorm_quant(x, eps=eps)[1], tkq.rmsnorm_quant(x, eps=0.5)[1])
