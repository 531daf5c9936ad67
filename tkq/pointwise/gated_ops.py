"""tkq.swiglu and tkq.geglu: from torch tensors to a launch, forward and backward."""
from typing import Optional

import torch
from torch import Tensor

from .. import runtime
from ..reference import pointwise as reference
from ..runtime import arguments
from ..runtime.call import alloc, check, dtypes, ops
from ..runtime.call.dispatch import Shapes, added
from ..runtime.call.replay import CallCache
from ..runtime.device import arch
from .plan import MAX_UNITS, plan_gated
from .spec import GatedSpec, widest_gated

MAX_N = 1 << 30
_GELU = {"none": "geglu", "tanh": "geglu_tanh"}
_LAYOUTS = ("split", "interleaved")

# Launchers by what a call looks like; as many as there are kinds of call. What varies within a kind, the kernel checks.
_launchers: dict = {}
# Dispatchers of launchers for whole accesses, which refuse what they cannot take: by kind and packing.
_launch_cache: dict = {}
_call_cache = CallCache()
_tensors, _layout = ({op: arguments.checker(op, *names) for op in ("swiglu", "geglu")}
                     for names in (("gate", "up"), ("layout",)))
_approximate = arguments.checker("geglu", "approximate")


def swiglu(gate: Tensor, up: Optional[Tensor] = None, *, layout: str = "split") -> Tensor:
    """silu(gate) * up, with silu(x) = x / (1 + exp(-x)) (Shazeer, GLU Variants Improve Transformer, 2020).

    Computed in float32 and rounded once. Differentiable once; the backward reads dy, gate and up and writes dgate and
    dup in one pass, each only where it is needed.

    Args:
        gate: (..., N), bf16, fp16 or fp32, last dimension contiguous. Or, without up, gate and up in one tensor
            (..., 2 N). Rows may be any distance apart: a slice of a wider tensor is read in place. Leading dimensions
            that no single row stride describes are copied first.
        up: as gate, of its shape and type.
        layout: of the one tensor. "split": gate is x[..., :N], up x[..., N:]. "interleaved": gate is x[..., 0::2], up
            x[..., 1::2]; it is copied first where its rows do not begin at an even element.

    Returns:
        A contiguous tensor (..., N) of gate's type.

    Raises:
        TypeError: gate or up is no dense tensor of bf16, fp16 or fp32; layout is no word.
        ValueError: layout is another word, or "interleaved" with up; shapes or devices that do not match, a last
            dimension that is not contiguous.
        NotImplementedError: N above 2^30.
        RuntimeError: a GPU other than Hopper.

    Example::

        both = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)  # gate and up, as one product gives them
        y = tkq.swiglu(both)  # (64, 1024) bfloat16
        y = tkq.swiglu(both[:, :1024], both[:, 1024:])  # (64, 1024) bfloat16
    """
    return _gated("swiglu", gate, up, layout)


def geglu(gate: Tensor, up: Optional[Tensor] = None, *, approximate: str = "none", layout: str = "split") -> Tensor:
    """gelu(gate) * up, with gelu(x) = x Phi(x), Phi the normal distribution (Hendrycks and Gimpel, 2016).

    Computed in float32 and rounded once. Differentiable once; the backward reads dy, gate and up and writes dgate and
    dup in one pass, each only where it is needed.

    Args:
        gate: (..., N), bf16, fp16 or fp32, last dimension contiguous. Or, without up, gate and up in one tensor
            (..., 2 N). Rows may be any distance apart: a slice of a wider tensor is read in place. Leading dimensions
            that no single row stride describes are copied first.
        up: as gate, of its shape and type.
        approximate: "none", or "tanh" for 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
        layout: of the one tensor. "split": gate is x[..., :N], up x[..., N:]. "interleaved": gate is x[..., 0::2], up
            x[..., 1::2]; it is copied first where its rows do not begin at an even element.

    Returns:
        A contiguous tensor (..., N) of gate's type.

    Raises:
        TypeError: gate or up is no dense tensor of bf16, fp16 or fp32; approximate or layout is no word.
        ValueError: approximate or layout is another word; shapes or devices that do not match, a last dimension that is
            not contiguous.
        NotImplementedError: N above 2^30.
        RuntimeError: a GPU other than Hopper.

    Example::

        gate, up = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16)
        y = tkq.geglu(gate, up, approximate="tanh")  # (64, 1024) bfloat16
    """
    if type(approximate) is not str or approximate not in _GELU:
        approximate = _approximate(approximate)
    return _gated(_GELU[approximate], gate, up, layout)


