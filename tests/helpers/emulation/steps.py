"""Steps of linear attention without a GPU: the kernel's own methods, with a warp's 32 numbers in the place of each
value that a lane has, or those of all warps that share a head's rows. Every address that is read or written is checked
against the tensor.

`run(spec, operands, scale)` does what a launch does; operands are CPU tensors."""
import importlib.util
from types import ModuleType, SimpleNamespace

import torch

import tkq.linear_attention.step.kernel  # noqa: F401  whose copies look it up
from tests.helpers.emulation.written import as_written

LANES = 32


class Kind:
    """An element type: what makes a number of it, and its name."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, x):
        if isinstance(x, torch.Tensor):
            return x.to(self.dtype)
        return torch.tensor(x, dtype=self.dtype) if self.dtype.is_floating_point else x


F32, I32, I64 = Kind(torch.float32), Kind(torch.int32), Kind(torch.int64)
KINDS = {"fp32": F32, "bf16": Kind(torch.bfloat16), "fp16": Kind(torch.float16)}


class Pointer:
    """Elements of memory, one a lane, or of registers, the same number in all."""

    def __init__(self, memory, offset):
        self.memory, self.offset = memory, offset

    def __add__(self, n):
        return Pointer(self.memory, self.offset + n)


class View:
    """n neighbours from a pointer on; or, with a layout of strides, what `crd2idx` is asked for."""

    def __init__(self, iterator, layout):
        self.iterator, self.layout = iterator, layout

    def __getitem__(self, i):
        return self.iterator.memory.get(self.iterator.offset + i)

    def __setitem__(self, i, value):
        self.iterator.memory.put(self.iterator.offset + i, value)

    def load(self):
        return Values([self[i] for i in range(self.layout)])

    def store(self, values):
        for i, x in enumerate(values.values):
            self[i] = x


class Values:
    def __init__(self, values):
        self.values = values

    def to(self, kind):
        return Values([kind(x) for x in self.values])

    def __getitem__(self, i):
        return self.values[i]


class Registers:
    def __init__(self, n, kind):
        self.values, self.kind = [None] * n, kind

    def get(self, i):
        return self.values[i]

    def put(self, i, x):
        self.values[i] = self.kind(x)


class Memory:
    """A tensor. mask: the lanes that write."""

    def __init__(self, tensor, machine):
        self.tensor, self.machine, self.layout = tensor, machine, tensor.stride()
        self.shape, self.iterator, base = tensor.shape, Pointer(self, 0), tensor.storage_offset()
        self.flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize - base,), (1,), base)
        self.inside = {sum(i * s for i, s in zip(index, tensor.stride()))
                       for index in torch.cartesian_prod(*map(torch.arange, tensor.shape)).reshape(
                           -1, tensor.dim()).tolist()} if tensor.numel() < 1 << 16 else None

    def checked(self, offsets):
        offsets = torch.as_tensor(offsets).expand(self.machine.lanes)
        assert self.inside is None or set(offsets.tolist()) <= self.inside, "outside of the tensor"
        return offsets

    def get(self, offsets):
        found = self.flat[self.checked(offsets)]
        return found if found.is_floating_point() else int(found[0])

    def put(self, offsets, x):
        mask, offsets = self.machine.mask, self.checked(offsets)
        where = offsets if mask is None else offsets[mask]
        assert len(set(where.tolist())) == len(where), "two lanes write one element"
        for o in where.tolist():
            self.machine.written.setdefault(id(self.tensor), []).append(o)
        x = x.expand(len(offsets))
        self.flat[where] = x if mask is None else x[mask]


class Shared:
    """A block's shared memory: NaN until it is written."""

    def __init__(self, rows, stages, machine):
        self.flat, self.machine = torch.full((rows * stages,), torch.nan), machine
        self.iterator, self.layout = Pointer(self, 0), (1, rows)

    def get(self, offsets):
        return self.flat[torch.as_tensor(offsets).expand(self.machine.lanes)]

    def put(self, offsets, x):
        mask, offsets = self.machine.mask, torch.as_tensor(offsets).expand(self.machine.lanes)
        assert len(set(offsets[mask].tolist())) == mask.sum(), "two lanes write one element"
        self.flat[offsets[mask]] = x.expand(self.machine.lanes)[mask]


def _run_at(m, coord, n):
    assert len(coord) == len(m.layout)
    return View(Pointer(m, sum((c * s for c, s in zip(coord, m.layout)), 0)), n)


def _copy(src, dst):
    for i in range(src.layout):
        dst[i] = src[i]


def _packed(values, kind):
    made = View(Pointer(Registers(len(values), kind), 0), len(values))
    made.store(Values(values))
    return made


