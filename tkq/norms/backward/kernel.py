"""The backward passes of rmsnorm and layernorm, on RowKernel.

With g = dy * weight, the gradient that comes to the normalised row x_hat, and means over the row:

    rmsnorm     dx = rstd * (g - x_hat * mean(g * x_hat))                  x_hat = x * rstd
    layernorm   dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))        x_hat = (x - mean) * rstd
    both        dweight = sum over rows of dy * x_hat, dbias = sum over rows of dy

Every element is seen twice, and the second time what a row has in common is one number for each term, so that dx is
rstd * g - slope * (x - mean) - shift: two products and what centres x.
"""
from ...rows.persistent.kernel import RowKernel
from ...rows.persistent.monoid import Exchange, add

# dresidual_out, the gradient of what was normalised where that is an output too, is added to dx. dx and dresidual are
# the same values, each in its own type. weight_offset: the weight that counts is weight + weight_offset.
LOADS, STORES, COLUMNS = ("dy", "x", "dresidual_out"), ("dx", "dresidual"), ("dweight", "dbias")
OPTIONS = {"weight_offset": 0.0}


class RMSNormBackward(RowKernel):
    loads, stores, columns, options = LOADS, STORES, COLUMNS, OPTIONS
    vectors, scalars = ("weight",), ("rstd",)

    def normalised(self, e, r):
        return e.x * r.rstd

    def partial(self, e, r):
        return (gradient(self, e) * self.normalised(e, r),)

    def row(self, sums, r):
        return dict(slope=sums[0] * (1.0 / self.N) * r.rstd * r.rstd)

    def down(self, e, r):
        return dict(dweight=e.dy * self.normalised(e, r), dbias=e.dy)

    def write(self, e, r):
        return both(self, gradient(self, e) * r.rstd - e.x * r.slope, e)


class LayerNormBackward(RowKernel):
    """x is centred before anything is summed, so that a mean far from 0 costs no digits."""

    loads, stores, columns, options = LOADS, STORES, COLUMNS, OPTIONS
    vectors, scalars, exchanges = ("weight",), ("rstd", "mean"), (Exchange(add(2)),)

    def centred(self, e, r):
        return e.x - r.mean

    def normalised(self, e, r):
        return self.centred(e, r) * r.rstd

    def partial(self, e, r):
        g = gradient(self, e)
        return g, g * self.normalised(e, r)

    def row(self, sums, r):
        shift, slope = (s * (1.0 / self.N) * r.rstd for s in sums)
        return dict(shift=shift, slope=slope * r.rstd)

    def down(self, e, r):
        return dict(dweight=e.dy * self.normalised(e, r), dbias=e.dy)

    def write(self, e, r):
        return both(self, gradient(self, e) * r.rstd - (self.centred(e, r) * r.slope + r.shift), e)


def gradient(kernel, e):
    """What comes to the normalised row."""
    if not kernel.has("weight"):
        return e.dy
    return e.dy * (e.weight + kernel.weight_offset if kernel.weight_offset else e.weight)


def both(kernel, dx, e):
    """The results."""
    dx = dx + e.dresidual_out if kernel.has("dresidual_out") else dx
    return dict(dx=dx, dresidual=dx)
