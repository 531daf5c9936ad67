"""Long convolutions under pressure: cases of `pressed`."""
import torch

from tests.helpers.sanitizer.repeated import same_bits


def fft_passes(precision="half"):
    """Several passes: operands and tiles enough for all stages of a warpgroup, forward and in the gradients."""
    import tkq
    from tests.helpers.fft_conv import check, make
    from tkq.convolution.fft.long import launch

    launch.SMS = 2
    given = make(3, 2, 65536, 65536)
    check(given, precision=precision)

    def run():
        y = tkq.fft_conv(given["u"], given["k"], precision=precision)
        return y, *torch.autograd.grad(y, (given["u"], given["k"]), given["u"].detach())

    same_bits(run)


def split_fft_passes():
    """The same of split operands."""
    fft_passes("split")


def fft_heads():
    """Two blocks with several heads each: their tables take turns in a ring."""
    import tkq
    from tests.helpers.fft_conv import check, make
    from tkq.convolution.fft import launch

    launch.SMS = 2
    given = make(20, 9, 1024, 1024)  # circular: three tiles of a head
    check(given, causal=False)
    same_bits(lambda: (tkq.fft_conv(given["u"], given["k"], None, False),))


CASES = fft_passes, split_fft_passes, fft_heads
