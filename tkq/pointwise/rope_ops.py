"""tkq.rope and tkq.rope_qk: from torch tensors to a launch, forward and backward."""
from typing import Optional

import torch
from torch import Tensor

from ..reference import pointwise as reference
from ..runtime.call import alloc, check, ops
from .rope_check import Rotation, check_call, check_longest, offsets, options
from .rope_launch import call_cache, launch, launch_simple


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, seqlen_offsets: int | Tensor = 0,
         position_ids: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None, max_seqlen: Optional[int] = None,
         inplace: bool = False) -> Tensor:
    """Rotary position embedding (Su et al., RoFormer, 2021): pairs (a, b) of the first R columns of every head become
    (a cos - b sin, b cos + a sin), with the cos and sin of the token's position.

    Computed in float32 and rounded once. Differentiable once, in x: the gradient rotates back.

    Args:
        x: (B, S, H, D), or (total, H, D) with cu_seqlens or position_ids; bf16, fp16 or fp32. The last dimension is
            contiguous, the others may have any strides: q or k sliced from a packed qkv is read in place.
        cos, sin: (rows, R / 2), R even and at most D; bf16, fp16 or fp32, not necessarily x's type. Row p holds the
            angles of position p: ``rope_cos_sin`` makes them. Or (B, S, R / 2) or (1, S, R / 2), a row for each token
            (transformers' tables, whose halves are equal, as cos[..., :R // 2]); then no other argument names
            positions.
        interleaved: columns 2 i and 2 i + 1 are a pair (GPT-J); otherwise i and i + R / 2 (GPT-NeoX, Llama).
        seqlen_offsets: the position of a sequence's first token: an integer, or (B,) int32 or int64.
        position_ids: the position of each token, (B, S), (1, S), (S,) or (total,), int32 or int64. Any values.
        cu_seqlens: (B + 1,) int32, contiguous: sequence b is the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1 of x
            (total, H, D). Tokens of no sequence are copied. Where it falls, a token belongs to the sequence that a
            binary search for it ends at, if that has it, and is copied if not; on the CPU and the GPU alike.
        max_seqlen: with cu_seqlens: the longest sequence, if known. Then the table's length is checked.
        inplace: write to x and return it. Columns beyond R are not touched. Autograd follows as for any in-place
            operation; under torch.compile and functorch the result is computed apart and copied.

    Returns:
        A contiguous tensor of x's shape and type, columns beyond R copied; or x. Where a position from a tensor (or
        from cu_seqlens) has no row in the table, also a negative one, the result is NaN, and so is the gradient: the
        values are on the GPU, and not looked at before. Nothing outside the table is read.

    Raises:
        TypeError: x, cos or sin is no dense tensor of bf16, fp16 or fp32; interleaved or inplace is no bool;
            seqlen_offsets is no int or tensor of int32 or int64; position_ids is no dense tensor of int32 or int64;
            cu_seqlens is no dense tensor of int32; max_seqlen is no int.
        ValueError: seqlen_offsets or max_seqlen is outside 0 to 2^31 - 1; shapes or devices that do not match, a last
            dimension that is not contiguous, a table too short for S and an integer offset, arguments that contradict
            each other.
        NotImplementedError: a gradient asked for cos or sin, R above 4096, more than 2^31 - 2^20 units of work.
        RuntimeError: a GPU other than Hopper; inplace where autograd allows no writing over x: a leaf, or a view that
            split, chunk or unbind returned, where a gradient is recorded.

    Example::

        cos, sin = tkq.rope_cos_sin(2048, 64, device="cuda")
        x = torch.randn(2, 128, 8, 64, device="cuda", dtype=torch.bfloat16)
        y = tkq.rope(x, cos, sin)  # (2, 128, 8, 64) bfloat16
        y = tkq.rope(x, cos, sin, seqlen_offsets=500)  # (2, 128, 8, 64) bfloat16
    """
    if position_ids is cu_seqlens is max_seqlen is None and type(seqlen_offsets) is int:  # most calls
        cos, sin = _rows_of_all(x, cos, sin, seqlen_offsets)
        if not ops.traced():
            found = call_cache.take(x, None, cos, sin, seqlen_offsets, interleaved, False, inplace)
            if found is not None:
                if inplace:
                    torch.autograd.graph.increment_version(x)
                return found[0]
        interleaved, inplace = options["rope"](interleaved, inplace)
        rotation, mode = (cos, sin, seqlen_offsets, None, None, None, interleaved, False), ops.route(x, cos, sin)
    else:
        interleaved, inplace = options["rope"](interleaved, inplace)
        rotation = _rotation("rope", cos, sin, interleaved, seqlen_offsets, position_ids, cu_seqlens, max_seqlen)
        mode = ops.route(x, cos, sin, rotation[3], position_ids, cu_seqlens)
    if mode == "direct":
        return _in_place(x, rotation) if inplace else _forward(x, rotation)
    if mode == "record" and not (cos.requires_grad or sin.requires_grad):
        if inplace:
            check.refuse_leaf("rope", x=x)
            check.refuse_view("rope", x=x)
        return (_InPlaceFunction if inplace else _Function).apply(x, rotation)
    check.refuse_gradient("rope", cos=cos, sin=sin)
    check.refuse_tangent("rope", x=x)
    check_call((x,), Rotation(*rotation))
    if not inplace:
        return _op(x, *rotation)
    if not ops.traced():  # there torch copies, and says so itself
        check.refuse_overlap("rope", x=x)
    return x.copy_(_op(x, *rotation))


