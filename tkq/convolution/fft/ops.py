"""tkq.fft_conv: what PyTorch sees."""
from typing import Optional

from torch import Tensor

from tkq.convolution.fft import launch
from tkq.convolution.fft.check import OP, Call, check_call, options
from tkq.convolution.fft.launch import Given
from tkq.reference import long_convolution as reference
from tkq.runtime.call import autocast, check, ops


def fft_conv(u: Tensor, k: Tensor, d: Optional[Tensor] = None, causal: bool = True,
             pre_gate: Optional[Tensor] = None, post_gate: Optional[Tensor] = None, precision: str = "half") -> Tensor:
    """A convolution along the tokens with a filter as long as they are, one for each head:

        v = pre_gate * u,    y[t] = post_gate[t] * (d v[t] + sum of k[j] v[t - j] over j)

    By the Fourier transform, whose factors are products of 64 x 64 matrices on the tensor cores, in one pass over
    memory, of more than 32768 tokens in three. Operands of these products are fp16, each sequence's divided by a power
    of 2 near its largest number; sums are fp32: eight roundings to fp16 one after the other, in three passes and with
    bf16 sequences about twice as many, little beside the rounding of a bf16 y (docs/fft_conv.md). With precision
    "split" each operand is the sum of two fp16 numbers, of 22 bits together.

    Args:
        u: (B, H, L), bf16 or fp16, neighbouring tokens contiguous, or it is copied. L up to 4194304.
            Circular ones are fast where L is a power of 2 from 128 to 4096; others take a copy, and the work of twice
            as many causal tokens; more than 2097152 the work of two convolutions, and float32 results of both.
        k: (H, Lk) float32, k[:, 0] of the token itself. Of any length, also 0: causal taps beyond L reach no token;
            circular ones that are L apart reach the same token.
        d: (H,), bf16, fp16 or fp32: of the input itself, as a summand of k[:, 0].
        causal: y[t] depends on tokens up to t. False: the tokens are a circle, t - j counts modulo L.
        pre_gate, post_gate: as u, of its type; None: 1.
        precision: "half", operands of the products are fp16; "split", each is the sum of two, and a product three: for
            fp16 results and gradients of filters that are to be as good as torch.fft's in float32. More than 4096
            tokens then take three passes, and the filter's gradient always does.

    Returns:
        y (B, H, L) of u's type, contiguous.

    Raises:
        TypeError: u, pre_gate or post_gate is no dense tensor of bf16 or fp16; k is no dense tensor of fp32; d is no
            dense tensor of bf16, fp16 or fp32; causal is no bool; precision is no word; a gate of another type than u.
        ValueError: precision is another word; shapes that do not go together, devices that differ.
        NotImplementedError: more tokens than are supported; more than 2^24 sequences or heads.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in all tensors; gradients are the same, bit for bit, in every run. A sequence that has NaN or
    infinities is NaN all over, and no other one; so is all of the filter's gradient. Under torch.autocast u and the
    gates are cast. Circular sequences share a transform two by two, and so their roundings.

    Source: Fu et al., FlashFFTConv: efficient convolutions for long sequences with tensor cores, 2023. CPU tensors take
    ``tkq.reference.long_convolution``, by the same rules.

    Example::

        u = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(64, 1024, device="cuda")
        y = tkq.fft_conv(u, k)  # (2, 64, 1024) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        u, pre_gate, post_gate = autocast.lowered(u, pre_gate, post_gate)
    causal, precision = options(causal, precision)
    given = u, k, d, causal, pre_gate, post_gate, precision
    mode = ops.route(u, k, d, pre_gate, post_gate)
    if mode == "direct":
        return (_cuda if u.is_cuda else _cpu)(*given)
    if mode == "record":
        return _Recorded.apply(*given)
    check.refuse_tangent(OP, u=u, k=k, d=d, pre_gate=pre_gate, post_gate=post_gate)
    check_call(Call(*given))  # the dispatcher's words name no argument
    return _op(*given)


# ---- forward --------------------------------------------------------------------------------------------------------


def _cuda(u: Tensor, k: Tensor, d: Optional[Tensor], causal: bool, pre_gate: Optional[Tensor],
          post_gate: Optional[Tensor], precision: str) -> Tensor:
    check_call(Call(u, k, d, causal, pre_gate, post_gate, precision))
    return launch.forward(Given(u, k, d, causal, pre_gate, post_gate, precision == "split"))


def _cpu(u, k, d, causal, pre_gate, post_gate, precision):
    check_call(Call(u, k, d, causal, pre_gate, post_gate, precision))
    result = u.new_empty(u.shape)
    return result if u.is_meta else result.copy_(reference.fft_conv(u, k, d, causal, pre_gate, post_gate))


def _fake(u, k, d, causal, pre_gate, post_gate, precision):
    check_call(Call(u, k, d, causal, pre_gate, post_gate, precision))
    return u.new_empty(u.shape)


# ---- gradients: empty ones of what is not wanted --------------------------------------------------------------------


def _backward_cuda(dy: Tensor, u: Tensor, k: Tensor, d: Optional[Tensor], causal: bool, pre_gate: Optional[Tensor],
                   post_gate: Optional[Tensor], precision: str, need_u: bool, need_k: bool, need_d: bool,
                   need_pre: bool, need_post: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of v = pre u the gradient is the convolution of post dy with the mirrored filter: of u that times pre, of pre
    that times u. Of post it is dy times the convolution itself."""
    found, split = [None] * 5, precision == "split"
    g = Given(u, k, d, causal, pre_gate, post_gate, split)
    if need_u and (need_k or need_d):
        found[0], of_taps = launch.gradients(g, dy)
    elif need_u:
        found[0] = launch.forward(Given(dy, k, d, causal, post_gate, pre_gate, split), conjugate=True)
    elif need_k or need_d:
        of_taps = launch.filter_gradient(g, dy)
    if need_k or need_d:
        found[1] = of_taps[:, :k.shape[1]].contiguous() if need_k else None
        found[2] = of_taps[:, 0].to(d.dtype, copy=True) if need_d else None  # an op's results are apart
    if need_pre:
        found[3] = launch.forward(Given(dy, k, d, causal, post_gate, u, split), conjugate=True)
    if need_post:
        found[4] = launch.forward(Given(u, k, d, causal, pre_gate, dy, split))
    return tuple(u.new_empty(0) if t is None else t for t in found)