VECTORS = SimpleNamespace(run_at=_run_at, wide=lambda held: held.load().to(F32).values, packed=_packed,
                          load=lambda view: view, store=_copy)


class Machine:
    """Where a warp is, and how often an element of a tensor was written. k_warps: those that go in step, each with
    rows of its own."""

    def __init__(self, k_warps=1):
        self.block, self.warp, self.warps, self.mask, self.written = (0, 0, 0), 0, 1, None, {}
        self.lanes = LANES * k_warps
        self.threads = torch.arange(self.lanes)

    def warp_id(self):
        return self.warp if self.lanes == LANES else self.threads // LANES

    def shuffled(self, x, offset):
        return x.expand(self.lanes)[self.threads ^ offset]

    def names(self):
        arch = SimpleNamespace(
            block_idx=lambda: self.block, block_dim=lambda: (LANES * self.warps, 1, 1),
            thread_idx=lambda: (self.threads, 0, 0), shuffle_sync_bfly=self.shuffled, rcp_approx=torch.reciprocal)
        math = SimpleNamespace(exp2=lambda x, fastmath=False: torch.exp2(x), log1p=torch.log1p, absf=torch.abs,
                               rsqrt=lambda x, fastmath=False: torch.rsqrt(x))
        cute = SimpleNamespace(
            arch=arch, math=math, autovec_copy=_copy, size=lambda view: view.layout, make_layout=lambda n: n,
            make_rmem_tensor=lambda n, kind: View(Pointer(Registers(n, kind), 0), n),
            make_tensor=View, select=lambda strides, modes: [strides[i] for i in modes],
            crd2idx=lambda coord, strides: sum(c * s for c, s in zip(coord, strides)))
        cutlass = SimpleNamespace(range=lambda n, unroll=1: range(n), range_constexpr=range, max=torch.maximum)
        smem = SimpleNamespace(vector=lambda rows, stages: Shared(rows, stages, self))
        tk = SimpleNamespace(lane_id=lambda: self.threads % LANES, warp_id=self.warp_id, LOG2E=1.4426950408889634,
                             sync_block=lambda: None, SharedAllocator=lambda: smem)
        return dict(cute=cute, cutlass=cutlass, tk=tk, vectors=VECTORS, Float32=F32, Int32=I32, Int64=I64,
                    const_expr=lambda x: x, element_type=KINDS.__getitem__)


def modules(machine) -> SimpleNamespace:
    """Copies of the kernel's modules, which the DSL has not traced, with a machine's names."""
    found = SimpleNamespace()
    for name in ("state", "token", "warps", "kernel"):
        spec = importlib.util.find_spec(f"tkq.linear_attention.step.{name}")
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for word, value in machine.names().items():
            if hasattr(module, word):
                setattr(module, word, value)
        setattr(found, name, module)
    found.kernel.LaneState, found.kernel.first_row = found.state.LaneState, found.warps.first_row
    found.kernel.Recurrence, found.kernel.StateSpace = _plain(found.token.Recurrence), _plain(found.token.StateSpace)

    class WarpSums(_plain(found.warps.WarpSums)):
        def put(self, mine, values, to):
            machine.mask = mine
            super().put(True, values, to)
            machine.mask = None

    found.kernel.WarpSums = WarpSums
    return found


def _plain(cls):
    """The class with the methods that the DSL traces as they are written."""
    methods = {name: as_written(f) for name, f in vars(cls).items() if hasattr(f, "__wrapped__")}
    return type(cls.__name__, (cls,), methods)


def run(spec, operands, scale, config, warps=1):
    """What a launch does with operands of the CPU. Returns {id(tensor): offsets that were written}."""
    machine = Machine(config.k_warps)
    kernel = modules(machine).kernel

    class Step(_plain(kernel.LinearStep)):
        def put(self, g, at, t, out):
            machine.mask = at.part.first
            coord = (*at.of(t, self.has_tokens), at.head, at.part.v)
            _copy(_packed(out, self.dtype), _run_at(g.o, coord, self.config.v_values))
            machine.mask = None

    step = Step(spec, config)
    tokens = operands.v.shape[1] if step.has_tokens else 1
    heads_per_k = operands.v.shape[-2] // operands.q.shape[-2]
    g = kernel.Globals(*(None if x is None else Memory(x, machine) for x in operands), scale, tokens, heads_per_k)
    machine.warps = warps
    for n in range(operands.v.shape[0]):
        for head in range(operands.v.shape[-2]):
            for slice_ in range(spec.value_dim // step.config.columns):
                machine.block, machine.warp = (slice_ // warps, head, n), slice_ % warps
                step.kernel(g)
    return machine.written
