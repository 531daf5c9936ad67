"""From torch tensors to launches."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.convolution.config import ConvConfig
from tkq.convolution.plan import plan, run_tokens, widest
from tkq.convolution.spec import MOST_COLUMNS, ConvSpec, StepSpec, SumsSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.call.access import FARTHEST, vector_of
from tkq.runtime.device import arch

MOST_RUNS, GROUP = 96, 32  # whose parts a thread sums, one after the other; of more, groups
_launchers: dict = {}  # (device, spec, config) -> the kernel's function; as many as kinds of call


class Given(NamedTuple):
    """x (B, S, C), weight (C, W), bias (C,), state (N, C, W - 1), cu (N + 1,), as `tkq.causal_conv1d` has them; or in
    cu's place seq_idx, (B, S). heads: how many have an l2 norm; head: channels of one."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    silu: bool = False
    state: Tensor | None = None
    cu: Tensor | None = None
    heads: int = 0
    head: int = 0

    @property
    def normed(self) -> int | None:
        """Channels that have an l2 norm."""
        return self.heads * self.head if self.heads else None


def recipe(spec: ConvSpec | SumsSpec | StepSpec, config: ConvConfig | None = None) -> Recipe:
    """The kernel's, with its planned config or another one."""
    if isinstance(spec, SumsSpec):
        return Recipe("tkq.convolution.sums:Sums", (spec,))
    if isinstance(spec, StepSpec):
        return Recipe("tkq.convolution.step:ConvStep", (spec,))
    kernel = "along_time:AlongTime" if spec.layout == "time" else (
        "backward:ChannelBackward" if spec.backward else "forward:ChannelForward")
    return Recipe(f"tkq.convolution.{kernel}", (spec, config or plan(spec)))


def along_time(x: Tensor, state: Tensor | None, cu: Tensor | None, heads: int = 0) -> bool:
    """Is x taken as it lies, with neighbouring tokens contiguous? Its result and its gradient lie likewise then. With
    states, packed sequences or normed heads it is copied."""
    if state is not None or cu is not None or heads:
        return False
    return x.stride(1) == 1 and x.stride(2) != 1 and x.shape[1] > 1


def result_like(x: Tensor, time: bool) -> Tensor:
    """What a launch writes: contiguous, in the order of x's dimensions in memory."""
    B, S, C = x.shape
    return x.new_empty_strided((B, S, C), (C * S, 1, S)) if time else x.new_empty(B, S, C)


def readable(x: Tensor, time: bool, vector: int = 1) -> Tensor:
    """x, or a copy, where neither channels nor tokens are contiguous, or tokens lie too far apart, or not at multiples
    of `vector` elements. A dimension of one element has a stride of 1, whatever x says: kernels are compiled for
    that."""
    if vector > 1 and vector_of(time, x) < vector:
        return x.clone(memory_format=torch.contiguous_format)
    dim = 1 if time else 2
    near = time or x.stride(1) * x.itemsize <= FARTHEST
    if near and x.shape[dim] == 1 and x.stride(dim) != 1:
        return x.as_strided(x.shape, tuple(1 if i == dim else n for i, n in enumerate(x.stride())))
    return x if near and x.stride(dim) == 1 else x.clone(memory_format=torch.contiguous_format)


