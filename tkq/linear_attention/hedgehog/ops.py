"""tkq.hedgehog: what PyTorch sees of Hedgehog's attention."""
import torch
from torch import Tensor

from tkq.linear_attention.check import for_tma, lowered
from tkq.linear_attention.hedgehog.check import NAMES, OP, check_call, check_hedgehog_layouts, check_window
from tkq.linear_attention.hedgehog.gradients import Saved, backward
from tkq.linear_attention.hedgehog.launch import KEPT, Given, start
from tkq.reference import hedgehog as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache = CallCache()  # of `_forward`


def hedgehog(q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, linear_factor: Tensor,
             window_factor: Tensor, window_size: int = 64) -> Tensor:
    """Hedgehog's attention as LoLCATS has it: softmax attention within a window, linear attention before it, and one
    denominator. With f(x) = max(1e-6, (softmax(x W), softmax(-x W))) of each token and head, W the head's map,

        a[i, j] = window_factor * exp(q[i] k[j] / sqrt(D) - most[i])      for keys in the window
        a[i, j] = linear_factor * f(q[i]) f(k[j])                         for keys before it
        o[i] = sum over j of a[i, j] v[j] / (sum over j of a[i, j] + 1e-6)

    and most[i] the largest of the scores in the window. The window of a token is its own block of window_size tokens,
    up to itself, and the block before.

    Computed in chunks of 64 tokens: products in 16 bits, exponentials, sums and the state in float32. One launch; two
    for few long sequences, which are then computed in segments.

    Args:
        q, k, v: (B, S, H, D), bfloat16 or float16, D 64 or 128. S may be any length, also 0. The last dimension is
            contiguous; base and other strides are multiples of 16 bytes: slices of a packed tensor go in without a
            copy.
        q_map, k_map: (H, D, F), as q, F 32 or 64: a token has 2 F features.
        linear_factor, window_factor: (H,), float32: the parts' weights, usually from 0 to 1.
        window_size: 64; there is no other.

    Returns:
        o (B, S, H, D), contiguous, of q's dtype. NaN and infinities in v reach all tokens of their chunk of 64, those
        before them too.

    Raises:
        TypeError: q, k, v, q_map or k_map is no dense tensor of bf16 or fp16; linear_factor or window_factor is no
            dense tensor of fp32; window_size is no int; dtypes that differ.
        ValueError: window_size is outside 1 to 2^31 - 1; shapes that do not go together, devices that differ, strides
            or a base that TMA cannot take.
        NotImplementedError: a window_size other than 64, a D or F that is not supported; more than 65535 sequences or
            heads.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in all tensors; gradients are the same, bit for bit, in every run. They go through most, too:
    scores that are equally large share what it gets. Under torch.autocast q, k, v and the maps are cast.

    Source: Zhang et al., The Hedgehog and the Porcupine, 2024; Zhang et al., LoLCATS, 2024. CPU tensors take
    ``tkq.reference.hedgehog``, by the same rules.

    Example::

        q, k, v = torch.randn(3, 2, 256, 4, 128, device="cuda", dtype=torch.bfloat16)
        q_map, k_map = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) / 8
        window = torch.full((4,), 0.9, device="cuda")
        o = tkq.hedgehog(q, k, v, q_map, k_map, 1 - window, window)  # (2, 256, 4, 128) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, k, v, q_map, k_map = lowered(q, k, v, q_map, k_map)
    given = q, k, v, q_map, k_map, linear_factor, window_factor
    if not traced:
        found = _call_cache.take(*given, window_size, False)
        if found is not None:
            return found[0]
    check_window(window_size)
    mode = ops.route(*given)
    if mode == "direct":
        return (_forward if q.is_cuda else _cpu)(*given, window_size, False)[0]
    if mode == "record":
        return _Recorded.apply(*given, window_size, True)
    check.refuse_tangent(OP, **dict(zip(NAMES, given)))
    check_call(*given)  # the dispatcher's words name no argument
    # a traced program runs with and without gradients: it keeps none, and the backward makes them anew
    keep = torch.is_grad_enabled() and not torch.jit.is_tracing() and any(x.requires_grad for x in given)
    return _op(*given, window_size, keep)[0]


def _forward(q, k, v, q_map, k_map, linear_factor, window_factor, window_size, keep):
    """`launch.Made`, of CUDA tensors. keep: features, for gradients."""
    given = q, k, v, q_map, k_map, linear_factor, window_factor
    check_call(*given)
    check_hedgehog_layouts(*given[:5])
    made, call = start(Given(*given[:5], linear_factor.contiguous(), window_factor.contiguous()), keep)
    if call is not None:
        _call_cache.add((*given, window_size, keep), *call, tuple(made))
    return tuple(made)


def _cuda(q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, linear_factor: Tensor, window_factor: Tensor,
          window_size: int, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = q, k, v, q_map, k_map, linear_factor, window_factor, window_size, keep
    found = _call_cache.take(*given)
    if found is None:
        check_window(window_size)  # of the dispatcher, where no public function has looked at it
        found = _forward(*given)
    return tuple(_none_of(q) if x is None else x for x in found)


def _none_of(q):
    """No features."""
    return q.new_empty(*q.shape[:3], 0)


def _cpu(q, k, v, q_map, k_map, linear_factor, window_factor, window_size, keep):
    given = q, k, v, q_map, k_map, linear_factor, window_factor
    check_call(*given)
    check_hedgehog_layouts(*given[:5])
    o, inverse = reference.outputs(*given)
    return (o.to(q.dtype).contiguous(), inverse.contiguous(), reference.largest_scores(q, k).contiguous(),
            *(_none_of(q) for _ in range(2)))


def _fake(q, k, v, q_map, k_map, linear_factor, window_factor, window_size, keep):
    check_call(q, k, v, q_map, k_map, linear_factor, window_factor)
    kept = 2 * KEPT * (keep and q_map.shape[2] == KEPT and q.is_cuda)
    return (q.new_empty(q.shape), *(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2)),
            *(q.new_empty(*q.shape[:3], kept) for _ in range(2)))


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_cuda(do: Tensor, o: Tensor, inverse: Tensor, most: Tensor, q_features: Tensor, k_features: Tensor,
                   q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, linear_factor: Tensor,
                   window_factor: Tensor, needs: list[bool]
                   ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty ones for what is not wanted."""
    given = q, k, v, q_map, k_map, linear_factor, window_factor
    saved = Saved(o, inverse, most, q_features, k_features, *given)
    return _as(backward(for_tma(do), saved, tuple(needs)), given, needs)


