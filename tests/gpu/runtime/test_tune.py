"""tkq.tune on a GPU: what it finds is right, and is what later calls run."""
import itertools

import pytest
import torch

import tkq
from tests.helpers.gemm.fp8_cases import exact, operands
from tkq.gemm import candidates
from tkq.gemm.dense import launch
from tkq.gemm.fp8 import ops
from tkq.gemm.grouped import ops as grouped_ops
from tkq.runtime.compile import tuned
from tkq.runtime.compile.cache import Cache
from tkq.runtime.device import arch
from tkq.testing import timing
from tkq.warmup import tune

EFFORT = timing.Effort(rounds=7, round_seconds=0.002, warmup_seconds=0.01)
FEW = 2  # candidates


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Nothing found before, and few candidates: each is a compile. Kernels stay in their own cache."""
    monkeypatch.setattr(tuned, "cache", lambda: Cache(tmp_path / "cache"))
    tuned.ignore_tuned(False)
    for name in ("of_gemm", "of_fp8_gemm", "of_grouped_gemm"):
        whole = getattr(candidates, name)
        monkeypatch.setattr(candidates, name, lambda *args, whole=whole: whole(*args)[:FEW])
    modules = (launch, ops, grouped_ops)
    for module in modules:
        module.clear()
    yield
    for module in modules:
        module.clear()


def check(function, *args, wanted, **kw):
    found = tkq.tune(function, *args, effort=EFFORT, **kw)
    assert 1 < len(found.times) <= FEW and not found.failed and found.chosen in found.times
    assert all(ms > 0 for ms in found.times.values())
    assert tkq.tune(function, *args, effort=EFFORT, **kw) == found, "measured again"
    with torch.no_grad():
        assert torch.equal(function(*args, **kw), wanted)
    return found


def pick_another(found, tunable):
    """What was found is replaced by another candidate, as if that had been the fastest."""
    listed = candidates.of(tunable.problem, arch.num_sms(tunable.result.device))
    other = next(c for c in listed if str(c) != found.chosen)
    tuned.write(tunable.problem, other, {})
    tunable.clear()
    return other


def test_gemm(monkeypatch):
    a, b = (torch.randint(-4, 5, s, device="cuda").bfloat16() for s in ((513, 256), (264, 256)))
    bias = torch.randint(-4, 5, (264,), device="cuda").bfloat16()
    want = torch.relu(a.double() @ b.t().double() + bias.double()).bfloat16()
    kw = dict(bias=bias, activation="relu")
    found = check(tkq.gemm, a, b.t(), wanted=want, **kw)
    other = pick_another(found, launch.tunable(a, b.t(), **kw))
    asked = []
    real = launch.function
    monkeypatch.setattr(launch, "function", lambda recipe: asked.append(recipe) or real(recipe))
    assert torch.equal(tkq.gemm(a, b.t(), **kw), want) and asked[0].args[1] == other
    assert tkq.tune(tkq.gemm, a[:, 1:9], b[:, 1:9].t()) is None, "one kernel only"
    out = torch.full_like(want, -77)
    tkq.tune(tkq.gemm, a, b.t(), out=out, effort=EFFORT, again=True, **kw)
    assert (out == -77).all(), "the user's memory was written"
    assert torch.equal(tkq.gemm(a, b.t(), out=out, **kw), want)


def test_batches_with_a_shared_matrix():
    a, b = torch.randint(-4, 5, (3, 256, 264), device="cuda").bfloat16(), torch.eye(264, device="cuda").bfloat16()
    check(tkq.gemm, a, b.expand(3, -1, -1), wanted=a)


@pytest.mark.parametrize("kind", ("row", "1x128_128x128"))
def test_fp8_gemm(kind):
    args = operands(300, 528, 272, kind, device="cuda", whole=True, powers=True)
    check(tkq.fp8_gemm, *args, wanted=exact(args, torch.bfloat16))


def test_in_place():
    a, b = (torch.randint(-4, 5, s, device="cuda").bfloat16() for s in ((512, 256), (256, 264)))
    c = torch.ones(512, 264, device="cuda").bfloat16()
    found = tkq.tune(tkq.gemm, a, b, c=c, beta=1.0, out=c, effort=EFFORT)
    assert not found.failed and (c == 1).all()
    with pytest.raises(ValueError, match="shares memory with a"):
        tkq.tune(tkq.gemm, a, torch.eye(256, device="cuda").bfloat16(), out=a)


def test_grouped_gemm(monkeypatch):
    a, b = (torch.randint(-3, 4, s, device="cuda").bfloat16() for s in ((500, 256), (3, 256, 264)))
    offsets = torch.tensor([100, 100, 500], device="cuda", dtype=torch.int32)
    want = torch.cat([a[:100].double() @ b[0].double(), a[100:].double() @ b[2].double()]).bfloat16()
    check(tkq.grouped_gemm, a, b, offsets, wanted=want)
    shorter = torch.tensor([100, 100, 450], device="cuda", dtype=torch.int32)
    poison = itertools.count(1)  # each result is written to memory that holds another number
    monkeypatch.setattr(tune, "_blank", lambda x: torch.full_like(x, 1000 * next(poison)))
    assert not tkq.tune(tkq.grouped_gemm, a, b, shorter, effort=EFFORT, again=True).failed, "rows that were not written"


def test_a_tensor_on_the_cpu_is_named():
    a = torch.ones(64, 64, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="cpu"):
        tkq.tune(tkq.gemm, a, a.cpu())
