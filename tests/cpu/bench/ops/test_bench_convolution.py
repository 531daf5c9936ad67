"""The benchmarks of convolutions: what its baselines give and how it is judged."""
import sys

import pytest
import torch

from bench.core.results import Bound
from bench.ops import fft_conv
from bench.ops.convolution import error_of
from bench.peers.convolution import PEERS
from bench.peers.fft_conv import PEERS as FFT_PEERS
from bench.studies import fft_conv_errors


@pytest.fixture
def given():
    g = torch.Generator().manual_seed(0)
    x, weight, bias, dy = (torch.randn(*shape, generator=g).bfloat16() for shape in (
        (2, 9, 256), (256, 4), (256,), (2, 9, 256)))
    return x, weight / 2, bias, dy


def test_normed_heads_are_apart_and_nothing_is_copied_beside_them(given):
    judge = error_of("normed")
    heads, rest = found = PEERS["convolution_normed"]["torch"]()(*given[:3])
    assert heads.shape == (2, 9, 1, 128) and rest.shape == (2, 9, 128) and rest._is_view()
    assert judge("torch", given[:3], found) < 0.01 < 0.2 < judge("torch", given[:3], (2 * heads, rest))


def test_their_gradients(given):
    judge = error_of("normed_training")
    y, dx, *_ = PEERS["convolution_normed_training"]["torch"]()(*given)
    assert len(y) == 2 and judge("torch", given, (y, dx)) < 0.02 < 0.2 < judge("torch", given, (y, -dx))


def test_a_norm_that_is_not_there_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.modules.l2norm", None)
    monkeypatch.setitem(sys.modules, "causal_conv1d", type(sys)("causal_conv1d"))
    sys.modules["causal_conv1d"].causal_conv1d_fn = None
    with pytest.raises(ImportError):
        PEERS["convolution_normed"]["causal-conv1d"]()


def test_long_convolutions_are_bound_beside_the_package_and_else_beside_torch():
    for job in (*fft_conv.jobs("forward", fft_conv.SHAPES), *fft_conv.jobs("training", fft_conv.SHAPES[:4])):
        asked, tokens = job.question, int(job.question.shape.rpartition("N")[2])
        if (job.question.section, tokens) == ("training", 32768):
            assert asked.instead is None  # asked of beside the package alone
        else:
            assert asked.instead.against == ("torch",) and asked.instead.at_least >= 3
        assert asked.bound == (asked.instead if tokens < 32768 else Bound(("FlashFFTConv",), {
            32768: 1.5, 262144: 2.0, 1048576: 2.5}[tokens]))


def test_copies_take_what_their_section_is_given():
    """Of the training one took a bias, failed, and no roof was judged."""
    u, k, dy = torch.randn(2, 3, 8), torch.randn(3, 8), torch.ones(2, 3, 8)
    copies = {op: FFT_PEERS[op]["copy"]() for op in FFT_PEERS}
    assert torch.equal(copies["fft_conv"](u, k), u) and torch.equal(copies["fft_conv_circular"](u, k), u)
    copied, added = copies["fft_conv_training"](u, k, dy)
    assert torch.equal(copied, u) and torch.equal(added, u + 1)


def test_errors_of_long_convolutions():
    """On a CPU all ways are torch.fft."""
    assert torch.cuda.is_available() or fft_conv_errors.main([]) == 2
    for row in fft_conv_errors.measure("cpu", (96,)):
        assert row["half"] == row["split"] and row["torch"]["y"] < 4e-3 and row["torch"]["dk"] < 1e-6
        assert row["signal"] != "random" or row["torch"]["y"] > 1e-4
