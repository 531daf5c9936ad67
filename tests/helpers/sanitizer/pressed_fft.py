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


CASES = fft_passes, split_fft_passes