def _gated(kind, gate, up, layout):
    if type(layout) is not str or layout not in _LAYOUTS:
        layout = _layout[_op_of(kind)](layout)
    if up is not None and layout != "split":
        raise ValueError(f"{_op_of(kind)}: layout is {layout!r}, which is of gate and up in one tensor: with up it "
                         "would do nothing")
    packing = layout if up is None else "apart"
    if not ops.traced():
        found = _call_cache.take(gate, up, kind, packing)
        if found is not None:
            return found
    mode = ops.route(gate, up)
    if mode == "direct":
        return (_plain if gate.is_cuda else _on_cpu)(gate, up, kind, packing)
    if mode == "record":
        return _Recorded.apply(gate, up, kind, packing)
    check.refuse_tangent(_op_of(kind), gate=gate, up=up)
    _check(gate, up, kind, packing)
    return _op(gate, up, kind, packing)


def gated_backward(dy: Tensor, gate: Tensor, up: Optional[Tensor], kind: str, packing: str, need_gate: bool = True,
                   need_up: bool = True):
    """(dgate, dup) from the inputs of the forward, None where not needed; packed, (the packed gradient, None)."""
    if ops.direct(dy, gate, up):
        return _gradients(dy, gate, up, kind, packing, need_gate, need_up)
    dgate, dup = _backward_op(dy, gate, up, kind, packing, need_gate, need_up)
    return dgate if need_gate else None, dup if need_up and up is not None else None


# ---- launches ------------------------------------------------------------------------------------------------------


def _plain(gate: Tensor, up: Optional[Tensor], kind: str, packing: str) -> Tensor:
    """The forward, with as little Python as it takes."""
    out = None
    try:
        known, shape = _launch_cache[kind, packing], tuple(gate.shape)
        if packing != "apart":
            shape = *shape[:-1], shape[-1] // 2
        out = alloc.contiguous(gate.get_device(), shape, gate.dtype)
        known(gate, up, None, out, None)
        _call_cache.add((gate, up, kind, packing), known, (gate, up, None, out, None), out)
        return out
    except Exception:  # nothing is known, or it was refused
        pass
    return _value(gate, up, kind, packing, out)


def _value(gate: Tensor, up: Optional[Tensor], kind: str, packing: str, out: Optional[Tensor] = None,
           config=None) -> Tensor:
    """The forward's kernel. out: a contiguous tensor at a multiple of 16 bytes to write to, where there is one; config:
    another than the plan's, for tests and tuning."""
    try:
        if out is None:
            out = _empty_result(gate, packing)
        if 2 <= gate.dim() <= 3:
            _launch(gate, up, None, out, None, kind, packing, None, config)
        elif up is None or up.shape == gate.shape:  # with rows joined, others could look alike
            _launch(_rows(gate), _rows(up), None, _rows(out), None, kind, packing, None, config)
        else:
            raise ValueError
    except Exception:
        # The compiled function checks types, shapes, strides, addresses and devices; words for a user are found when
        # they are needed.
        _check(gate, up, kind, packing)
        raise
    return out