def _backward_cpu(dy, u, k, d, causal, pre_gate, post_gate, precision, *needs):
    found = reference.fft_conv_backward(dy, u, k, d, causal, pre_gate, post_gate)
    empty = _backward_fake(dy, u, k, d, causal, pre_gate, post_gate, precision, *needs)
    for result, gradient, needed in zip(empty, found, needs, strict=True):
        if needed:
            result.copy_(gradient)
    return empty


def _backward_fake(dy, u, k, d, causal, pre_gate, post_gate, precision, *needs):
    of = u, k, d, pre_gate, post_gate
    return tuple(t.new_empty(t.shape) if need else u.new_empty(0) for t, need in zip(of, needs, strict=True))


def _setup(ctx, inputs, output):
    u, k, d, causal, pre_gate, post_gate, precision = inputs
    ctx.save_for_backward(u, k, d, pre_gate, post_gate)
    ctx.causal, ctx.precision = causal, precision


def _record(ctx, *given):
    """The op in plain eager mode, past the dispatcher."""
    found = (_cuda if given[0].is_cuda else _cpu)(*given)
    _setup(ctx, given, found)
    return found


def _back(ctx, dy):
    u, k, d, pre, post = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4, 5)]
    call = _backward_op
    if ops.direct(dy, u, k, d, pre, post):
        call = _backward_cuda if dy.is_cuda else _backward_cpu
    du, dk, dd, dpre, dpost = (t if need else None for t, need in zip(
        call(dy, u, k, d, ctx.causal, pre, post, ctx.precision, *needs), needs, strict=True))
    return du, dk, dd, None, dpre, dpost, None


_backward_op = ops.torch_op("fft_conv_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back)
_Recorded = ops.eager_function("FftConv", forward=_record, backward=_back, of=OP)
