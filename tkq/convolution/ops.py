"""tkq.causal_conv1d: what PyTorch sees."""
from typing import Optional

from torch import Tensor

from tkq.convolution import launch, states
from tkq.convolution.check import OP, Call, check_call, options, refuse_states, sequences
from tkq.convolution.launch import Given
from tkq.reference import convolution as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_calls = CallCache()  # of `_cuda`, without a final state


def causal_conv1d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None,
                  initial_state: Optional[Tensor] = None, output_final_state: bool = False,
                  cu_seqlens: Optional[Tensor] = None, seq_idx: Optional[Tensor] = None,
                  norm_heads: int = 0, head_dim: int = 128):
    """A causal convolution of a few taps along the tokens, each channel by itself:

        y[t] = activation(bias + sum of weight[:, i] x[t - W + 1 + i] over i from 0 to W - 1)

    Computed in float32 and rounded once. One pass over memory, forward and backward; states are read and written beside
    it, by PyTorch.

    Args:
        x: (B, S, C), bf16, fp16 or fp32, S of any length, also 0. Fast are tensors with contiguous channels whose
            tokens are any distance apart (slices of a packed projection go in without a copy), and those with
            contiguous tokens, a (B, C, S) transposed. Others are copied first, and so are those with contiguous tokens
            where there are states, cu_seqlens or seq_idx.
        weight: (C, W), W from 2 to 8; bf16, fp16 or fp32, not necessarily x's type. Of a torch.nn.Conv1d:
            weight[:, 0].
        bias: (C,), bf16, fp16 or fp32.
        activation: None or "silu", x / (1 + exp(-x)).
        initial_state: (N, C, W - 1), the inputs before each sequence, the oldest first; bf16, fp16 or fp32, of any
            strides; None: zeros. N is B, or the sequences of cu_seqlens.
        output_final_state: also return the last W - 1 inputs of each sequence.
        cu_seqlens: (N + 1,) int32 or int64, rising from 0 to S: B is 1, sequence n has the tokens cu_seqlens[n] to
            cu_seqlens[n + 1], and none sees another. It may have none. The numbers stay on the GPU: nothing waits for
            them. A number outside of 0 to S counts as the nearer of the two, one below an earlier one as that; tokens
            of no sequence give 0.
        seq_idx: (B, S) int32 or int64, in the place of cu_seqlens and without states: neighbouring tokens of one number
            are a sequence. The kernels compare them as they go.
        norm_heads: of the first norm_heads heads of head_dim channels each, y is divided by sqrt(sum of y^2 + 1e-6), in
            float32 and before it is rounded: the l2 norm that q and k of a delta rule have. C is a multiple of 4 then,
            and x with contiguous tokens is copied.
        head_dim: channels of such a head, 64 or 128.

    Returns:
        y (B, S, C) of x's type: contiguous, or contiguous along tokens as x is where it is not copied. With
        output_final_state the pair (y, state), the state (N, C, W - 1) contiguous, of initial_state's type, or x's.

    Raises:
        TypeError: x, weight, bias or initial_state is no dense tensor of bf16, fp16 or fp32; activation is no word;
            output_final_state is no bool; cu_seqlens or seq_idx is no dense tensor of int32 or int64; norm_heads or
            head_dim is no int.
        ValueError: activation is another word; norm_heads is outside 0 to 16777216; head_dim is outside 1 to
            16777216; shapes that do not go together, devices that differ; seq_idx beside cu_seqlens or states; more
            channels in normed heads than x has.
        NotImplementedError: a W that is not supported; more than 65535 sequences without cu_seqlens, or 2^28 channels;
            normed heads of another head_dim than 64 and 128, or beside a number of channels that is no multiple of 4.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in x, weight, bias and initial_state; gradients are the same, bit for bit, in every run. Under
    torch.autocast x, weight and bias are cast. CPU tensors take ``tkq.reference.convolution``, by the same rules.

    Example::

        x = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(512, 4, device="cuda", dtype=torch.bfloat16)
        y, state = tkq.causal_conv1d(x, weight, None, "silu", None, True)  # (2, 64, 512) bfloat16; (2, 512, 3) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        x, weight, bias = autocast.lowered(x, weight, bias)
    if not traced and output_final_state is False:
        found = _calls.take(x, weight, bias, activation, initial_state, cu_seqlens, seq_idx, norm_heads,
                            head_dim)
        if found is not None:
            return found
    activation, output_final_state, norm_heads, head_dim = options(activation, output_final_state, norm_heads, head_dim)
    cu_seqlens = sequences(Call(x, weight, bias, initial_state, cu_seqlens), seq_idx, output_final_state)
    given = x, weight, bias, activation, initial_state, output_final_state, cu_seqlens, norm_heads, head_dim
    mode = ops.route(x, weight, bias, initial_state, cu_seqlens)
    if mode == "direct":
        y, final = (_cuda if x.is_cuda else _cpu)(*given)
    elif mode == "record":
        y, final = _Recorded.apply(*given)
    else:
        check.refuse_tangent(OP, x=x, weight=weight, bias=bias, initial_state=initial_state)
        check_call(Call(x, weight, bias, initial_state, cu_seqlens), norm_heads, head_dim)  # the dispatcher's words
        y, final = _op(*given)
    return (y, final) if output_final_state else y


# ---- forward: an empty final state where none is asked for. cu_seqlens of two dimensions is seq_idx -----------------


def _apart(cu_seqlens):
    """(cu_seqlens, seq_idx), as the public function has them."""
    return (None, cu_seqlens) if cu_seqlens is not None and cu_seqlens.dim() == 2 else (cu_seqlens, None)


def _cuda(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: Optional[str],
          initial_state: Optional[Tensor], output_final_state: bool,
          cu_seqlens: Optional[Tensor], norm_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    known = x, weight, bias, activation, initial_state, *_apart(cu_seqlens), norm_heads, head_dim
    y = _calls.take(*known)
    if y is None:
        options(activation, output_final_state, norm_heads, head_dim)  # where no public function has looked at them
        check_call(Call(x, weight, bias, initial_state, cu_seqlens), norm_heads, head_dim)
        y, call = launch.forward(Given(x, weight, bias, activation == "silu", initial_state, cu_seqlens, norm_heads,
                                       head_dim))
        if call is not None:
            _calls.add(known, *call, y)
    return y, _final(x, weight, initial_state, output_final_state, cu_seqlens)


def _cpu(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens, norm_heads, head_dim):
    options(activation, output_final_state, norm_heads, head_dim)
    check_call(Call(x, weight, bias, initial_state, cu_seqlens), norm_heads, head_dim)
    result = launch.result_like(x, launch.along_time(x, initial_state, cu_seqlens, norm_heads))
    if not x.is_meta:  # which has no numbers to look at
        result.copy_(reference.causal_conv1d(x, weight, bias, activation, initial_state, cu_seqlens, norm_heads,
                                             head_dim)[0])
    return result, _final(x, weight, initial_state, output_final_state, cu_seqlens)


def _final(x, weight, initial_state, output_final_state, cu_seqlens):
    if not output_final_state:
        return x.new_empty(0)
    refuse_states(cu_seqlens, initial_state, output_final_state)
    return states.final_state(x, initial_state, cu_seqlens, weight.shape[1])


def _fake(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens, norm_heads, head_dim):
    check_call(Call(x, weight, bias, initial_state, cu_seqlens), norm_heads, head_dim)
    y = launch.result_like(x, launch.along_time(x, initial_state, cu_seqlens, norm_heads))
    if not output_final_state:
        return y, x.new_empty(0)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    like = x if initial_state is None else initial_state
    return y, like.new_empty(sequences, x.shape[2], weight.shape[1] - 1)


# ---- gradients: empty ones of what is not wanted --------------------------------------------------------------------


def _backward_cuda(dy: Tensor, dfinal: Optional[Tensor], x: Tensor, weight: Tensor, bias: Optional[Tensor],
                   activation: Optional[str], initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor],
                   norm_heads: int, head_dim: int, need_x: bool, need_weights: bool,
                   need_state: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = Given(x, weight, bias, activation == "silu", initial_state, cu_seqlens, norm_heads, head_dim)
    dx = dweight = dbias = dstate = None
    if need_x or need_weights:
        dx, dweight, dbias = launch.backward(given, dy, need_x, need_weights)
    if need_state:
        dstate = states.initial_gradient(dy, given)
    if dfinal is not None and (need_x or need_state):
        states.add_final_gradient(dx, dstate, dfinal, cu_seqlens, x.shape[1])
    dstate = dstate if dstate is None else dstate.to(initial_state.dtype)
    return tuple(x.new_empty(0) if g is None else g for g in (dx, dweight, dbias, dstate))


def _backward_cpu(*given):
    found = reference.causal_conv1d_backward(*given[:-3])
    empty = _backward_fake(*given)
    for result, gradient in zip(empty, found, strict=True):
        if gradient is not None and result.shape == gradient.shape:
            result.copy_(gradient)
    return empty


def _backward_fake(dy, dfinal, x, weight, bias, activation, initial_state, cu_seqlens, norm_heads, head_dim,
                   need_x, need_weights, need_state):
    nothing = lambda: x.new_empty(0)
    return (launch.result_like(x, launch.along_time(x, initial_state, cu_seqlens, norm_heads)) if need_x else nothing(),
            weight.new_empty(weight.shape) if need_weights else nothing(),
            bias.new_empty(bias.shape) if need_weights and bias is not None else nothing(),
            initial_state.new_empty(initial_state.shape) if need_state else nothing())


def _setup(ctx, inputs, output):
    x, weight, bias, activation, initial_state, _, cu_seqlens, *ctx.heads = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
    ctx.activation = activation
    ctx.set_materialize_grads(False)


def _record(ctx, *given):
    """The op in plain eager mode, past the dispatcher."""
    found = (_cuda if given[0].is_cuda else _cpu)(*given)
    _setup(ctx, given, found)
    return found


def _back(ctx, dy, dfinal=None):
    if dy is None and dfinal is None:
        return (None,) * 9
    x, weight, bias, state, cu = ctx.saved_tensors
    if dfinal is not None and not dfinal.numel():
        dfinal = None
    if dy is None:
        dy = x.new_zeros(()).expand(x.shape)
    needs = ctx.needs_input_grad
    need_weights = needs[1] or needs[2]
    call = _backward_op
    if ops.direct(dy, dfinal, x, weight, bias, state, cu):
        call = _backward_cuda if dy.is_cuda else _backward_cpu
    dx, dweight, dbias, dstate = call(dy, dfinal, x, weight, bias, ctx.activation, state, cu, *ctx.heads, needs[0],
                                      need_weights, needs[4])
    return (dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None, None,
            dstate if needs[4] else None, None, None, None, None)


_backward_op = ops.torch_op("causal_conv1d_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back)
_Recorded = ops.eager_function("CausalConv1d", forward=_record, backward=_back, of=OP)
