"""tkq.causal_conv1d_step: what PyTorch sees."""
from typing import Optional

import torch
from torch import Tensor

from tkq.convolution import launch
from tkq.convolution.check import STEP, StepCall, check_step, check_written, step_options
from tkq.reference import convolution as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_calls = CallCache()  # of `_step`


def causal_conv1d_step(x: Tensor, conv_states: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
                       activation: Optional[str] = None, cache_indices: Optional[Tensor] = None, *,
                       out: Optional[Tensor] = None) -> Tensor:
    """One token, or a few, of ``causal_conv1d`` for each of N sequences: decoding. Their last inputs are in a pool, and
    are updated in place, by one launch; in float32.

    Args:
        x: (N, C), one token of each sequence, or (N, T, C), T of any number, also 0; bf16, fp16 or fp32, any strides.
        conv_states: the pool, (M, C, L), L of W - 1 and more: the last inputs of each sequence, the oldest first;
            bf16, fp16 or fp32, of any strides that keep its elements apart. Written to: a row moves T columns to the
            left, and the new inputs stand at its end. Of more than W - 1 columns the last W - 1 count.
        weight, bias, activation: as ``causal_conv1d`` has them.
        cache_indices: (N,) int32 or int64: the row of the pool that has the state of a sequence. A sequence whose row
            the pool does not have, -1 for example, is skipped: its y is 0, and no state is read or written. No two
            sequences may have one row. None: sequence n has row n.
        out: where y is written, of x's shape and dtype, any strides that keep its elements apart. It shares no memory
            with the others.

    Returns:
        y of x's shape, contiguous, of x's dtype; or out.

    Raises:
        TypeError: x, conv_states, weight, bias or out is no dense tensor of bf16, fp16 or fp32; activation is no word;
            cache_indices is no dense tensor of int32 or int64; dtypes that differ.
        ValueError: activation is another word; shapes that do not go together, devices that differ, a pool or out whose
            elements share memory, with each other or with another tensor's.
        NotImplementedError: a tensor that requires a gradient, with gradients enabled: there is none; a W that is not
            supported.
        RuntimeError: a GPU other than Hopper; a tensor made under torch.inference_mode that is written to outside.

    Values of cache_indices are looked at on the GPU alone: nothing waits, and a CUDA graph may be replayed with others.
    Under torch.autocast x, weight and bias are cast. CPU tensors take ``tkq.reference.convolution``, by the same rules.

    Example::

        x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(512, 4, device="cuda", dtype=torch.bfloat16)
        pool = torch.zeros(32, 512, 3, device="cuda", dtype=torch.bfloat16)
        rows = torch.tensor([7, 3, -1, 30], device="cuda")  # the third sequence is skipped
        y = tkq.causal_conv1d_step(x, pool, weight, None, "silu", rows)  # (4, 512) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        x, weight, bias = autocast.lowered(x, weight, bias)
    if not traced and not (check.made_in_inference(conv_states) or check.made_in_inference(out)):
        found = _calls.take(x, conv_states, weight, bias, activation, cache_indices, out)
        if found is not None:
            _changed(conv_states, out)
            return found
    activation = step_options(activation)
    call = StepCall(x, conv_states, weight, bias, activation, cache_indices)
    if ops.direct(x, conv_states, weight, bias, cache_indices, out):
        return (_step if x.is_cuda else _step_cpu)(call, out)
    check.refuse_gradient(STEP, x=x, conv_states=conv_states, weight=weight, bias=bias, out=out)
    check_step(call, out)  # the dispatcher's words name no argument
    if not traced:  # which has no addresses
        check_written(call, out)
    y = _op(*call)
    return y if out is None else out.copy_(y)


def _changed(pool, out):
    """Their versions: the launch is past the dispatcher."""
    for x in (pool, out):
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _step(call, out=None):
    """Of CUDA tensors."""
    check_step(call, out)
    check_written(call, out)
    x, pool, weight, bias, activation, indices = call
    y = x.new_empty(x.shape) if out is None else out
    launched = launch.step(x, pool, weight, bias, activation == "silu", indices, y)
    if launched is not None:
        _changed(pool, out)
        if weight is launched[1][1][1] and bias is launched[1][1][2]:  # nothing was copied
            _calls.add((*call, out), *launched, y)
    return y


def _step_cpu(call, out=None):
    check_step(call, out)
    check_written(call, out)
    y = call.x.new_empty(call.x.shape) if out is None else out
    return y if call.x.is_meta else y.copy_(reference.causal_conv1d_step(*call))


def _cuda_op(x: Tensor, conv_states: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Optional[str],
             cache_indices: Optional[Tensor]) -> Tensor:
    call = StepCall(x, conv_states, weight, bias, activation, cache_indices)
    found = None if check.made_in_inference(conv_states) else _calls.take(*call, None)
    if found is None:
        step_options(activation)  # of the dispatcher, where no public function has looked at it
        return _step(call)
    _changed(conv_states, None)
    return found


def _fake(*call):
    call = StepCall(*call)
    check_step(call)
    return call.x.new_empty(call.x.shape)


_op = ops.torch_op(STEP, cuda=_cuda_op, cpu=lambda *call: _step_cpu(StepCall(*call)), fake=_fake,
                   mutates=("conv_states",))
