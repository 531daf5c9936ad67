"""From a spec and a config to something that can be compiled: the builders of this package's recipes."""
from cutlass import Float32, Int32

from .. import tile as tk
from ..runtime.compile import fake
from . import plan
from .gated import Gated
from .rope import Rope


def gated(spec, config):
    """(kernel, fake arguments) of tkq.pointwise.gated.Gated: tensors of any strides but the last."""
    bytes_, packed, v = tk.element_type(spec.dtype).width // 8, spec.packing != "apart", spec.vector
    leading = tuple(fake.sym() for _ in range(spec.rank - 1))
    columns = fake.sym(divisibility=v)
    both = fake.sym(divisibility=2 * v) if packed else None

    def tensor(wide=False):
        n, divides = (both, 2 * v if spec.packing == "interleaved" else v) if wide else (columns, v)
        strides = tuple(fake.sym64(divisibility=divides) for _ in leading)
        return fake.tensor(spec.dtype, (*leading, n), (*strides, 1), align=divides * bytes_)

    up = None if packed else tensor()
    if not spec.backward:
        return Gated(spec, config), (tensor(packed), up, None, tensor(), None)
    dgate = None if spec.gradients == "up" else tensor(packed)
    dup = None if packed or spec.gradients == "gate" else tensor()
    return Gated(spec, config), (tensor(packed), up, tensor(), dgate, dup)


def rope(spec, config):
    """(kernel, fake arguments) of tkq.pointwise.rope.Rope: x, result and table with any strides but the last."""
    width = tk.element_type(spec.dtype).width
    length, batch = fake.sym(), fake.sym()
    leading = (length,) if spec.varlen else (batch, length)
    wide = spec.rotary_dim + spec.rest

    def heads(count):
        strides = tuple(fake.sym64(divisibility=spec.vector) for _ in range(len(leading) + 1))
        return fake.tensor(spec.dtype, (*leading, count, wide), (*strides, 1), align=spec.vector * width // 8)

    rows, table_bytes = fake.sym(), plan.table_alignment(spec)
    per = table_bytes // (tk.element_type(spec.table).width // 8)

    def table():
        stride = (fake.sym64(divisibility=per), 1)
        return fake.tensor(spec.table, (rows, spec.rotary_dim // 2), stride, align=table_bytes)

    def integers(shape):
        return fake.tensor(spec.index, shape, tuple(fake.sym64() for _ in shape),
                           align=tk.element_type(spec.index).width // 8)

    positions = None
    if spec.positions == "offsets":
        positions = integers((fake.sym() if spec.varlen else batch,))
    elif spec.positions == "ids":
        positions = integers(leading)
    starts = None
    if spec.varlen and spec.positions in ("offset", "offsets"):
        starts = fake.tensor("int32", (fake.sym(),), (1,), align=4)
    count, count_2 = fake.sym(), fake.sym()
    second = (heads(count_2), heads(count_2)) if spec.tensors == 2 else (None, None)
    return Rope(spec, config), (heads(count), heads(count), *second, table(), table(), positions, starts, Int32(0),
                                Float32(1))