def _empty_result(gate, packing):
    if packing == "apart":
        return _empty(gate)
    *leading, N = gate.shape
    return alloc.contiguous(gate.get_device(), (*leading, N // 2), gate.dtype)


def _empty(x):
    """A contiguous tensor like x."""
    return alloc.like(x, x.get_device(), x.dtype)


def _gradients_on_gpu(dy: Tensor, gate: Tensor, up: Optional[Tensor], kind: str, packing: str, need_gate: bool,
                      need_up: bool, out: Optional[tuple] = None, config=None):
    """The backward's kernel. out: (dgate, dup) to write to, and config, as in `_value`."""
    if up is None:
        wanted = "both"
        out = out or (_empty(gate), None)
    elif need_gate or need_up:
        wanted = "both" if need_gate and need_up else "gate" if need_gate else "up"
        out = out or (_empty(gate) if need_gate else None, _empty(up) if need_up else None)
    else:
        return None, None
    if dy.stride()[-1] != 1:  # what autograd hands on may have any strides
        dy = dy.contiguous()
    tensors = (gate, up, dy, *out)
    _launch(*(tensors if 2 <= gate.dim() <= 3 else map(_rows, tensors)), kind, packing, wanted, config)
    return out


def _rows(x):
    """x as (M, N)."""
    if x is None:
        return None
    if x.stride()[-1] != 1 and x.shape[-1] > 1:
        raise ValueError  # reshape would copy; _check has the words
    return x.reshape(x.numel() // max(x.shape[-1], 1), x.shape[-1])


def _launch(x, u, dy, out, du, kind, packing, gradients, config):
    """Tensors of two or three dimensions, N or 2 N columns, or None: gate or both, up, dy, the result or dgate or both,
    dup."""
    columns, elements, size = x.shape[-1], x.numel(), x.itemsize
    bits = 16 | x.data_ptr() | ((columns >> 1 if packing == "split" else columns) | _strides(x)) * size
    if u is not None:
        bits |= u.data_ptr() | _strides(u) * size
    if packing == "interleaved":
        bits >>= 1
    if dy is not None:
        bits |= dy.data_ptr() | _strides(dy) * size
    vector = (bits & -bits) // size  # columns of the result in one access, as many as addresses and strides allow
    run = _launchers.get((kind, packing, gradients, x.dtype, vector, x.dim(), x.get_device(), config))
    if run is None or vector < 2 or elements >= MAX_UNITS:
        _launch_with_care(vector, (x, u, dy, out, du), kind, packing, gradients, config)
    elif elements:
        run(x, u, dy, out, du)


def _strides(x):
    """A number that has every power of two that all strides but the last have."""
    strides = x.stride()
    return strides[0] | strides[-2]


def _launch_with_care(vector, tensors, kind, packing, gradients, config):
    """The first call of a kind, calls with rows of an odd length, with very many elements, or with none."""
    x, u = tensors[:2]
    _check(x, u, kind, packing)
    if not x.numel():
        return
    if not vector:  # interleaved, and rows begin in the middle of a pair
        x = x.clone(memory_format=torch.contiguous_format)
        _launch(x, *tensors[1:], kind, packing, gradients, config)
        return
    joined = _joined(tensors) if packing == "apart" and vector == 1 else None
    if joined:
        _launch(*joined, kind, packing, gradients, config)
        return
    if x.numel() // vector <= MAX_UNITS:
        run = _launcher(x, kind, packing, vector, gradients, config)
        if vector == widest_gated(dtypes.name_of(x.dtype), packing) and gradients is None and config is None:
            row_dims = x.dim() - 1
            _launch_cache[kind, packing] = added(_launch_cache.get((kind, packing)), run, tensors,
                                            Shapes({0: row_dims, 1: row_dims}, {3: row_dims}, columns=()))
        run(*tensors)
        return
    tensors, step = [_rows(t) for t in tensors], MAX_UNITS // -(-x.shape[-1] // vector)
    run = _launcher(tensors[0], kind, packing, vector, gradients, config)
    for i in range(0, tensors[0].shape[0], step):
        run(*(t if t is None else t[i:i + step] for t in tensors))


def _joined(tensors):
    """The tensors with several rows joined into one, so that a row has whole vectors; None where one of them does not
    allow it."""
    given = [t for t in tensors if t is not None]
    rows, together = given[0].numel() // given[0].shape[-1], 16 // given[0].itemsize
    if rows % together or not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in given):
        return None
    return [t if t is None else t.view(-1, t.shape[-1] * together) for t in tensors]


def _launcher(x, kind, packing, vector, gradients, config):
    key = kind, packing, gradients, x.dtype, vector, x.dim(), x.get_device(), config
    if key not in _launchers:
        arch.require_hopper(x.device)
        spec = GatedSpec(kind, dtypes.name_of(x.dtype), packing, vector, gradients, x.dim())
        _launchers[key] = runtime.function(recipe(spec, config))
    return _launchers[key]


def recipe(spec: GatedSpec, config=None):
    """The recipe of a spec, with its planned config or another one."""
    return runtime.Recipe("tkq.pointwise.gated:Gated", (spec, config or plan_gated(spec)))


# ---- checks and the path without a GPU ---------------------------------------------------------------------------


def _check(gate, up, kind, packing):
    """Raises what the public functions promise."""
    op = _op_of(kind)
    _tensors[op](gate, up)
    if gate.dim() == 0:
        raise ValueError(f"{op}: gate: got shape (), allowed are (..., N)")
    check.last_dim_contiguous("gate", gate)
    if up is None:
        _layout[op](packing)
        if gate.shape[-1] % 2:
            raise ValueError(f"{op}: gate: got shape {tuple(gate.shape)}; without up it holds both, so its last "
                             "dimension must be even")
    else:
        if up.dtype != gate.dtype:
            raise TypeError(f"{op}: up is {up.dtype}, gate is {gate.dtype}; both must have one dtype")
        check.shape("up", up, tuple(gate.shape))
        check.last_dim_contiguous("up", up)
        check.same_device(gate=gate, up=up)
    if gate.shape[-1] > MAX_N:
        raise NotImplementedError(f"{op}: gate: got {gate.shape[-1]} columns, allowed are at most {MAX_N}")


def _op_of(kind):
    """The public function of a kind of gate."""
    return "swiglu" if kind == "swiglu" else "geglu"


def _on_cpu(gate: Tensor, up: Optional[Tensor], kind: str, packing: str) -> Tensor:
    _check(gate, up, kind, packing)
    return reference.gated(kind, gate, up, packing).contiguous()


def _gradients_on_cpu(dy: Tensor, gate: Tensor, up: Optional[Tensor], kind: str, packing: str, need_gate: bool,
                      need_up: bool):
    dgate, dup = reference.gated_backward(kind, dy, gate, up, packing)
    wanted = need_gate or up is None
    return dgate.contiguous() if wanted else None, dup.contiguous() if need_up and dup is not None else None


def _forward(gate, up, kind, packing):
    return (_plain if gate.is_cuda else _on_cpu)(gate, up, kind, packing)


def _gradients(dy, gate, up, kind, packing, need_gate, need_up):
    run = _gradients_on_gpu if gate.is_cuda else _gradients_on_cpu
    return run(dy, gate, up, kind, packing, need_gate, need_up)


# ---- what PyTorch sees ---------------------------------------------------------------------------------------------


def _setup(ctx, inputs, output):
    gate, up, ctx.kind, ctx.packing = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy):
    gate, up = ctx.saved_tensors
    need_gate, need_up = ctx.needs_input_grad[:2]
    dgate, dup = gated_backward(dy, gate, up, ctx.kind, ctx.packing, need_gate, need_up)
    return dgate, dup, None, None


def _record(ctx, gate, up, kind, packing):
    """The same in plain eager mode, past the dispatcher."""
    ctx.kind, ctx.packing = kind, packing
    ctx.save_for_backward(gate, up)
    return _op_forward(gate, up, kind, packing)


def _op_forward(gate: Tensor, up: Optional[Tensor], kind: str, packing: str) -> Tensor:
    found = _call_cache.take(gate, up, kind, packing)
    return _forward(gate, up, kind, packing) if found is None else found


def _op_backward(dy: Tensor, gate: Tensor, up: Optional[Tensor], kind: str, packing: str, need_gate: bool,
                 need_up: bool) -> tuple[Tensor, Tensor]:
    """What is not needed is empty."""
    found = _gradients(dy, gate, up, kind, packing, need_gate, need_up)
    dgate, dup = (gate.new_empty(0) if t is None else t for t in found)
    return dgate, dup


def _fake_forward(gate: Tensor, up: Optional[Tensor], kind: str, packing: str) -> Tensor:
    _check(gate, up, kind, packing)
    columns = gate.shape[-1] // (1 if packing == "apart" else 2)
    return gate.new_empty((*gate.shape[:-1], columns))


def _fake_backward(dy: Tensor, gate: Tensor, up: Optional[Tensor], kind: str, packing: str, need_gate: bool,
                   need_up: bool) -> tuple[Tensor, Tensor]:
    apart = packing == "apart"
    return gate.new_empty(gate.shape if need_gate or not apart else 0), gate.new_empty(
        gate.shape if need_up and apart else 0)


_op = ops.torch_op("gated", cuda=_op_forward, cpu=_op_forward, fake=_fake_forward, setup=_setup, backward=_backward,
                   of="swiglu, geglu")
_backward_op = ops.torch_op("gated_backward", cuda=_op_backward, cpu=_op_backward, fake=_fake_backward)
_Recorded = ops.eager_function("Gated", forward=_record, backward=_backward, of="swiglu, geglu")