def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False,
            seqlen_offsets: int | Tensor = 0, position_ids: Optional[Tensor] = None,
            cu_seqlens: Optional[Tensor] = None, max_seqlen: Optional[int] = None) -> tuple[Tensor, Tensor]:
    """(rope(q), rope(k)) in one launch: the queries and keys of the same tokens.

    Args:
        q, k: (B, S, H, D) and (B, S, Hk, D), or (total, H, D) and (total, Hk, D), of one type.
        All others, and what is returned: as in ``rope``.

    Raises:
        TypeError: q, k, cos or sin is no dense tensor of bf16, fp16 or fp32; interleaved is no bool; seqlen_offsets is
            no int or tensor of int32 or int64; position_ids is no dense tensor of int32 or int64; cu_seqlens is no
            dense tensor of int32; max_seqlen is no int.
        ValueError: seqlen_offsets or max_seqlen is outside 0 to 2^31 - 1; shapes or devices that do not match, a last
            dimension that is not contiguous, a table too short for S and an integer offset, arguments that contradict
            each other.
        NotImplementedError, RuntimeError: as ``rope``.

    Example::

        cos, sin = tkq.rope_cos_sin(2048, 64, device="cuda")
        q = torch.randn(2, 128, 8, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(2, 128, 2, 64, device="cuda", dtype=torch.bfloat16)
        q, k = tkq.rope_qk(q, k, cos, sin)  # (2, 128, 8, 64) bfloat16; (2, 128, 2, 64) bfloat16
    """
    if position_ids is cu_seqlens is max_seqlen is None is not k and type(seqlen_offsets) is int:
        cos, sin = _rows_of_all(q, cos, sin, seqlen_offsets)
        if not ops.traced():
            found = call_cache.take(q, k, cos, sin, seqlen_offsets, interleaved, False, False)
            if found is not None:
                return found
        interleaved = options["rope_qk"](interleaved)
        rotation, mode = (cos, sin, seqlen_offsets, None, None, None, interleaved, False), ops.route(q, k, cos, sin)
    else:
        check.tensor("rope_qk: k", k)
        interleaved = options["rope_qk"](interleaved)
        rotation = _rotation("rope_qk", cos, sin, interleaved, seqlen_offsets, position_ids, cu_seqlens, max_seqlen)
        mode = ops.route(q, k, cos, sin, rotation[3], position_ids, cu_seqlens)
    if mode == "direct":
        return _forward_qk(q, k, rotation)
    if mode == "record" and not (cos.requires_grad or sin.requires_grad):
        return _QKFunction.apply(q, k, rotation)
    check.refuse_gradient("rope_qk", cos=cos, sin=sin)
    check.refuse_tangent("rope_qk", q=q, k=k)
    check_call((q, k), Rotation(*rotation))
    return _qk_op(q, k, *rotation)


