"""The losses of rows of logits, in one read; and, fused, the logits' gradient in the same pass."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from .. import tile as tk
from ..rows.one_pass.kernel import Row
from ..softmax.online import OnlineRow, exp, finite, log, reciprocal
from . import arguments
from .class_rows import ClassRows, Options, Saved, Slope, rows_of
from .plan import StreamingConfig, TotalConfig
from .reduce import Total
from .spec import ReduceSpec
from .streaming import StreamingRow


class CrossEntropy:
    """One pass over a row of logits. The thread that has the target's column writes the row's loss, the row's first
    thread what a backward needs (`Saved`). For a mean or a sum the losses lie behind that, and `Total` adds them up.

    row: a thread's work, `HeldRow` or `streaming.StreamingRow`, as the config is.
    """

    def __init__(self, spec, config):
        self.spec, self.row = spec, row_of(spec, config)
        self.rows = self.row.rows
        self.finish = None if spec.reduction == "none" else Total(total_of(spec), TotalConfig())

    def fake_arguments(self):
        """Compiled for what `__call__` has; None for what the spec does not have."""
        return arguments.of_rows(self.spec)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
                 mSaved: Optional[cute.Tensor], mAll: Optional[cute.Tensor], mD: Optional[cute.Tensor],
                 ignore_index: Int64, smoothing: Float32, z_loss: Float32, softcap: Float32, stream: cuda.CUstream):
        """mX: (M, N); mT: (M,); mW: (N,) or None; mLoss: (M,), or () where reduced; mSaved, mAll: see `Saved`; mD where
        fused: (M, N), may be mX."""
        tv_layout = self.rows.layout()
        o = Options(ignore_index, smoothing, z_loss, softcap)
        losses, rows = mLoss, mX.shape[0]
        if const_expr(self.finish is not None):
            losses = cute.make_tensor(mSaved.iterator + (2 * rows + 2), cute.make_layout(rows))
        self.kernel(mX, mT, mW, losses, mSaved, mAll, mD, o, tv_layout).launch(
            **self.rows.launch_shape(rows), stream=stream)
        if const_expr(self.finish is not None):
            of_mean = (mT, mW, Saved.of(mSaved, mAll, rows).all) if self.finish.spec.mean else (None, None, None)
            self.finish(losses, *of_mean[:2], mLoss, of_mean[2], ignore_index, stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
               mSaved: Optional[cute.Tensor], mAll: Optional[cute.Tensor], mD: Optional[cute.Tensor], o: Options,
               tv_layout: cute.Layout):
        self.row.work(self.rows.here(tv_layout), mX, mT, mW, mLoss, mSaved, mAll, mD, o)


def total_of(spec):
    """How the losses of a reduced spec become one."""
    mean = spec.reduction == "mean"
    return ReduceSpec(mean, True, *((spec.target, spec.weight) if mean else ()))


def row_of(spec, config):
    """A thread's work on its row."""
    return (StreamingRow if isinstance(config, StreamingConfig) else HeldRow)(spec, config)


class HeldRow:
    """A part of CrossEntropy: a row that lies on the chip, in registers or shared memory.

    followed: does a kernel for the total begin under this one's end?
    """

    def __init__(self, spec, config):
        self.spec, self.rows = spec, rows_of(spec, config)
        self.classes = ClassRows(spec, self.rows)
        self.online = OnlineRow(self.rows, self.classes.value)
        self.holds = config.load == "registers"
        self.followed = spec.followed

    def work(self, here, mX, mT, mW, mLoss, mSaved, mAll, mD, o):
        """One thread's."""
        rows, classes, online, forget = self.rows, self.classes, self.online, self.rows.copies.forget
        place, saved = rows.place(here, mX), Saved.of(mSaved, mAll, mX.shape[0])
        target = classes.target(mT, mW, place.there, o)
        self.in_order()
        row = rows.row(mX, place)
        rows.landed()
        owner, z = classes.hit(mX, place, target, o)
        mine = online.top(row, o)
        forget()
        below = finite(mine)
        exponentials = online.exponentials(row, o, below)
        total = online.total(exponentials)
        if rows.cluster_n > 1:
            tk.cluster_wait()
        top, total = online.join(mine, total, row)
        rest = log(total)
        smoothing_loss, weights = self.over_classes(row, mW, below, top + rest, o)
        if self.followed:
            cute.arch.griddepcontrol_launch_dependents()
        first = place.col <= 0
        loss = classes.loss(target, top - z + rest, top + rest, smoothing_loss, o)
        writes = cutlass.select_(target.known, owner, first)
        classes.put_loss(mLoss, saved, loss, (top, rest, weights), place, writes, first, mX.shape[0])
        if mD is not None:
            slope = classes.slope(target, top + rest, weights, saved.all[0] if self.spec.part else Float32(1), o)
            probability = self.probabilities(row, exponentials, mine, top, total, o)
            forget()
            self.put_gradient(mD, mW, row, probability, target, slope, o)
            classes.put_hit(mD, owner, exp(z - top) * reciprocal(total), z, place, target, slope, o)

    def in_order(self):
        """Or ptxas moves the target's load behind a row's arrival in registers: 24.7 us for 24.1 at 32768 x 1024."""
        if self.holds:
            cute.arch.sync_warp()

    def over_classes(self, row: Row, mW, below, lse, o):
        """(sum(w * (lse - z)), sum(w)) of the row; nothing where there is no label smoothing."""
        if not self.spec.smoothing:
            return None, Float32(self.spec.N)
        online = self.online
        distance, weights = [], []
        for j in range(self.rows.tile.blocks):
            w = self.classes.class_weights(mW, row, j)
            distance.append(w * (online.values(row, j, o, neutral=below) - below))
            weights.append(w)
        weight = online.total(weights)
        smoothing_loss = weight * (lse - below) - online.total(distance)
        return online.add_pairs(smoothing_loss, weight, row._replace(stage=1))

    def probabilities(self, row, exponentials, mine, top, total, o):
        """The function from j to vector j of the probabilities."""
        if self.holds:
            factor = exp(mine - top) * reciprocal(total)
            return lambda j: exponentials[j] * factor
        inverse = reciprocal(total)
        return lambda j: exp(self.online.values(row, j, o) - top) * inverse

    def put_gradient(self, mD, mW, row, probability, target, slope: Slope, o):
        rows, classes = self.rows, self.classes
        found = (classes.gradient(probability(j), self.online.values(row, j, o), row, j, mW, slope, o)
                 for j in range(rows.tile.blocks))
        packed = [classes.cleared(d, mD, target) for d in found]
        rows.copies.forget()  # or the compiler moves each store up to where its result is computed
        for j in range(rows.tile.blocks):
            rows.store(mD, row.place, j, packed[j])
