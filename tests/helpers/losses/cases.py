"""What the tests of cross entropy share, on the GPU and on the CPU: inputs, and the comparison by the 2x rule."""
import torch

from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.losses import launch
from tkq.reference import losses as reference
from tkq.reference.losses import Terms
from tkq.testing import assert_2x

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EVERYTHING = dict(label_smoothing=0.1, z_loss=1e-3, softcap=20.0)
OPTIONS = (dict(label_smoothing=0.1), dict(label_smoothing=1.0), dict(softcap=5.0), dict(z_loss=1e-2),
           dict(z_loss=1e-4, softcap=30.0), dict(ignore_index=3))


def make(shape, dtype="bf16", size=1.0, seed=0, device="cuda"):
    """Logits (M, V) and targets, every fifth row ignored."""
    g = torch.Generator(device).manual_seed(seed)
    logits = (torch.randn(shape, device=device, generator=g) * size).to(DTYPES[dtype])
    target = torch.randint(shape[-1], shape[:-1], device=device, generator=g)
    target.view(-1)[1::5] = -100
    return logits, target


def class_weights(V, dtype="fp32", seed=3, device="cuda"):
    g = torch.Generator(device).manual_seed(seed)
    return (torch.rand(V, device=device, generator=g) + 0.1).to(DTYPES[dtype])


def incoming(target):
    """A gradient for losses that are not reduced."""
    g = torch.Generator(target.device).manual_seed(7)
    return torch.randn(target.shape, device=target.device, generator=g)


def as_type(terms, dtype):
    """The terms with class weights of another type."""
    return terms._replace(weight=None if terms.weight is None else terms.weight.to(dtype))


def torchs(logits, target, dloss, terms, dtype):
    """(loss, gradient) by PyTorch's autograd, computed in dtype: the reference's forward, not its gradient formula."""
    x = logits.detach().to(dtype).requires_grad_()
    loss = reference.cross_entropy(x, target.long(), as_type(terms, dtype))
    gradient, = torch.autograd.grad(loss, x, dloss.to(dtype).expand(loss.shape))
    return loss.detach(), gradient


def check(logits, target, terms=None, what="", ulps=2.0, **options):
    """Forward and backward in memory that is NaN before. ulps: of the largest loss."""
    terms = Terms(**{"reduction": "none", **options}) if terms is None else terms
    each = terms.reduction == "none"
    shape = target.shape if each else ()
    dloss = incoming(target) if each else torch.tensor(1.5, device=logits.device)
    with poisoned():
        loss, saved = launch.forward(logits, target, terms)
        gradient = launch.backward(logits, target, dloss, saved, terms)
    truth, peer = (torchs(logits, target, dloss, terms, dtype) for dtype in (torch.float64, torch.float32))
    assert loss.dtype == torch.float32 and loss.shape == shape and gradient.dtype == logits.dtype
    if terms.softcap:  # z is good to softcap * 2^-22
        ulps += 2 * terms.softcap / truth[0][truth[0].isfinite()].abs().max().clamp_min(1e-3).item()
    assert_2x(loss, truth[0], peer[0], ulps=ulps, what=f"{what} {terms[1:]}: loss", bias_ulps=ulps / 2)
    # an ulp of the gradient's own type, and in fp32 a few of exp and its argument
    wide = 1 if logits.dtype != torch.float32 else 16 + 2 * terms.softcap
    assert_2x(gradient, truth[1], peer[1].to(logits.dtype), ulps=wide, what=f"{what} {terms[1:]}: gradient",
              bias_ulps=0.25)
    return loss, gradient


def check_both(logits, target, what="", **options):
    """The fused pass beside the two apart, into other memory and over the logits."""
    terms = Terms(**{"reduction": "mean", **options})
    loss, saved = launch.forward(logits, target, terms)
    gradient = launch.backward(logits, target, torch.ones((), device=logits.device), saved, terms)
    eps = torch.finfo(logits.dtype).eps
    limit = 2 * eps * gradient.float().abs().nan_to_num().max().item()
    for inplace in (False, True):
        given = logits.clone()
        with poisoned():
            found, fused = launch.both(given, target, terms, inplace)
        assert (fused.data_ptr() == given.data_ptr()) == inplace
        assert torch.allclose(found, loss, rtol=1e-6, equal_nan=True), f"{what} in place {inplace}: {found} for {loss}"
        assert torch.allclose(fused.float(), gradient.float(), rtol=2 * eps, atol=limit, equal_nan=True), (
            f"{what} in place {inplace}: {(fused.float() - gradient.float()).abs().max()} apart")
        if not inplace:
            assert torch.equal(given.nan_to_num(), logits.nan_to_num())