def _rows_of_all(x, cos, sin, offset):
    """Tables (1, S, R / 2) of x (B, S, H, D), a row for each token of any sequence, as (S, R / 2), whose row p is of
    position p: calls with these take the host a third of the time (without a GPU; docs/attempts.md)."""
    if (type(x) is type(cos) is type(sin) is Tensor and cos.dim() == 3 and offset == 0 and x.dim() == 4
            and cos.layout is sin.layout is torch.strided and not (x.is_nested or cos.is_nested or sin.is_nested)
            and cos.shape == sin.shape and cos.shape[0] == 1 and cos.shape[1] == x.shape[1]):
        return cos[0], sin[0]
    return cos, sin


def _rotation(op, cos, sin, interleaved, seqlen_offsets, position_ids, cu_seqlens, max_seqlen):
    offset, starts = offsets[op](seqlen_offsets), None
    if type(offset) is not int and isinstance(offset, Tensor):  # the first question is the fast one
        offset, starts = 0, offset
    if max_seqlen is not None:
        check.tensor("cos", cos)
        max_seqlen = check_longest(op, max_seqlen, cu_seqlens)
        if cos.dim() > 1 and offset + max_seqlen > cos.shape[-2]:
            raise ValueError(f"{op}: cos: has {cos.shape[-2]} rows; max_seqlen {max_seqlen} from offset {offset} needs "
                             f"{offset + max_seqlen}")
    return cos, sin, offset, starts, position_ids, cu_seqlens, interleaved, False  # a Rotation, without its cost


def _empty(rotation, *tensors):
    """A contiguous tensor like each. What is not dense has none: `check_call` has the words for it."""
    try:
        return [alloc.like(x, x.get_device(), x.dtype) for x in tensors]
    except Exception:
        check_call(tensors, Rotation(*rotation))
        raise


def _replayed(x, x2, rotation):
    """(out, out2) of a call of the simple kind that came before; or None."""
    cos, sin, offset, offsets, ids, starts, interleaved, inverse = rotation
    simple = offsets is ids is starts is None
    return call_cache.take(x, x2, cos, sin, offset, interleaved, inverse, False) if simple else None


def _forward(x, rotation):
    if not x.is_cuda:
        check_call((x,), Rotation(*rotation))
        return reference.rope(x, *rotation)
    found = launch_simple(rotation, x)
    if found is not None:
        return found[0]
    out, = _empty(rotation, x)
    launch(rotation, x, out)
    return out


def _forward_qk(q, k, rotation):
    if not q.is_cuda:
        check_call((q, k), Rotation(*rotation))
        return reference.rope(q, *rotation), reference.rope(k, *rotation)
    out = launch_simple(rotation, q, k)
    if out is None:
        out = tuple(_empty(rotation, q, k))
        launch(rotation, q, out[0], k, out[1])
    return out


def _in_place(x, rotation):
    if not x.is_cuda:
        check_call((x,), Rotation(*rotation))
        check.refuse_inference("rope", x=x)
        check.refuse_overlap("rope", x=x)
        return x.copy_(reference.rope(x, *rotation))
    check.refuse_inference("rope", x=x)
    if launch_simple(rotation, x, in_place=True) is None:
        check.refuse_overlap("rope", x=x)
        columns_ = 2 * rotation[0].shape[-1]
        rotated = x if columns_ >= x.shape[-1] else x[..., :columns_]  # more columns than there are: refused by name
        launch(rotation, rotated, rotated)
    torch.autograd.graph.increment_version(x)
    return x


# ---- what PyTorch sees ---------------------------------------------------------------------------------------------


def _remember(ctx, rotation):
    cos, sin, offset, offsets, ids, starts, interleaved, inverse = rotation
    ctx.save_for_backward(cos, sin, offsets, ids, starts)
    ctx.facts = offset, interleaved, inverse
    ctx.set_materialize_grads(False)  # where only q was used, nothing is rotated for k


