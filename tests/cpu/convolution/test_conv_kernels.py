"""The convolution's kernels on a CPU: their own code against the reference in float64, by layout, vector and run."""
import pytest
import torch

from tests.helpers.emulation.convolution import (
    AlongTimeOnCpu,
    ChannelBackwardOnCpu,
    ChannelForwardOnCpu,
    SumsOnCpu,
    compiled,
)
from tkq.convolution.config import ConvConfig
from tkq.convolution.spec import ConvSpec, SumsSpec
from tkq.reference import convolution as reference

RUNS = 37, 16, 5, 1
CUTS = {"short": [0, 5, 5, 6, 20, 37], "around": [2, 5, 33], "falling": [-3, 20, 4, 99], "no": [4]}


def randn(*shape):
    return torch.randn(shape)


def nan(*shape):
    return torch.full(shape, torch.nan)


def double(*tensors):
    return [None if t is None else t.double() for t in tensors]


def close(found, wanted, what):
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")


def gradients(launch, sums, x, W, runs):
    """(dx, dweight, dbias). launch(dx, parts): the backward's."""
    B, _, C = x.shape
    dx, parts, dweight, dbias = torch.full_like(x, torch.nan), nan(B, runs, W + 1, C), nan(C, W), nan(C)
    launch(dx, parts)
    sums(parts.view(-1, W + 1, C), dweight, dbias, B * runs)
    return dx, dweight, dbias


@pytest.mark.parametrize("cuts, has_state", [(None, False), (None, True), *((cuts, True) for cuts in CUTS),
                                             ("short", False), ("numbers", False)])
@pytest.mark.sampled(when=lambda cuts, has_state: has_state == (cuts not in (None, "numbers")))
def test_along_channels(cuts, has_state):
    torch.manual_seed(0)
    numbers = cuts == "numbers"  # seq_idx
    W, C, B = 4, 12, 1 if cuts and not numbers else 2
    cu = torch.tensor(CUTS[cuts], dtype=torch.int32) if cuts and not numbers else None
    cu = torch.tensor([[*[4] * 5, 3, *[4] * 14, *[-1] * 17], range(37)], dtype=torch.int32) if numbers else cu
    N = B if cu is None else len(cu) - 1
    x, weight, bias, dy = randn(B, 37, C), randn(C, W), randn(C), randn(B, 37, C)
    state = randn(N, C, W - 1) if has_state else None
    kind = dict(state="fp32" if has_state else None, packed="int32" if cuts else None, numbers=numbers)
    spec = [ConvSpec("fp32", "fp32", W, "fp32", True, 4, gradients=g, **kind) for g in (None, "both")]
    forward, backward = (compiled(of, s, ConvConfig(rows=3)) for of, s in zip(
        (ChannelForwardOnCpu, ChannelBackwardOnCpu), spec))
    sums = compiled(SumsOnCpu, SumsSpec(W, "fp32", "fp32"))
    given = double(x, weight, bias)
    want, _ = reference.causal_conv1d(*given, "silu", *double(state), cu)
    wanted = reference.causal_conv1d_backward(dy.double(), None, *given, "silu", *double(state), cu)
    for run in RUNS:
        y = nan(B, 37, C)
        forward(x, (weight, bias, state, cu, y, None), run)
        close(y, want, f"y, runs of {run}")
        launch = lambda dx, parts, run=run: backward(x, (weight, bias, state, cu, dy, dx, parts, None), run)
        found = gradients(launch, sums, x, W, -(-37 // run))
        for name, ours, right in zip(("dx", "dweight", "dbias"), found, wanted):
            close(ours, right, f"{name}, runs of {run}")


@pytest.mark.parametrize("vector, W, S", [(4, 4, 36), (1, 8, 37), (4, 2, 8)])
def test_along_time(vector, W, S):
    torch.manual_seed(0)
    x, dy, weight, bias = randn(2, 5, S).mT, randn(2, 5, S).mT, randn(5, W), randn(5)
    spec = [ConvSpec("fp32", "fp32", W, "fp32", True, vector, "time", gradients=g) for g in (None, "both")]
    forward, backward = (compiled(AlongTimeOnCpu, s, ConvConfig(rows)) for s, rows in zip(spec, (2, 1)))
    sums = compiled(SumsOnCpu, SumsSpec(W, "fp32", "fp32"))
    given = double(x, weight, bias)
    want, _ = reference.causal_conv1d(*given, "silu")
    wanted = reference.causal_conv1d_backward(dy.double(), None, *given, "silu", None, None)
    for run in (40, 16, 4) if vector >= W - 1 else (40,):  # a warp of one lane has one vector behind a run, not 32
        y = nan(2, 5, S).mT
        forward(x, (weight, bias, y, None, None, None), run)
        close(y, want, f"y, runs of {run}")
        launch = lambda dx, parts, run=run: backward(x, (weight, bias, None, dy, dx, parts), run)
        found = gradients(launch, sums, x, W, -(-S // run))
        for name, ours, right in zip(("dx", "dweight", "dbias"), found, wanted):
            close(ours, right, f"{name}, runs of {run}")


@pytest.mark.parametrize("gradients_", ["x", "weights"])
@pytest.mark.parametrize("layout", ["channels", "time"])
def test_one_of_the_gradients(layout, gradients_):
    torch.manual_seed(0)
    x, dy, dx = (torch.empty(1, 10, 4) if layout == "channels" else torch.empty(1, 4, 10).mT for _ in range(3))
    x.normal_(), dy.normal_(), dx.fill_(torch.nan)
    weight, parts = randn(4, 3), nan(1, 2, 4, 4)
    dx, parts = (dx, None) if gradients_ == "x" else (None, parts)
    of = ChannelBackwardOnCpu if layout == "channels" else AlongTimeOnCpu
    kernel = compiled(of, ConvSpec("fp32", "fp32", 3, None, False, 2, layout, gradients=gradients_), ConvConfig())
    more = (None,) if layout == "channels" else ()
    kernel(x, (weight, None, None, *more, dy, dx, parts, *more), 6)
    wanted = reference.causal_conv1d_backward(*double(dy, None, x, weight), None, None, None, None)
    if gradients_ == "x":
        close(dx, wanted[0], "dx")
    else:
        close(parts.sum(1)[0, :3].T, wanted[1], "dweight")


def test_sums_of_groups():
    """In two steps, as of many runs."""
    torch.manual_seed(0)
    parts, groups, dweight, dbias = randn(70, 5, 6), nan(3, 5, 6), nan(6, 4), nan(6)
    compiled(SumsOnCpu, SumsSpec(4, groups=True))(parts, groups, None, 32)
    close(groups, torch.stack([p.double().sum(0) for p in parts.split(32)]), "groups")
    compiled(SumsOnCpu, SumsSpec(4, "fp32", "fp32"))(groups, dweight, dbias, 3)
    close(dweight, parts.double().sum(0)[:4].T, "dweight")
    close(dbias, parts.double().sum(0)[4], "dbias")
