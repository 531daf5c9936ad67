"""Numbers that vary from call to call under torch.compile."""
import pytest
import torch

import tkq

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.linspace(-1.0, 1.0, 16)
TARGET = torch.tensor([1, 15, 4])
C = torch.ones(3, 32, dtype=torch.bfloat16)
VOCABULARY = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()

CALLS = {
    "softmax, scale": lambda x, s: tkq.softmax(x, scale=s),
    "log_softmax, scale": lambda x, s: tkq.log_softmax(x, scale=s),
    "cross_entropy, z_loss": lambda x, s: tkq.cross_entropy(x, TARGET, z_loss=s),
    "cross_entropy, label_smoothing": lambda x, s: tkq.cross_entropy(x, TARGET, label_smoothing=s),
    "cross_entropy, softcap": lambda x, s: tkq.cross_entropy(x, TARGET, softcap=s),
    "linear_cross_entropy, z_loss": lambda x, s: tkq.linear_cross_entropy(x.bfloat16(), VOCABULARY, TARGET, z_loss=s),
    "rmsnorm, eps": lambda x, s: tkq.rmsnorm(x, WEIGHT, eps=s),
    "rmsnorm, weight_offset": lambda x, s: tkq.rmsnorm(x, WEIGHT, weight_offset=s),
    "layernorm, weight_offset": lambda x, s: tkq.layernorm(x, WEIGHT, weight_offset=s),
}
EVERY = CALLS | {
    "gemm, alpha": lambda x, s: tkq.gemm(x.bfloat16(), VOCABULARY.t(), alpha=s),
    "gemm, beta": lambda x, s: tkq.gemm(x.bfloat16(), VOCABULARY.t(), c=C, beta=s),
    "flash_attn, softmax_scale": lambda x, s: tkq.flash_attn(*[x.bfloat16()[None, :, None]] * 3, softmax_scale=s),
    "flash_attn, softcap": lambda x, s: tkq.flash_attn(*[x.bfloat16()[None, :, None]] * 3, softcap=s),
    "rmsnorm_quant, weight_offset": lambda x, s: tkq.rmsnorm_quant(x, WEIGHT, weight_offset=s)[1],
}


@pytest.mark.parametrize("names, backend", [([n for n in CALLS if not n.startswith("linear")], "aot_eager"),
                                            ([n for n in CALLS if n.startswith("linear")], "eager")])
def test_numbers_that_vary(names, backend):
    """All in one function. From the second value on Dynamo takes a float for one that varies."""
    torch._dynamo.reset()

    def every(x, s):
        return [CALLS[name](x, s) for name in names]

    compiled = torch.compile(every, backend=backend, fullgraph=True)
    for s in (0.25, 0.5):
        x, same = (X.clone().requires_grad_(s == 0.5) for _ in range(2))
        for name, found, wanted in zip(names, compiled(x, s), every(same, s), strict=True):
            assert torch.equal(found, wanted), (name, s)
            if x.requires_grad:
                gradients = (torch.autograd.grad(y.square().sum(), t, retain_graph=True)[0]
                             for y, t in ((found, x), (wanted, same)))
                assert torch.allclose(*gradients, rtol=2.0**-6, atol=1e-6), name
    torch._dynamo.reset()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e39, -1e39, 3.4028236e38,
                                    pytest.param(10**400, id="1e400")])
def test_a_number_that_is_not_finite(name, number):
    with pytest.raises(ValueError, match="finite|label_smoothing"):
        EVERY[name](X, number)


@pytest.mark.parametrize("name", [name for name in EVERY if "label_smoothing" not in name])
def test_the_largest_of_float32_is_finite(name):
    EVERY[name](X, 3.4028235e38)  # rounded to it
