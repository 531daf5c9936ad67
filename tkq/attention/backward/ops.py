"""The gradients of attention: from torch tensors to a launch, and what PyTorch's compiler sees of it."""
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.arguments import PLAIN, Options, check_operands, check_options, refuse_out_of_range
from tkq.attention.backward.plan import plan, recipe
from tkq.attention.backward.spec import WIDTHS, BackwardSpec, width
from tkq.attention.common.layout import takes
from tkq.attention.common.operands import BackwardOperands, Gradients
from tkq.attention.forward.plan import length_class
from tkq.attention.wide.backward import launch as wide
from tkq.reference import attention_backward as reference_attention
from tkq.runtime import function
from tkq.runtime.call import check, dtypes, ops
from tkq.runtime.device import arch

# what decides the kernels (see launcher_of) -> (function, spec, configuration, SMs); as many as kinds of call
_launchers: dict = {}
OP = "attention_backward"


def attention_backward(tensors: tuple, sinks: Optional[Tensor] = None, options: tuple = PLAIN, *,
                       deterministic: bool = False, needs: tuple = (True, True, True, True)):
    """The gradients of ``flash_attn``, from what it took and gave.

    Args:
        tensors: (do, q, k, v, o, lse, dlse).
            do: the gradient of o. Where its strides do not suit TMA it is copied.
            q: (B, Sq, H, D), bfloat16 or float16. k: (B, Sk, Hk, D). v: (B, Sk, Hk, Dv). o: (B, Sq, H, Dv). D and Dv
            are multiples of 8 up to 256, or D = Dv up to 512. Strides as in ``flash_attn``.
            lse: (B, H, Sq) float32, of any strides. dlse: its gradient, likewise, or None.
        sinks: (H,) or None. options: a tuple, as ``Options``.
        deterministic: the same dq, bit for bit, in each run: blocks of keys add to it in a fixed order; with a softcap
            or a limit on the left, and with shared K/V heads above D 128, it is made by a kernel of its own, which
            computes the scores a second time, 7 products instead of 5. Without, dq is added up in varying order, but
            where D and Dv are up to 64, without shared K/V heads, a softcap or a limit on the left, and above D 256.
            dk and dv are the same in each run anyhow.
        needs: which of the four are wanted. The kernels make dk and dv in any case, and their memory is taken: without
            them, or with dsinks alone, a call takes no less time. Without dq it does.

    Returns:
        (dq, dk, dv, dsinks), contiguous, the first three of the inputs' dtype, the fourth (H,) of the sinks'; None for
        what is not wanted.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``flash_attn``; all name the argument.

    Source: Dao et al., FlashAttention, 2022, algorithm 4.
    """
    options, needs = Options(*options), (*needs[:3], bool(needs[3]) and sinks is not None)
    if not any(needs):
        return (None,) * 4
    if ops.direct(*tensors, sinks):
        return (_cuda if tensors[1].is_cuda else _cpu)(tensors, sinks, options, deterministic, needs)
    check.refuse_gradient(OP, **dict(zip(BackwardOperands._fields, tensors)), sinks=sinks)
    _check(tensors, sinks, options)
    return only(_op(*tensors, sinks, *options, deterministic, *needs), needs)


def only(found, needs):
    """None for the gradients that are not wanted."""
    return tuple(x if needed else None for x, needed in zip(found, needs))


# ---- what can be wrong -----------------------------------------------------------------------------


def _check(tensors, sinks, options):
    check_gradient_of(OP, tensors, sinks, options, 4)
    if options.left < -1 or options.right < -1:
        raise ValueError(f"{OP}: the window's sides are {(options.left, options.right)}, allowed are numbers of keys "
                         "from 0 on, and -1 for no limit")


def check_gradient_of(op, tensors, sinks, options, rank):
    """(do, q, k, v, o, lse, dlse), where q has ``rank`` dimensions, and what comes with them."""
    do, q, k, v, o, lse, dlse = tensors
    check_operands(op, q, k, v, sinks, rank)
    check_options(op, options)
    *batch, rows, heads, head_dim = q.shape
    if head_dim <= WIDTHS[-1]:
        width(head_dim, v.shape[-1])
    for name, x in (("o", o), ("do", do)):
        if not isinstance(x, Tensor) or x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {getattr(x, 'dtype', type(x).__name__)}, q is {q.dtype}; both must have "
                            "one dtype")
        check.shape(name, x, (*batch, rows, heads, v.shape[-1]))
    for name, x in (("lse", lse), ("dlse", dlse)):
        if name == "lse" or x is not None:
            check.dtype(name, x, ("fp32",))
            check.shape(name, x, (*batch, heads, rows))
    check.same_device(q=q, o=o, do=do, lse=lse, dlse=dlse)


def _check_layout(name, x):
    if not takes(x):
        raise ValueError(f"{OP}: {name}: strides are {x.stride()}, its address is {x.data_ptr():#x}; its last "
                         "dimension must be contiguous, its address and other strides multiples of 16 bytes: call "
                         ".clone(memory_format=torch.contiguous_format)")


def _check_all(tensors, sinks, options):
    """What ``_check`` does, and what TMA cannot take."""
    _check(tensors, sinks, options)
    for name, x in zip(("q", "k", "v", "o"), tensors[1:5]):
        _check_layout(name, x)


# ---- CUDA ------------------------------------------------------------------------------------------