def vector_of_heads(x: Tensor, heads: int, head: int) -> int:
    """Elements in one access, where heads are normed: a head has the lanes of a warp, or half of them, where all lanes
    of that warp have channels and 8 bytes are enough."""
    half = x.itemsize == 2 and head == 64 and -(-heads // 2) * 128 <= x.shape[2]
    return head // 16 if half else head // 32


def spec_of(given: Given, vector: int, time: bool, gradients: str | None = None) -> ConvSpec:
    name = lambda x: None if x is None else dtypes.name_of(x.dtype)
    dtype, layout = name(given.x), "time" if time else "channels"
    vector = vector_of_heads(given.x, given.heads, given.head) if given.heads else widest(vector, dtype, layout)
    return ConvSpec(dtype, name(given.weight), given.weight.shape[1], name(given.bias), given.silu, vector, layout,
                    name(given.state), name(given.cu), gradients, given.cu is not None and given.cu.dim() == 2,
                    given.head if given.heads else 0)


def forward(given: Given) -> tuple:
    """(y, what was launched: the function and its arguments), of CUDA tensors that have been looked at. None where
    nothing was launched."""
    x = given.x
    time = along_time(x, given.state, given.cu, given.heads)
    y = result_like(x, time)
    if not y.numel():
        return y, None
    x = readable(x, time, _least(given))
    given = _laid_out(given, x)
    spec = spec_of(given, vector_of(time, x, y), time)
    operands = given.weight, given.bias, *((y, None, None, None) if time else (given.state, given.cu, y, given.normed))
    call = _launcher(x, spec), (x, operands, run_tokens(spec, *x.shape, arch.num_sms(x.device)))
    call[0](*call[1])
    return y, call


def backward(given: Given, dy: Tensor, need_x: bool, need_weights: bool):
    """(dx or None, dweight or None, dbias or None), likewise. dy: of x's shape and dtype, of any strides."""
    x, C, W = given.x, *given.weight.shape
    time = along_time(x, given.state, given.cu, given.heads)
    dx = result_like(x, time) if need_x else None
    dweight = torch.empty_like(given.weight, memory_format=torch.contiguous_format) if need_weights else None
    dbias = given.bias.new_empty(C) if need_weights and given.bias is not None else None
    if not x.numel():
        return dx, *(None if g is None else g.zero_() for g in (dweight, dbias))
    x, dy = _both(x, dy, time, _least(given))
    given = _laid_out(given, x)
    vector = vector_of(time, x, dy, *(() if dx is None else (dx,)))
    spec = spec_of(given, vector, time, "both" if need_x and need_weights else "x" if need_x else "weights")
    run = run_tokens(spec, *x.shape, arch.num_sms(x.device))
    parts = x.new_empty(x.shape[0], -(-x.shape[1] // run), W + 1, C, dtype=torch.float32) if need_weights else None
    if time:
        _launcher(x, spec)(x, (given.weight, given.bias, None, dy, dx, parts), run)
    else:
        _launcher(x, spec)(x, (given.weight, given.bias, given.state, given.cu, dy, dx, parts, given.normed), run)
    if need_weights:
        _sum(parts.view(-1, W + 1, C), dweight, dbias)
    return dx, dweight, dbias


def _sum(parts, dweight, dbias):
    """Of parts (runs, W + 1, C)."""
    runs, taps, C = parts.shape
    if runs > MOST_RUNS:
        groups = parts.new_empty(-(-runs // GROUP), taps, C)
        _launcher(parts, SumsSpec(taps - 1, groups=True))(parts, groups, None, GROUP)
        _sum(groups, dweight, dbias)
    else:
        _launcher(parts, SumsSpec(taps - 1, *dtypes.names(dweight, dbias)))(parts, dweight, dbias, runs)


def step(x: Tensor, pool: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, indices: Tensor | None,
         y: Tensor) -> tuple | None:
    """One launch, of x and y (N, T, C) or (N, C): (the function that was launched, its arguments). None of no token."""
    if not x.numel():
        return None
    name, W = lambda t: None if t is None else dtypes.name_of(t.dtype), weight.shape[1]
    columns = pool.shape[2] if pool.shape[2] <= MOST_COLUMNS else 0
    spec = StepSpec(name(x), name(weight), W, name(bias), silu, name(pool), name(indices), columns,
                    x.dim() == 3)
    call = _launcher(x, spec), (x, (pool, _dense(weight), _dense(bias), indices, y))
    call[0](*call[1])
    return call


def _least(given):
    """Elements of an access that there must be."""
    return vector_of_heads(given.x, given.heads, given.head) if given.heads else 1


def _both(x, dy, time, vector):
    x = readable(x, time, vector)
    if time and dy.stride(1) != 1:
        dy = dy.mT.clone(memory_format=torch.contiguous_format).mT
    return x, readable(dy, time, vector)


def _laid_out(given, x):
    return given._replace(x=x, weight=_dense(given.weight), bias=_dense(given.bias), cu=_dense(given.cu))


def _dense(x):
    """A vector or the weight, contiguous and at a multiple of 16 bytes."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _launcher(x, spec, config=None):
    key = x.get_device(), spec, config
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe(spec, config))
    return _launchers[key]