def _backward_cpu(do, o, inverse, most, q_features, k_features, *given):
    *given, needs = given
    return _as(reference.hedgehog_backward(do, *reference.outputs(*given), *given), given, needs)  # o, not rounded


def _as(found, given, needs):
    """Gradients in the types of what they are of."""
    return tuple(x.to(of.dtype).contiguous() if needed else of.new_empty(0)
                 for x, of, needed in zip(found, given, needs))


def _backward_fake(do, o, inverse, most, q_features, k_features, *given):
    *given, needs = given
    return tuple(of.new_empty(of.shape if needed else 0) for of, needed in zip(given, needs))


_backward_op = ops.torch_op("hedgehog_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:len(NAMES)])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _record(ctx, *given):
    """The op in plain eager mode, past the dispatcher."""
    found = (_cuda if given[0].is_cuda else _cpu)(*given)
    _setup(ctx, given, found)
    return found[0]


def _back(ctx, do, *of_numbers):
    needs = list(ctx.needs_input_grad[:len(NAMES)])
    if do is None:
        return (None,) * (len(NAMES) + 2)
    tensors, call = (do, *ctx.saved_tensors), _backward_op
    if ops.direct(*tensors):
        call = _backward_cuda if do.is_cuda else _backward_cpu
    found = call(*tensors, needs)
    return *(x if needed else None for x, needed in zip(found, needs)), None, None


_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back)
_Recorded = ops.eager_function("Hedgehog", forward=_record, backward=_back, of=OP)
