"""A fused backward of y = silu(rmsnorm(x) * weight), dx and dweight in one launch, on RowKernel.

    python examples/write_a_row_kernel.py

With a Hopper GPU it is checked against PyTorch's autograd and timed with torch.add, which moves as many bytes and
computes nothing; without one it is only compiled.
"""
import cutlass.cute as cute
import torch
import torch.nn.functional as F

from tkq.row_kernel import RowKernel
from tkq.testing import sass, timing

EPS = 1e-6


class SiluNormBackward(RowKernel):
    """With x_hat = x * rstd and h = x_hat * weight, silu'(h) = (1 + t + h / 2 * (1 - t * t)) / 2 for t = tanh(h / 2).
    dy and x are read twice, the rest is recomputed, scaled by 2 or 1/2 where that saves a factor."""

    loads, stores, vectors, scalars, columns = ("dy", "x"), ("dx",), ("weight",), ("rstd",), ("dweight",)

    def through_silu(self, e, r):
        """x_hat / 2, h / 2, and twice the gradient of h."""
        half_x_hat = e.x * (r.rstd * 0.5)
        half_h = half_x_hat * e.weight
        t = cute.math.tanh(half_h, fastmath=True)
        return half_x_hat, half_h, e.dy + e.dy * (t + half_h * (1.0 - t * t))

    def partial(self, e, r):  # elements of the row reduction
        _, half_h, dh_twice = self.through_silu(e, r)
        return (dh_twice * half_h,)

    def down(self, e, r):  # elements of the column sums
        half_x_hat, _, dh_twice = self.through_silu(e, r)
        return dict(dweight=dh_twice * half_x_hat)

    def row(self, sums, r):  # once per row
        return dict(half=r.rstd * 0.5, slope=sums[0] * (1.0 / self.N) * r.rstd * r.rstd)

    def write(self, e, r):
        _, _, dh_twice = self.through_silu(e, r)
        return dict(dx=dh_twice * e.weight * r.half - e.x * r.slope)


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
            print(sass.shown(f"silu-norm backward N {N}", recipe))
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
