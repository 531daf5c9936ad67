"""The kernels of softmax and the losses on a CPU: the same methods, called for one thread after the other by host code.

`use(monkeypatch)` makes tkq's launch path compile and call these. What differs from the GPU: one thread has a whole row
where a row is reduced, so that nothing is exchanged; loads and stores go element by element; exp, log and reciprocal
are others.
"""
import functools
import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from tests.helpers.emulation import host
from tkq.losses import backward as loss_backward
from tkq.losses import class_rows, launch
from tkq.losses import forward as loss_forward
from tkq.losses import reduce as loss_total
from tkq.losses import single_launch as loss_once
from tkq.losses import streaming as loss_streaming
from tkq.losses.plan import StreamingConfig, TotalConfig
from tkq.rows.one_pass import copies
from tkq.rows.one_pass.kernel import Here
from tkq.rows.one_pass.plan import RowConfig
from tkq.runtime.compile import build, fake
from tkq.softmax import backward, forward, online, ops

ALONE = RowConfig(1, 32)  # a row to a thread
STREAMING = StreamingConfig(1, 32, load="registers", vectors=2)  # the same, in steps
SHARED_BY_MANY = RowConfig(4, 32, 3)  # where nothing is exchanged: threads and blocks to a row


def copy(copies, atom, src, dst):
    """Of RowCopies, element by element."""
    for i in range(cute.size(src)):
        dst[i] = src[i]


@cute.jit
def everywhere(rows: cutlass.Constexpr, work: cutlass.Constexpr, m: cute.Tensor, operands: cutlass.Constexpr):
    """The work of every thread of every block. rows: the kernel's OnePassRows."""
    t, buffer = rows.tile, cute.make_rmem_tensor(cute.make_layout((1, (1, 1), max(rows.stage, 1))), Int64)
    for tile in cutlass.range(cute.ceil_div(m.shape[0], t.rows)):
        for part in cutlass.range(t.cluster):
            for thread in cutlass.range(t.threads):
                work(Here(Int32(thread), Int32(tile), Int32(part), None, buffer, None), *operands)


class Softmax(forward.Softmax):
    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor, scale: Float32):
        everywhere(self.rows, self.work, mX, (mX, mO, scale))


class SoftmaxBackward(backward.SoftmaxBackward):
    @cute.jit
    def __call__(self, mY: cute.Tensor, mDY: cute.Tensor, mDX: cute.Tensor, scale: Float32):
        everywhere(self.rows, self.work, mY, (mY, mDY, mDX, scale))


class CrossEntropy(loss_forward.CrossEntropy):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.row.followed = False

    @cute.jit
    def __call__(self, mX, mT, mW, mLoss, mSaved, mAll, mD, ignore_index: Int64, smoothing: Float32,
                 z_loss: Float32, softcap: Float32):
        losses, M = mLoss, mX.shape[0]
        if cutlass.const_expr(self.finish is not None):
            losses = cute.make_tensor(mSaved.iterator + (2 * M + 2), cute.make_layout(M))
        o = class_rows.Options(ignore_index, smoothing, z_loss, softcap)
        everywhere(self.rows, self.row.work, mX, (mX, mT, mW, losses, mSaved, mAll, mD, o))
        if cutlass.const_expr(self.finish is not None):
            total = self.finish.spec
            inverse = class_rows.Saved.of(mSaved, mAll, M).all if cutlass.const_expr(total.mean) else None
            Total(total, TotalConfig(32, 1))(losses, mT, mW, mLoss, inverse, ignore_index)


class CrossEntropySingleLaunch(loss_once.CrossEntropySingleLaunch):
    @cute.jit
    def __call__(self, mX, mT, mW, mLoss, mSaved, mScratch, mD, ignore_index: Int64, smoothing: Float32,
                 z_loss: Float32, softcap: Float32):
        losses, M = loss_once.losses_of(mScratch, mX.shape[0]), mX.shape[0]
        o = class_rows.Options(ignore_index, smoothing, z_loss, softcap)
        everywhere(self.rows, self.row.work, mX, (mX, mT, mW, losses, mSaved, None, None, o))
        total = Total(self.last.spec, TotalConfig(32, 1))
        total(losses, mT, mW, mLoss, self.inverse_of(mSaved, M), ignore_index)


class CrossEntropyBackward(loss_backward.CrossEntropyBackward):
    @cute.jit
    def __call__(self, mX, mT, mW, mDLoss, mSaved, mAll, mD, ignore_index: Int64, smoothing: Float32,
                 z_loss: Float32, softcap: Float32):
        o = class_rows.Options(ignore_index, smoothing, z_loss, softcap)
        everywhere(self.rows, self.work, mX, (mX, mT, mW, mDLoss, mSaved, mAll, mD, o))


class Scale(loss_backward.Scale):
    @cute.jit
    def __call__(self, mX: cute.Tensor, mFactor: cute.Tensor):
        everywhere(self.rows, self.work, mX, (mX, mFactor[()]))


class Total(loss_total.Total):
    """The threads' own sums, added up one after the other."""

    @cute.jit
    def __call__(self, mLosses, mT, mW, mLoss, mInverse, ignore_index: Int64):
        total, weight = Float32(0), Float32(0)
        for thread in cutlass.range(self.config.threads * self.config.cluster):
            mine = self.mine(mLosses, mT, mW, ignore_index, Int32(thread))
            total, weight = total + mine[0], weight + mine[1]
        self.put(mLoss, mInverse, total, weight)


@functools.cache
def _compiled(recipe):
    return host.compiled(*build._made(recipe))


def _use_copies(monkeypatch):
    monkeypatch.setattr(copies.RowCopies, "copy", copy)
    for atom in ("load_atom", "store_atom"):
        monkeypatch.setattr(copies.RowCopies, atom, lambda self, m: None)
    monkeypatch.setattr(loss_forward.HeldRow, "in_order", lambda self: None)  # a matter of the GPU's compiler


def use(monkeypatch):
    """From here on, for this test, the launch paths of softmax and the losses take tensors of the CPU."""
    for cls in (Softmax, SoftmaxBackward, CrossEntropy, CrossEntropySingleLaunch, CrossEntropyBackward, Scale, Total):
        monkeypatch.setattr(sys.modules[cls.__base__.__module__], cls.__name__, cls)
    _use_copies(monkeypatch)
    monkeypatch.setattr(fake, "tensor", functools.partial(fake.tensor, host=True))
    monkeypatch.setattr(fake, "scalar", functools.partial(fake.scalar, host=True))

    def reciprocal(x):
        return Float32(1.0) / x

    for module in (online, forward, loss_forward, class_rows):
        if hasattr(module, "reciprocal"):
            monkeypatch.setattr(module, "reciprocal", reciprocal)
    for module in (online, forward, backward, loss_forward, loss_streaming, loss_backward, class_rows):
        if hasattr(module, "exp"):
            monkeypatch.setattr(module, "exp", lambda x: cute.math.exp2(x * online.LOG2E))
    for module in (online, loss_streaming):
        monkeypatch.setattr(module, "larger", lambda a, b: cutlass.select_(a > b, a, b))
    for module in (ops, launch):
        monkeypatch.setattr(module, "_launchers", {})
        monkeypatch.setattr(module, "_launch_cache", {})
        monkeypatch.setattr(module.runtime, "function", _compiled)
        monkeypatch.setattr(module.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(launch.counters, "with_scratch", lambda index, size: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(ops, "plan", lambda spec: ALONE)
    monkeypatch.setattr(launch, "plan", lambda spec: SHARED_BY_MANY if spec.kind == "backward" else ALONE)
