"""linear_cross_entropy with hard numbers, NaN and infinity; the same bits every time, of what has no such test else."""
import math

import pytest
import torch
import torch.nn.functional as F

import tkq
from tests.gpu.losses.test_linear_cross_entropy import check, make
from tests.helpers.sanitizer.nan_fill import poisoned

BF16 = torch.bfloat16


@pytest.mark.parametrize("what", ["large", "small", "one huge element", "a common direction"])
def test_hard_data(what):
    """Of large logits, softmax is all on one class, or on some that are equal. Whole numbers, whose products are exact
    in any order: large logits that round to another neighbour would be other logits."""
    x, weight, target = make()
    g = torch.Generator("cuda").manual_seed(4)
    with torch.no_grad():
        for t in (x, weight):
            t.copy_(torch.randint(-3, 4, t.shape, device="cuda", generator=g))
        if what in ("large", "small"):
            x *= 64 if what == "large" else 2.0**-14  # logits to 1e4, and below 0.1
        elif what == "one huge element":
            rows = torch.arange(1300, device="cuda")
            x[rows, rows % 128] = 4096
        else:
            x += 100
    check(x, weight, target, what=what)
    # Of one sign: where large parts of weight's gradient cancel between chunks, what is left has the roundings of the
    # parts, as the docstring says.
    check(x, weight, target, torch.linspace(0.1, 1, 1300, device="cuda"), what=what, reduction="none")


def gradients(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_torchs(value, reduction):
    x, weight, target = make()
    target[700] = 5
    with torch.no_grad():
        x[700, 17] = value
    with poisoned():
        found = gradients(tkq.linear_cross_entropy(x, weight, target, reduction=reduction), x, weight)
    logits = F.linear(x.float(), weight.float())  # no 16-bit rounding: only where NaN and infinity are is asked
    wanted = gradients(F.cross_entropy(logits, target, reduction=reduction), x, weight)
    for name, mine, theirs in zip(("loss", "dx", "dweight"), found, wanted):
        assert torch.equal(torch.isnan(mine), torch.isnan(theirs)), name
        assert torch.equal(torch.isinf(mine), torch.isinf(theirs)), name


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_ignored_row_has_no_gradient_whatever_is_in_it(value):
    """(torch's is NaN.) But the sum over rows that makes weight's gradient has 0 times NaN in it, or 0 times infinity:
    where the one number of x goes, and nowhere else."""
    x, weight, target = make()
    target[701] = -100
    clean = gradients(tkq.linear_cross_entropy(x, weight, target), x, weight)
    with torch.no_grad():
        x[701, 17] = value
    with poisoned():
        loss, dx, dweight = gradients(tkq.linear_cross_entropy(x, weight, target), x, weight)
    assert torch.equal(loss, clean[0]) and torch.equal(dx, clean[1]) and not dx[701].any()
    rest = torch.arange(128, device="cuda") != 17
    assert torch.isnan(dweight[:, 17]).all() and torch.equal(dweight[:, rest], clean[2][:, rest])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_linear_cross_entropy_has_the_same_bits_every_time(reduction):
    case = make()
    first = gradients(tkq.linear_cross_entropy(*case, reduction=reduction), *case[:2])
    for _ in range(10):
        found = gradients(tkq.linear_cross_entropy(*case, reduction=reduction), *case[:2])
        assert all(torch.equal(a, b) for a, b in zip(found, first))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_and_its_gradient_have_the_same_bits_every_time(reduction):
    g = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(300, 1000, device="cuda", generator=g).to(BF16)
    target = torch.randint(1000, (300,), device="cuda", generator=g)
    first = tkq.cross_entropy_and_gradient(logits, target, reduction=reduction)
    for i in range(10):
        inplace = i % 2 == 1
        found = tkq.cross_entropy_and_gradient(logits.clone(), target, reduction=reduction, inplace=inplace)
        assert all(torch.equal(a, b) for a, b in zip(found, first))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "rope_qk"])
def test_pointwise_gradients_have_the_same_bits_every_time(name):
    g = torch.Generator("cuda").manual_seed(2)
    a, b = (torch.randn(2, 40, 8, 64, device="cuda", generator=g).to(BF16).requires_grad_() for _ in range(2))
    cos, sin = tkq.rope_cos_sin(40, 64, device=a.device)

    def run():
        y = tkq.rope_qk(a, b, cos, sin) if name == "rope_qk" else (getattr(tkq, name)(a.flatten(2), b.flatten(2)),)
        return [*y, *torch.autograd.grad([t.float().square().sum() for t in y], (a, b))]

    first = run()
    for _ in range(10):
        assert all(torch.equal(s, t) for s, t in zip(run(), first))


@pytest.mark.slow  # test_every_op.py compiles each function every day
def test_a_loss_and_its_gradient_as_an_op():
    logits, target = torch.randn(300, 1000, device="cuda").to(BF16), torch.randint(1000, (300,), device="cuda")
    first = tkq.cross_entropy_and_gradient(logits, target)
    torch.library.opcheck(torch.ops.tkq.cross_entropy_and_gradient, (logits, target, None, -100, "mean", 0.0, 0.0, 0.0),
                          test_utils=("test_schema", "test_faketensor"))
    torch._dynamo.reset()
    run = torch.compile(tkq.cross_entropy_and_gradient, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(run(logits, target), first))
