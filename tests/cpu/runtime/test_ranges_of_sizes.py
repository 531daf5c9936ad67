"""A size that stays free over a range, in torch.compile and in a program that torch.export makes: no op compares it
with another size, so that one program is right for the whole range."""
import pytest
import torch

import tkq

BF16, F8, INT = torch.bfloat16, torch.float8_e4m3fn, torch.int32
LEAST, MOST = 2, 4096
TABLE, LENGTHS = torch.arange(8, dtype=INT).view(2, 4), torch.tensor([40, 50], dtype=INT)


def made(*shape, dtype=BF16):
    return torch.linspace(-2.0, 2.0, torch.Size(shape).numel()).sin().view(shape).to(dtype)


PAGES, LATENT, TAPS = made(8, 16, 2, 64), made(8, 16, 1, 576), made(5, 70, dtype=torch.float32)


def cached(q, **options):
    return tkq.flash_attn_with_kvcache(q, PAGES, PAGES, cache_seqlens=LENGTHS, block_table=TABLE, **options)


def float8(k, scale):
    return tkq.flash_attn_with_kvcache(made(2, 1, 4, 64), k, k, cache_seqlens=LENGTHS, block_table=TABLE,
                                       k_descale=scale, v_descale=scale)


def append_float8(k_cache, scale):
    k_cache, scale, k = k_cache.clone(), scale.clone(), made(3, 2, 64)
    tkq.kv_append(k, k, k_cache, k_cache.clone(), torch.arange(3), k_scale=scale, v_scale=scale.clone())
    return k_cache.float(), scale


def pages(n):
    return made(n, 16, 2, 64, dtype=F8), torch.ones(n, 16, 2)


# the call, its tensors with n of what is free, and the dimension of each, None of one that has none
CALLS = {
    "fft_conv, sequences": (lambda u: tkq.fft_conv(u, TAPS), lambda n: (made(n, 5, 70),), 0),
    "fft_conv, heads": (tkq.fft_conv, lambda n: (made(3, n, 70), made(n, 70, dtype=torch.float32)), (1, 0)),
    "flash_attn_with_kvcache, queries": (cached, lambda n: (made(2, n, 4, 64),), 1),
    "flash_attn_with_kvcache, ragged": (lambda q, ends: cached(q, cu_seqlens_q=ends), lambda n: (
        made(n, 4, 64), torch.tensor([0, 4, n], dtype=INT)), (0, None)),
    "flash_attn_with_kvcache, pages with scales": (float8, pages, 0),
    "kv_append, pages with scales": (append_float8, pages, 0),
    "mla_decode, queries": (lambda q: tkq.mla_decode(q, LATENT, TABLE, LENGTHS, softmax_scale=0.1),
                            lambda n: (made(2, n, 4, 576),), 1),
    "mla_decode, heads": (lambda q: tkq.mla_decode(q, LATENT, TABLE, LENGTHS, softmax_scale=0.1),
                          lambda n: (made(2, 3, n, 576),), 2),
}


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *inputs):
        return self.call(*inputs)


def places(inputs, free):
    return free if isinstance(free, tuple) else (free,) * len(inputs)


def same(found, wanted):
    for x, y in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, wanted)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("first", [9, 24])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_over_a_range(name, first):
    """Traced on both sides of the other sizes."""
    call, inputs, free = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = inputs(first)
    for x, place in zip(given, places(given, free)):
        if place is not None:
            torch._dynamo.mark_dynamic(x, place, min=LEAST, max=MOST)
    same(compiled(*given), call(*given))


@pytest.mark.parametrize("name", CALLS)
def test_exported_over_a_range(name):
    call, inputs, free = CALLS[name]
    given, n = inputs(9), torch.export.Dim("n", min=LEAST, max=MOST)
    program = torch.export.export(Module(call), given, dynamic_shapes=(
        tuple({} if place is None else {place: n} for place in places(given, free)),), strict=False).module()
    for other in (9, 40):
        same(program(*inputs(other)), call(*inputs(other)))


@pytest.mark.parametrize("tokens, granularity, least", [
    (64, "row", LEAST), (70, "row", LEAST), (70, "tensor", LEAST), (128, "1x128", 65), (150, "1x128", 65)])
def test_fp8_linear_compiled_over_a_range(tokens, granularity, least):
    """Of a layer that is trained, whose tokens are padded to a multiple of 16. "1x128" of more than 128 tokens: a
    single scale for each column is another program."""
    torch._dynamo.reset()
    layer = tkq.nn.Fp8Linear(64, 32, dtype=BF16, granularity=granularity)
    x, same_x = (made(2, tokens, 64).requires_grad_() for _ in range(2))
    torch._dynamo.mark_dynamic(x, 1, min=least, max=1000)
    found, wanted = torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(same_x)
    assert torch.equal(found, wanted)
    gradients = [torch.autograd.grad(y.float().square().sum(), (given, layer.weight))
                 for y, given in ((found, x), (wanted, same_x))]
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("strict", [False, True])
def test_fp8_linear_exported_over_a_range(strict):
    layer = tkq.nn.Fp8Linear(64, 32, dtype=BF16)
    tokens = torch.export.Dim("tokens", min=LEAST, max=100)
    program = torch.export.export(layer, (made(2, 70, 64),), dynamic_shapes=({1: tokens},), strict=strict).module()
    for n in (33, 64):
        x = made(2, n, 64)
        assert torch.equal(program(x), layer(x))
