"""Steps of the convolution: the kernel's own code on a CPU, and the op on CPU tensors."""
import pytest
import torch

import tkq
from tests.helpers.emulation.convolution import ConvStepOnCpu, function
from tkq.convolution.spec import StepSpec
from tkq.reference import convolution as reference


@pytest.mark.parametrize("T, L, columns, indices, along_columns", [
    (1, 3, 3, None, True), (1, 4, 4, "int64", True), (2, 3, 3, "int32", False), (5, 6, 6, "int32", False),
    (2, 9, 0, "int32", True), (5, 4, 0, None, True), (0, 4, 4, None, True)])
def test_the_kernel(monkeypatch, T, L, columns, indices, along_columns):
    torch.manual_seed(0)
    N, M, C, W = 4, 6, 5, 4
    rows = {None: None, "int32": torch.tensor([5, 0, -1, 3], dtype=torch.int32),
            "int64": torch.tensor([1 << 40, -(1 << 40), 6, 2])}[indices]
    x, weight, bias = torch.randn(N, T, C), torch.randn(C, W), torch.randn(C)
    pool = torch.randn(M, C, L) if along_columns else torch.randn(M, L, C).mT
    kernel = function(ConvStepOnCpu(StepSpec("fp32", "fp32", W, "fp32", True, "fp32", indices, columns,
                                           T != 1)),
                      monkeypatch)
    wide = pool.double()
    want = reference.causal_conv1d_step(x.double(), wide, weight.double(), bias.double(), "silu", rows)
    y = torch.full((N, T, C), torch.nan)
    if T:
        kernel(*((x, (pool, weight, bias, rows, y)) if T > 1 else (x[:, 0], (pool, weight, bias, rows, y[:, 0]))))
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(pool, wide.float())


def test_a_step_is_the_convolution():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 9, 5), torch.randn(5, 4), torch.randn(5)
    whole, last = tkq.causal_conv1d(x, weight, bias, "silu", None, True)
    pool = torch.zeros(7, 5, 4)
    rows = torch.tensor([6, 1, 2])
    first = tkq.causal_conv1d_step(x[:, :4], pool, weight, bias, "silu", rows)
    others = [tkq.causal_conv1d_step(x[:, t], pool, weight, bias, "silu", rows) for t in range(4, 9)]
    torch.testing.assert_close(torch.cat((first, torch.stack(others, 1)), 1), whole)
    assert torch.equal(pool[rows, :, 1:], last)
    assert not pool[[0, 3, 4, 5]].any()


def test_out_and_versions():
    x, weight, pool = torch.randn(2, 5), torch.randn(5, 2), torch.zeros(2, 5, 1)
    out, before = torch.full((2, 5), torch.nan), pool._version
    assert tkq.causal_conv1d_step(x, pool, weight, out=out) is out and out.isfinite().all()
    assert pool._version > before and torch.equal(pool[..., 0], x)


@pytest.mark.parametrize("error, words, changed", [
    (ValueError, "conv_states: has 2 columns", dict(conv_states=torch.zeros(4, 6, 2))),
    (ValueError, "conv_states: shape is", dict(conv_states=torch.zeros(4, 5, 3))),
    (ValueError, "conv_states: has 1 rows for 2", dict(conv_states=torch.zeros(1, 6, 3))),
    (ValueError, "cache_indices: shape is", dict(cache_indices=torch.zeros(3, dtype=torch.int32))),
    (ValueError, "conv_states: .* share memory", dict(conv_states=torch.zeros(1, 6, 3).expand(4, 6, 3))),
    (NotImplementedError, "weight: has 9 taps", dict(weight=torch.zeros(6, 9))),
    (NotImplementedError, "x requires a gradient", dict(x=torch.zeros(2, 6, requires_grad=True))),
    (TypeError, "out is torch.float16", dict(out=torch.zeros(2, 6).half()))])
def test_what_is_refused(error, words, changed):
    given = dict(x=torch.zeros(2, 6), conv_states=torch.zeros(4, 6, 3), weight=torch.zeros(6, 4)) | changed
    with pytest.raises(error, match=f"causal_conv1d_step: {words}"):
        tkq.causal_conv1d_step(**given)
