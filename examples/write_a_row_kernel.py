"""A new fused backward: that of y = silu(rmsnorm(x) * weight), dx and dweight in one launch, on RowKernel.

    python examples/write_a_row_kernel.py

With a Hopper GPU: checked against PyTorch's autograd and timed beside torch.add, which moves as many bytes and computes
nothing. Without: compiled for it, nothing timed.
"""
import cutlass.cute as cute
import torch
import torch.nn.functional as F

from tkq.row_kernel import RowKernel
from tkq.testing import sass, timing

EPS = 1e-6


class SiluNormBackward(RowKernel):
    """With x_hat = x * rstd and h = x_hat * weight; dy is read twice, everything else is worked out anew each time."""

    loads, stores, vectors, scalars, columns = ("dy", "x"), ("dx",), ("weight",), ("rstd",), ("dweight",)

    def through_silu(self, e, r):
        """x_hat, and the gradient of h."""
        x_hat = e.x * r.rstd
        h = x_hat * e.weight
        sigmoid = cute.math.tanh(h * 0.5, fastmath=True) * 0.5 + 0.5
        return x_hat, e.dy * sigmoid * (1.0 + h * (1.0 - sigmoid))

    def partial(self, e, r):  # what is summed over the row
        x_hat, dh = self.through_silu(e, r)
        return (dh * e.weight * x_hat,)

    def down(self, e, r):  # what is summed down the columns
        x_hat, dh = self.through_silu(e, r)
        return dict(dweight=dh * x_hat)

    def row(self, sums, r):  # once a row
        return dict(slope=sums[0] * (1.0 / self.N))

    def write(self, e, r):
        x_hat, dh = self.through_silu(e, r)
        return dict(dx=(dh * e.weight - x_hat * r.slope) * r.rstd)


def silu_norm_backward(dy, x, weight, rstd):
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    SiluNormBackward.launch(dy=dy, x=x, weight=weight, rstd=rstd, dx=dx, dweight=dweight)
    return dx, dweight


def inputs(M, N, device, seed=0):
    torch.manual_seed(seed)
    dy, x = (torch.randn(M, N, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(N, device=device, dtype=torch.bfloat16)
    return dy, x, weight, torch.rsqrt(x.float().square().mean(-1) + EPS)


def check(dy, x, weight, rstd):
    wide = [t.float().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(F.silu(F.rms_norm(wide[0], x.shape[1:], wide[1], EPS)), wide, dy.float())
    errors = [timing.relative_error(a, b) for a, b in zip(silu_norm_backward(dy, x, weight, rstd), wanted)]
    assert max(errors) < 2**-7, f"relative errors {errors}"
    return max(errors)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for N in (1024, 4096, 16384):
        if device == "cpu":
            dy, x, weight, rstd = inputs(1, N, device)
            recipe = SiluNormBackward.recipe(dy=dy, x=x, weight=weight, rstd=rstd, dx=x, dweight=weight)
            print(sass.text(f"silu-norm backward N {N}", sass.report(recipe)))
            continue
        M = (1 << 28) // N
        error = check(*inputs(M // 16 + 1, N, device))
        both = timing.compare({"tkq": silu_norm_backward, "torch.add": lambda dy, x, weight, rstd: torch.add(dy, x)},
                              lambda i, M=M, N=N: inputs(M, N, device, i))
        print(f"M {M} N {N}: relative error {error:.1e},", ", ".join(
            f"{t.name} {t.median_ms:.3f} ms = {6e-6 * M * N / t.median_ms:.0f} GB/s" for t in both.timings),
            f"= {timing.ratio(both['tkq'], both['torch.add']):.3f}x torch.add")
    if device == "cpu":
        print("No GPU: compiled for sm_90a only; nothing was run or timed.")


if __name__ == "__main__":
    main()
