"""Circular convolutions of more tokens than can be written twice, on a CPU: two causal ones, by the reference in
float64 in the place of the kernels, are the circular one and its gradients."""
import pytest
import torch

from tkq.convolution.fft import launch
from tkq.convolution.fft.long import circular
from tkq.convolution.fft.plan import twice
from tkq.reference import long_convolution as reference


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def causal(g, conjugate, dtype):
    """As `long.launch.forward`."""
    assert g.causal and g.d is None and g.post is None and dtype == torch.float32
    if not conjugate:
        return reference.fft_conv(g.u, g.k, None, True, g.pre)
    v = g.u if g.pre is None else g.u * g.pre
    return reference.fft_conv_backward(v, v, g.k)[0]


def taps(g, dy):
    """As `long.launch.filter_gradient`: of lengths that are no multiples of 8 a few taps more."""
    found = reference.fft_conv_backward(dy, g.u, randn(g.u.shape[1], g.u.shape[2]), None, True, g.pre, g.post)[1]
    return torch.nn.functional.pad(found, (0, -g.u.shape[2] % 8), value=float("nan"))


@pytest.fixture(autouse=True)
def _many(monkeypatch):
    """Few tokens are already too many; the workspace has room for two heads."""
    monkeypatch.setattr(launch, "twice", lambda tokens: False)
    monkeypatch.setattr(circular.long, "forward", causal)
    monkeypatch.setattr(circular.long, "filter_gradient", taps)
    monkeypatch.setattr(circular.long, "WORKSPACE", 2 * 8 * 2 * 12)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("L, count", [(12, 12), (12, 5), (12, 31), (11, 11), (1, 1), (2, 2), (12, 0)])
def test_two_are_the_circular_one(L, count, gates):
    torch.manual_seed(0)
    u, k, d, dy = randn(2, 5, L), randn(5, count), randn(5), randn(2, 5, L)
    pre, post = (randn(2, 5, L) if gates else None for _ in range(2))
    given = launch.Given(u, k, d, False, pre, post)
    y = launch.forward(given)
    torch.testing.assert_close(y, reference.fft_conv(u, k, d, False, pre, post))
    assert y.is_contiguous()
    want = reference.fft_conv_backward(dy, u, k, d, False, pre, post)
    du = launch.forward(launch.Given(dy, k, d, False, post, pre), conjugate=True)
    torch.testing.assert_close(du, want[0])
    dk = launch.filter_gradient(given, dy)
    torch.testing.assert_close(dk[:, :count], want[1])
    torch.testing.assert_close(dk[:, 0], want[2])


def test_who_has_room_to_be_written_twice():
    assert twice(2**21) and not twice(2**21 + 1)
