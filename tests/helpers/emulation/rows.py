"""The kernels of softmax and the losses on a CPU: the same methods, called for one thread after the other by host code.

`use(monkeypatch)` makes tkq's launch path compile and call these. What differs from the GPU: one thread has a whole row
where a row is reduced, so that nothing is exchanged; loads and stores go element by element; exp, log and reciprocal
are others.
"""
import functools

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from tkq.losses import backward as loss_backward
from tkq.losses import build as loss_build
from tkq.losses import class_rows, launch
from tkq.losses import forward as loss_forward
from tkq.losses import reduce as loss_total
from tkq.losses import single_launch as loss_once
from tkq.losses import streaming as loss_walk
from tkq.losses.plan import StreamingConfig, TotalConfig
from tkq.rows.one_pass.kernel import Here
from tkq.rows.one_pass.plan import RowConfig
from tkq.runtime.compile import fake
from tkq.softmax import backward, build, forward, online, ops

ALONE = RowConfig(1, 32)  # a row to a thread
WALK = StreamingConfig(1, 32, load="registers", vectors=2)  # the same, in steps
SHARED_BY_MANY = RowConfig(4, 32, 3)  # where nothing is exchanged: threads and blocks to a row


class OnCpu:
    """Mixed in before a OnePassRows."""

    def _load_atom(self, m):
        return None

    _store_atom = _load_atom

    def _in_order(self):
        """Of losses: a matter of the GPU's compiler."""

    def _copy(self, atom, src, dst):
        for i in range(cute.size(src)):
            dst[i] = src[i]

    @cute.jit
    def _all(self, m: cute.Tensor, operands: cutlass.Constexpr):
        """Every thread of every block."""
        self._layout()
        t, buffer = self.tile, cute.make_rmem_tensor(cute.make_layout((1, (1, 1), max(self.stage, 1))), Int64)
        for tile in cutlass.range(cute.ceil_div(m.shape[0], t.rows)):
            for part in cutlass.range(t.cluster):
                for thread in cutlass.range(t.threads):
                    self.work(Here(Int32(thread), Int32(tile), Int32(part), None, buffer, None), *operands)


class Softmax(OnCpu, forward.Softmax):
    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor, scale: Float32):
        self._all(mX, (mX, mO, scale))


class SoftmaxBackward(OnCpu, backward.SoftmaxBackward):
    @cute.jit
    def __call__(self, mY: cute.Tensor, mDY: cute.Tensor, mDX: cute.Tensor, scale: Float32):
        self._all(mY, (mY, mDY, mDX, scale))


class CrossEntropy(OnCpu, loss_forward.CrossEntropy):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.total_spec, self.finish = self.finish and self.finish.spec, None

    @cute.jit
    def __call__(self, mX, mT, mW, mLoss, mSaved, mAll, mD, ignore_index: Int64, smoothing: Float32, z_loss: Float32,
                 softcap: Float32):
        losses, M = mLoss, mX.shape[0]
        if cutlass.const_expr(self.total_spec is not None):
            losses = cute.make_tensor(mSaved.iterator + (2 * M + 2), cute.make_layout(M))
        self._all(mX,
                  (mX, mT, mW, losses, mSaved, mAll, mD, class_rows.Options(ignore_index, smoothing, z_loss, softcap)))
        if cutlass.const_expr(self.total_spec is not None):
            inverse = class_rows.Kept.of(mSaved, mAll, M).all if cutlass.const_expr(self.total_spec.mean) else None
            Total(self.total_spec, TotalConfig(32, 1))(losses, mT, mW, mLoss, inverse, ignore_index)


class CrossEntropyStreaming(CrossEntropy, loss_walk.CrossEntropyStreaming):
    pass


class CrossEntropySingleLaunch(OnCpu, loss_once.CrossEntropySingleLaunch):
    @cute.jit
    def __call__(self, mX, mT, mW, mLoss, mSaved, mRoom, mD, ignore_index: Int64, smoothing: Float32, z_loss: Float32,
                 softcap: Float32):
        losses, M = loss_once.losses_of(mRoom, mX.shape[0]), mX.shape[0]
        o = class_rows.Options(ignore_index, smoothing, z_loss, softcap)
        self._all(mX, (mX, mT, mW, losses, mSaved, None, None, o))
        total = Total(self.last.spec, TotalConfig(32, 1))
        total(losses, mT, mW, mLoss, self.inverse_of(mSaved, M), ignore_index)


class CrossEntropyStreamingSingleLaunch(CrossEntropySingleLaunch, loss_once.CrossEntropyStreamingSingleLaunch):
    pass


class CrossEntropyBackward(OnCpu, loss_backward.CrossEntropyBackward):
    @cute.jit
    def __call__(self, mX, mT, mW, mDLoss, mSaved, mAll, mD, ignore_index: Int64, smoothing: Float32, z_loss: Float32,
                 softcap: Float32):
        self._all(mX,
                  (mX, mT, mW, mDLoss, mSaved, mAll, mD, class_rows.Options(ignore_index, smoothing, z_loss, softcap)))


class Scale(OnCpu, loss_backward.Scale):
    @cute.jit
    def __call__(self, mX: cute.Tensor, mFactor: cute.Tensor):
        self._all(mX, (mX, mFactor[()]))


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
    module = {"softmax": build, "losses": loss_build}[recipe.module.split(".")[1]]
    kernel, args = getattr(module, recipe.builder.partition(":")[2])(*recipe.args)
    return cute.compile(kernel, *args, options="--enable-tvm-ffi")


def use(monkeypatch):
    """From here on, for this test, the launch paths of softmax and the losses take tensors of the CPU."""
    for module, names in ((build, (Softmax, SoftmaxBackward)),
                          (loss_build,
                           (CrossEntropy, CrossEntropyStreaming, CrossEntropySingleLaunch,
                            CrossEntropyStreamingSingleLaunch,
                            CrossEntropyBackward, Scale, Total))):
        for cls in names:
            monkeypatch.setattr(module, cls.__name__, cls)
    monkeypatch.setattr(fake, "tensor", functools.partial(fake.tensor, host=True))
    monkeypatch.setattr(fake, "scalar", functools.partial(fake.scalar, host=True))

    def reciprocal(x):
        return Float32(1.0) / x

    for module in (online, forward, loss_forward, class_rows):
        if hasattr(module, "reciprocal"):
            monkeypatch.setattr(module, "reciprocal", reciprocal)
    for module in (online, forward, backward, loss_forward, loss_walk, loss_backward, class_rows):
        if hasattr(module, "exp"):
            monkeypatch.setattr(module, "exp", lambda x: cute.math.exp2(x * online.LOG2E))
    for module in (online, loss_walk):
        monkeypatch.setattr(module, "larger", lambda a, b: cutlass.select_(a > b, a, b))
    for module in (ops, launch):
        monkeypatch.setattr(module, "_launchers", {})
        monkeypatch.setattr(module, "_launch_cache", {})
        monkeypatch.setattr(module.runtime, "function", _compiled)
        monkeypatch.setattr(module.arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(launch.counters, "room", lambda index, size: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(ops, "plan", lambda spec: ALONE)
    monkeypatch.setattr(launch, "plan", lambda spec: SHARED_BY_MANY if spec.kind == "backward" else ALONE)