def _back(ctx):
    """The rotation the other way, as a plain tuple."""
    cos, sin, offsets, ids, starts = ctx.saved_tensors
    offset, interleaved, inverse = ctx.facts
    return cos, sin, offset, offsets, ids, starts, interleaved, not inverse


def _contiguous(dy):
    if dy.stride(-1) == 1:
        return dy
    return dy.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a tensor of no elements as it is


def _rotated(dy, rotation):
    dy = _contiguous(dy)
    return _forward(dy, rotation) if ops.direct(dy, *rotation[:2], *rotation[3:6]) else _op(dy, *rotation)


def _gradient(ctx, dy):
    return None if dy is None else _rotated(dy, _back(ctx))


def _gradients(ctx, dq, dk):
    rotation, needs = _back(ctx), ctx.needs_input_grad[:2]
    need_q, need_k = needs[0] and dq is not None, needs[1] and dk is not None
    if need_q and need_k:
        dq, dk = _contiguous(dq), _contiguous(dk)
        direct = ops.direct(dq, dk, *rotation[:2], *rotation[3:6])
        return _forward_qk(dq, dk, rotation) if direct else _qk_op(dq, dk, *rotation)
    return [_rotated(dy, rotation) if needed else None for dy, needed in ((dq, need_q), (dk, need_k))]


# In plain eager mode: inputs are x, or q and k, and the rotation.


def _record(ctx, x, rotation):
    _remember(ctx, rotation)
    return _op_forward(x, *rotation)


def _record_in_place(ctx, x, rotation):
    ctx.mark_dirty(x)
    _remember(ctx, rotation)
    return _in_place(x, rotation)


def _record_qk(ctx, q, k, rotation):
    _remember(ctx, rotation)
    return _op_forward_qk(q, k, *rotation)


def _recorded_backward(ctx, dy):
    return _gradient(ctx, dy), None


def _recorded_backward_qk(ctx, dq, dk):
    return *_gradients(ctx, dq, dk), None


# The ops: a rotation's fields are inputs.


def _setup(ctx, inputs, output):
    _remember(ctx, inputs[-len(Rotation._fields):])


def _backward(ctx, dy):
    return _gradient(ctx, dy), *[None] * len(Rotation._fields)


def _backward_qk(ctx, dq, dk):
    return *_gradients(ctx, dq, dk), *[None] * len(Rotation._fields)


def _op_forward(x: Tensor, cos: Tensor, sin: Tensor, offset: int, offsets: Optional[Tensor],
                position_ids: Optional[Tensor], cu_seqlens: Optional[Tensor], interleaved: bool,
                inverse: bool) -> Tensor:
    rotation = cos, sin, offset, offsets, position_ids, cu_seqlens, interleaved, inverse
    found = _replayed(x, None, rotation)
    return _forward(x, rotation) if found is None else found[0]


def _op_forward_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, offset: int, offsets: Optional[Tensor],
                   position_ids: Optional[Tensor], cu_seqlens: Optional[Tensor], interleaved: bool,
                   inverse: bool) -> tuple[Tensor, Tensor]:
    rotation = cos, sin, offset, offsets, position_ids, cu_seqlens, interleaved, inverse
    return _replayed(q, k, rotation) or _forward_qk(q, k, rotation)


def _fake(x, *rotation):
    check_call((x,), Rotation(*rotation))
    return x.new_empty(x.shape)


def _fake_qk(q, k, *rotation):
    check_call((q, k), Rotation(*rotation))
    return q.new_empty(q.shape), k.new_empty(k.shape)


_op = ops.torch_op("rope", cuda=_op_forward, cpu=_op_forward, fake=_fake, setup=_setup, backward=_backward)
_qk_op = ops.torch_op("rope_qk", cuda=_op_forward_qk, cpu=_op_forward_qk, fake=_fake_qk, setup=_setup,
                      backward=_backward_qk)
_Function = ops.eager_function("Rope", forward=_record, backward=_recorded_backward, of="rope")
_InPlaceFunction = ops.eager_function("RopeInPlace", forward=_record_in_place, backward=_recorded_backward, of="rope")
_QKFunction = ops.eager_function("RopeQK", forward=_record_qk, backward=_recorded_backward_qk, of="rope_qk")
