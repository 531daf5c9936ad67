"""What fft_conv gives to kernels, where no GPU is needed: tensors as they are read, room for what is written, and which
launches make gradients."""
import pytest
import torch

import tkq
from tests.helpers.emulation import fake_gpu
from tkq.convolution.fft import launch, ops
from tkq.convolution.fft.long import launch as long
from tkq.convolution.fft.long.spec import SEGMENT, size_of
from tkq.convolution.fft.tensors import Given, vector_of
from tkq.convolution.fft.whole import launch as of_whole

BF16 = torch.bfloat16
TENSORS = "u", "pre", "post", "dy"


def later(x):
    """One element later in memory."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def launches_of(call, *given):
    with fake_gpu.launches() as seen:
        call(*given)
    return seen


@pytest.mark.parametrize("one", [None, *TENSORS])
@pytest.mark.parametrize("tokens", [1024, 32768])
def test_accesses_are_no_wider_than_all_tensors_allow(tokens, one):
    u, pre, post, dy = (later(x) if name == one else x for name, x in (
        (name, torch.zeros(2, 3, tokens).to(BF16)) for name in TENSORS))
    given = Given(u, torch.zeros(3, 64), None, True, pre, post)
    forth = launches_of(launch.forward, given)[-1][0].args[0]
    assert forth.vector == (1 if one in TENSORS[:3] else 8)
    back = [recipe.args[0].vector for recipe, _ in launches_of(launch.filter_gradient, given, dy)
            if recipe.builder.endswith((":FilterGradient", ":WholeSpectra"))]
    assert back == ([1 if one in TENSORS else 8] if tokens == 1024 else [
        1 if one in pair else 8 for pair in (("u", "pre"), ("dy", "post"))])


def test_how_wide_accesses_are():
    assert [vector_of(torch.zeros(1, 1, n).to(BF16)) for n in (8, 12, 16)] == [8, 1, 8]
    x = torch.zeros(2, 3, 40).to(BF16)
    assert vector_of(x[..., :8]) == 8 and vector_of(torch.zeros(2, 3, 20).to(BF16)[..., :8]) == 1
    assert vector_of(x.as_strided((2, 1, 8), (44, 1, 1))) == 1 and vector_of(x.as_strided((1, 1, 8), (44, 1, 1))) == 8
    assert vector_of(None, x) == 8 == vector_of(x, None)


@pytest.mark.parametrize("tokens", [1024, 32768])
def test_filters_of_any_strides(tokens):
    k = torch.randn(64, 3).t()
    (recipe, (taps, *_)), *_ = launches_of(
        launch.forward, Given(torch.zeros(2, 3, tokens).to(BF16), k, None, True, None, None))
    assert recipe.builder.endswith("FilterSpectra") and taps.stride(1) == 1 and torch.equal(taps, k)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_filters_gradient_of_split_operands_takes_several_passes(causal, split):
    u = torch.zeros(1, 2, 1024).to(BF16)
    seen = launches_of(launch.filter_gradient, Given(u, torch.zeros(2, 9), None, causal, None, None, split), u)
    assert any(".long." in recipe.builder for recipe, _ in seen) == split


def test_heads_of_a_workspace():
    """All of them, each once."""
    for each in (of_whole.Sums(1024, 5, torch.device("cpu")).heads, long.slices(5, long.WORKSPACE // 2)):
        assert [(x.start, x.stop) for x in each] == [(0, 2), (2, 4), (4, 5)]
    assert [x.stop for x in long.slices(2, 2 * long.WORKSPACE)] == [1, 2]
    assert len(of_whole.Sums(8192, 2, torch.device("cpu")).heads) == 2


@pytest.mark.parametrize("tokens", [40000, 1 << 16, (1 << 16) + 8])
def test_each_segment_has_a_note(tokens):
    x = torch.zeros(1, 1, tokens).to(BF16)
    (_, (_, (_, largest))), *_ = launches_of(long.columns, x, None, size_of(tokens, False))
    assert largest.shape[2] == -(-tokens // SEGMENT)


@pytest.mark.parametrize("needed", range(5))
def test_each_gradient_alone(monkeypatch, needed):
    """By launches as exact as the forward's; of v and of what stands ahead with the mirrored filter."""
    u, k, d = torch.zeros(2, 3, 64).to(BF16), torch.zeros(3, 9), torch.zeros(3)
    forwards, real = [], launch.forward
    monkeypatch.setattr(launch, "forward", lambda g, conjugate=False: forwards.append((g.split, conjugate)) or
                        real(g, conjugate))
    given = u, u, k, d, True, u, u, "split"
    with fake_gpu.launches():
        found = ops._backward_cuda(*given, *(i == needed for i in range(5)))
    assert [x.numel() > 0 for x in found] == [i == needed for i in range(5)]
    assert found[needed].shape == (u, k, d, u, u)[needed].shape
    assert forwards == {0: [(True, True)], 3: [(True, True)], 4: [(True, False)]}.get(needed, [])


def test_gradients_share_no_memory():
    u, k, d = torch.zeros(2, 3, 64).to(BF16), torch.zeros(3, 9), torch.zeros(3)
    with fake_gpu.launches():
        _, dk, dd, *_ = ops._backward_cuda(u, u, k, d, True, None, None, "half", False, True, True, False, False)
    assert dk.untyped_storage().data_ptr() != dd.untyped_storage().data_ptr()


@pytest.mark.parametrize("sizes", [(1, (1 << 24) + 1, 1), ((1 << 24) + 1, 1, 1)])
def test_too_many_heads_or_sequences(sizes):
    u = torch.empty(sizes, device="meta", dtype=BF16)
    with pytest.raises(NotImplementedError, match="fft_conv: u: has .* sequences and .* heads, supported are up to"):
        tkq.fft_conv(u, torch.empty(sizes[1], 1, device="meta"))
