"""Convolutions and scans, for the sanitizer."""
import torch

from tests.helpers.sanitizer.calls import grad, on, randn


def convolutions(device):
    """Tokens and channels contiguous, odd sizes, packed sequences with states, steps with a pool; long ones, of blocks,
    circles and odd sizes, with gates and without."""
    import tkq

    for S, C, time in ((67, 40, False), (5, 9, False), (72, 5, True), (37, 3, True)):
        x, weight, bias, dy = on(device, randn(0, 2, *((C, S) if time else (S, C)), grad=True),
                                 randn(1, C, 4, grad=True), randn(2, C, grad=True), randn(3, 2, S, C))
        y = tkq.causal_conv1d(x.mT if time else x, weight, bias, "silu")
        yield f"causal_conv1d {S} x {C}", (y, *grad((y,), (x, weight, bias), (dy,)))
    x, weight, state, dy, dstate = on(device, randn(0, 1, 67, 40, grad=True), randn(1, 40, 4, grad=True),
                                      randn(2, 4, 40, 3, grad=True), randn(3, 1, 67, 40), randn(4, 4, 40, 3))
    for cuts in ([0, 1, 1, 40, 67], [3, 90, 2, -1, 66]):
        y, last = tkq.causal_conv1d(x, weight, None, "silu", state, True, torch.tensor(cuts, device=device))
        yield f"causal_conv1d {cuts}", (y, last, *grad((y, last), (x, weight, state), (dy, dstate)))
    for S, causal, gated in ((200, True, True), (2049, True, False), (4100, True, False), (9000, True, False),
                             (17000, True, False), (33001, True, False), (256, False, False), (75, False, True)):
        u, k, dy, *gates = on(device, randn(0, 3, 2, S, grad=True), randn(1, 2, S, grad=True, dtype=torch.float32),
                              randn(2, 3, 2, S), *(randn(3 + i, 3, 2, S, grad=True) for i in range(2 * gated)))
        y = tkq.fft_conv(u, k, None, causal, *gates)
        yield f"fft_conv {S} {causal}", (y, *grad((y,), (u, k, *gates), (dy,)))
        if S < 5000:
            y = tkq.fft_conv(u, k, None, causal, *gates, precision="split")
            yield f"fft_conv {S} {causal} split", (y, *grad((y,), (u, k, *gates), (dy,)))
    with torch.no_grad():
        rows = torch.tensor([5, -1, 0, 1 << 40], device=device)
        for T, L in ((1, 3), (2, 5)):
            pool = state.detach().new_zeros(6, 40, L)
            y = tkq.causal_conv1d_step(x[0, :4 * T].view(4, T, 40), pool, weight, None, None, rows)
            yield f"causal_conv1d_step {T}", (y, pool)


def scans(device):
    """Tokens and channels contiguous, both ways, odd sizes, with states."""
    import tkq

    for T, C, time in ((67, 40, False), (130, 9, False), (72, 35, True), (37, 3, True)):
        a, b, state, dh, dfinal = on(device, *(randn(i, 2, *((C, T) if time else (T, C)), grad=True) for i in (0, 1)),
                                     randn(2, 2, C, grad=True), randn(3, 2, T, C), randn(4, 2, C, dtype=torch.float32))
        h, final = tkq.scan(*((a.mT, b.mT) if time else (a, b)), state, T % 2 == 0, True)
        yield f"scan {T} x {C}", (h, final, *grad((h, final), (a, b, state), (dh, dfinal)))
