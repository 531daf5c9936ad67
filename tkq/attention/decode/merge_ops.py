"""tkq.merge_state: what PyTorch sees."""
from torch import Tensor

from tkq.attention.decode import launch
from tkq.reference import decode as reference
from tkq.runtime import arguments
from tkq.runtime.call import check, ops

OP = "merge_state"
MOST = 1 << 34  # elements, of which a thread has 8
_tensors = arguments.checker(OP, "o_a", "lse_a", "o_b", "lse_b")


def merge_state(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of two partial results together, which have no key in common: a shared prefix and the
    rest, two chunks, two GPUs. As flash_attn's ``return_lse`` gives them.

    Args:
        o_a, o_b: (B, S, H, D) or (S, H, D), bf16, fp16 or fp32, D a multiple of 8. Rows of 16-byte multiples,
            contiguous along D, go in as they lie; others are copied first.
        lse_a, lse_b: (B, H, S) or (H, S) float32, natural logarithm, of any strides: those of (S, H) as ``lse.mT``.

    Returns:
        (o, lse), contiguous. A part whose lse is -inf counts for nothing, whatever its o is; where both are, o is 0 and
        lse -inf.

    Raises:
        TypeError: o_a or o_b is no dense tensor of bf16, fp16 or fp32; lse_a or lse_b is no dense tensor of fp32;
            dtypes that differ.
        ValueError: shapes that do not go together, devices that differ.
        NotImplementedError: a D that is no multiple of 8; 2^34 elements, and more; a tensor that requires a gradient,
            with gradients enabled: there is none.
        RuntimeError: a GPU other than Hopper.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018. CPU tensors take
    ``tkq.reference.decode``, by the same rules.

    Example::

        q = torch.randn(1, 4, 8, 64, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 1, 100, 8, 64, device="cuda", dtype=torch.bfloat16)
        parts = [tkq.flash_attn(q, k[:, s], v[:, s], return_lse=True) for s in (slice(60), slice(60, 100))]
        o, lse = tkq.merge_state(*parts[0], *parts[1])  # (1, 4, 8, 64) bfloat16; (1, 8, 4) float32
    """
    if ops.direct(o_a, lse_a, o_b, lse_b):
        return (_run if o_a.is_cuda else _run_cpu)(o_a, lse_a, o_b, lse_b)
    check.refuse_gradient(OP, o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    _look(o_a, lse_a, o_b, lse_b)  # the dispatcher's words name no argument
    return _op(o_a, lse_a, o_b, lse_b)


def _look(o_a, lse_a, o_b, lse_b):
    _tensors(o_a, lse_a, o_b, lse_b)
    check.rank(f"{OP}: o_a", o_a, 3, 4)
    check.shape(f"{OP}: o_b", o_b, tuple(o_a.shape))
    if o_b.dtype != o_a.dtype:
        raise TypeError(f"{OP}: o_b is {o_b.dtype}, o_a is {o_a.dtype}; both must have one dtype")
    *batch, S, H, D = o_a.shape
    check.shape(f"{OP}: lse_a", lse_a, (*batch, H, S))
    check.shape(f"{OP}: lse_b", lse_b, (*batch, H, S))
    if D % 8:
        raise NotImplementedError(f"{OP}: o_a has rows of {D}, supported are multiples of 8")
    if o_a.numel() >= MOST:
        raise NotImplementedError(f"{OP}: o_a has {o_a.numel()} elements, supported are fewer than 2^34")
    check.same_device(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)


def _run(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _look(o_a, lse_a, o_b, lse_b)
    return launch.merge(o_a, lse_a, o_b, lse_b)


def _run_cpu(o_a, lse_a, o_b, lse_b):
    _look(o_a, lse_a, o_b, lse_b)
    found = _empty(o_a, lse_a)
    if not o_a.is_meta:  # which has no numbers to look at
        for x, y in zip(found, reference.merge_state(o_a, lse_a, o_b, lse_b), strict=True):
            x.copy_(y)
    return found


def _empty(o, lse):
    return o.new_empty(o.shape), lse.new_empty(lse.shape)


def _fake(o_a, lse_a, o_b, lse_b):
    _look(o_a, lse_a, o_b, lse_b)
    return _empty(o_a, lse_a)


_op = ops.torch_op(OP, cuda=_run, cpu=_run_cpu, fake=_fake)