def _cuda(tensors, sinks, options, deterministic, needs):
    """(dq, dk, dv, dsinks), None for what is not wanted."""
    do, q, k, v, *rest = tensors
    try:
        (batch, rows, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
        if not (batch and rows and heads and keys):
            _check(tensors, sinks, options)
            return _empty(tensors, sinks, needs)
        if heads % kv_heads:
            raise ValueError  # _check has the words
        refuse_out_of_range(options.softmax_scale, options.softcap)
        if not takes(do):
            _check_all(tensors, sinks, options)
            do = do.clone(memory_format=torch.contiguous_format)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if needs[0] else None
        dk = torch.empty(k.shape, dtype=q.dtype, device=q.device)
        dv = torch.empty(v.shape, dtype=q.dtype, device=q.device)
        of_rows = run((do, q, k, v, *rest), (dq, dk, dv), options, deterministic)
    except Exception:
        # The compiled function checks every dtype, shape, stride and address before it launches; the words for a user
        # are found only when something is wrong.
        _check_all(tensors, sinks, options)
        raise
    dsinks = reference_attention.sinks_gradient(sinks, rest[1], of_rows()) if needs[3] else None
    return dq, dk if needs[1] else None, dv if needs[2] else None, dsinks


def _empty(tensors, sinks, needs):
    """No queries, or no keys to see: nothing to launch."""
    _, q, k, v, _, lse, dlse = tensors
    zeros = [x.new_zeros(x.shape) if needed else None for x, needed in zip((q, k, v), needs)]
    if not needs[3]:
        return *zeros, None
    return *zeros, reference_attention.sinks_gradient(sinks, lse, torch.zeros_like(lse) if dlse is None else dlse)


def run(tensors: BackwardOperands, gradients: Gradients, options: Options = PLAIN, deterministic=False, config=None):
    """Launch the kernels into gradients (dq or None, dk, dv), from (do, q, k, v, o, lse, dlse), with no more checks
    than the compiled function makes.

    config: a BackwardConfig instead of the plan's: for tests and tuning.
    Returns a function that gives dlse - rowsum(o * do), (B, H, Sq) float32, and 0 for rows that see no key."""
    _, q, k, v, _, _, dlse = tensors
    batch, rows, heads, head_dim = q.shape
    if head_dim > WIDTHS[-1]:
        stats = wide.run(tensors, gradients, options, None, config)
        return lambda: stats[1]
    causal, scale, left, right, softcap = options
    index, keys = q.get_device(), k.shape[1]
    left, right = left if left < keys - 1 else -1, 0 if causal else right if right < rows - 1 else -1
    key = (q.dtype, head_dim, v.shape[3], left < 0, right < 0, softcap == 0.0, gradients[0] is None, dlse is None,
           deterministic, length_class(keys), index, config, heads // k.shape[2])
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = launcher_of(q.device, key)
    kernels, spec, config, num_sms = launcher
    floats = heads * config.workspace_floats(spec, rows) + k.shape[2] * config.dkv_partial_floats(spec, keys)
    workspace = torch.empty(batch * floats, dtype=torch.float32, device=q.device)
    kernels(tuple(tensors), tuple(gradients), workspace, None,
            (head_dim**-0.5 if scale is None else scale, softcap, left, right, num_sms))

    def of_rows():
        tiles = -(-rows // config.tile)
        stats = workspace[:2 * batch * heads * tiles * config.tile].view(batch, heads, tiles, 2, config.tile)
        return stats[:, :, :, 1].reshape(batch, heads, -1)[:, :, :rows]

    return of_rows


def launcher_of(device, key, **more):
    """(the compiled function, its spec and configuration, the device's SMs). key: as ``run`` makes it;
    more: of the spec."""
    arch.require_hopper(device)
    dtype, head_dim, head_dim_v, no_left, no_right, no_softcap, no_dq, no_dlse, deterministic, length = key[:10]
    spec = BackwardSpec(dtypes.name_of(dtype), width(head_dim, head_dim_v), not no_left, not no_right, not no_softcap,
                        not no_dq, not no_dlse, bool(deterministic), **more)
    config = key[11] or plan(spec, length, key[12])
    return function(recipe(spec, config)), spec, config, arch.num_sms(device)


# ---- CPU, tracing ----------------------------------------------------------------------------------


def _cpu(tensors, sinks, options, deterministic, needs):
    _check(tensors, sinks, options)
    causal, scale, left, right, softcap = options
    found = reference_attention.flash_attn_backward(*tensors, causal, scale, (left, right), softcap, sinks)
    return only((*found, None), needs)


# The op returns four tensors always: an empty one for what is not wanted.


def as_tensors(found, q):
    return tuple(q.new_empty(0) if x is None else x for x in found)


def like(tensors, sinks, needs):
    """As ``as_tensors``: new ones."""
    q, k, v = tensors[1:4]
    return tuple(x.new_empty(x.shape) if needed else q.new_empty(0) for x, needed in zip((q, k, v, sinks), needs))


def _from_flat(flat):
    """What ``_cuda`` takes, of the op's arguments."""
    return flat[:7], flat[7], Options(*flat[8:13]), flat[13], flat[14:]


# The one place where the arguments stand one by one: the op's schema is read off it.
def _op_cuda(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, dlse: Optional[Tensor],
             sinks: Optional[Tensor], causal: bool, softmax_scale: Optional[float], left: int, right: int,
             softcap: float, deterministic: bool, need_dq: bool, need_dk: bool, need_dv: bool,
             need_dsinks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(causal, softmax_scale, left, right, softcap)
    return as_tensors(_cuda((do, q, k, v, o, lse, dlse), sinks, options, deterministic,
                            (need_dq, need_dk, need_dv, need_dsinks)), q)


def _op_cpu(*flat):
    return as_tensors(_cpu(*_from_flat(flat)), flat[1])


def _op_fake(*flat):
    tensors, sinks, *_, needs = _from_flat(flat)
    return like(tensors, sinks, needs)


_op = ops.torch_op("flash_attn_backward", cuda=_op_cuda, cpu=_op_cpu, fake=_op_fake)
