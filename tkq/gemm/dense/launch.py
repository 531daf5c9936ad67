"""From torch tensors to a launch of a GEMM: which kernel, by way of a short key; and what can be wrong with a call."""
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ...runtime import arguments, function
from ...runtime.call import alloc, check, counters, dtypes, memory
from ...runtime.call.ops import LaunchCache
from ...runtime.call.replay import CallCache
from ...runtime.device import arch
from .. import tuned
from ..epilogue.spec import GATED, Epilogue, is_located, name_of
from ..epilogue.spec import PLAIN as PLAIN_EPILOGUE
from . import realigned
from .plan import planned_kernel, takes_counter
from .spec import OUT_DTYPES, GemmSpec, is_k_major
from .stored import CONFIGS

_tensors = arguments.checker("gemm", "a", "b", "bias")
_operands = arguments.checker("gemm", "a", "b", "bias", "c", "out")
_numbers, _out_dtype = arguments.checker("gemm", "alpha", "beta"), arguments.checker("gemm", "out_dtype")

# What a call without an out looks like -> its kernel and blocks, the result's shape, strides and dtype: in front of all
# that follows here. A kernel checks what is not in the key: b's device, and all of the bias but its dtype.
_launch_cache = LaunchCache()
# of `quick`, of kernels without and with a counter
call_cache, wave_sync_call_cache = CallCache(), CallCache(by_stream=True)
# and one with an out -> its kernel and blocks, and how many bytes a, b, bias, c and out span
_launch_cache_into = LaunchCache()


class Extra(NamedTuple):
    """A product's epilogue: activation(alpha * a @ b + beta * c + bias). activation: a name of ``epilogue``."""

    bias: Optional[Tensor] = None
    activation: str = ""
    c: Optional[Tensor] = None
    alpha: float = 1.0
    beta: float = 0.0


PLAIN = Extra()


class WaveSyncLaunch(NamedTuple):
    """A kernel with wave sync: its blocks wait for each other by a counter of the stream that it runs on, in the place
    of a bias."""

    kernel: Callable

    def __call__(self, a, b, out, bias, *more):
        """Returns the counter."""
        counter = counters.counter(a.get_device())
        self.kernel(a, b, out, counter, *more)
        return counter


def extra_of(bias, activation, c, alpha, beta) -> Extra:
    """An Extra; PLAIN itself where there is nothing in it."""
    plain = bias is None and c is None and not activation and alpha == 1.0 and beta == 0.0
    return PLAIN if plain else Extra(bias, activation, c, alpha, beta)


def quick(a, b, bias, activation, c, alpha, beta, out_dtype):
    """(the result in a new tensor, None), or (None, what the call looks like), where that has not been seen before."""
    index = a.get_device()
    key = (index, a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
           out_dtype, activation, bias is not None and bias.dtype,
           c is not None and (c.dtype, c.shape, c.stride(), c.data_ptr() & 15), alpha == 1.0 or _varies(alpha),
           beta == 1.0, beta == 0.0 or (beta != 1.0 and _varies(beta)))
    known = _launch_cache.get(key)
    if known is None:
        return None, key
    kernel, blocks, shape, stride, dtype = known
    out = alloc.empty(index, shape, stride, dtype)
    counter = kernel(a, b, out, bias, c, alpha, beta, blocks)
    given = a, b, bias, activation, c, alpha, beta, out_dtype
    if isinstance(kernel, WaveSyncLaunch):
        wave_sync_call_cache.add(given, kernel.kernel, (a, b, out, counter, c, alpha, beta, blocks), out,
                                 constants=(counter,))
    else:
        call_cache.add(given, kernel, (a, b, out, bias, c, alpha, beta, blocks), out)
    return out, None


def _varies(x) -> bool:
    """Of an alpha or a beta that the kernel is given: False, for the key. ValueError, without words, where it may not
    go to a launch: ``check_call`` has the words."""
    if not -check.FLOAT32_END < x < check.FLOAT32_END:
        raise ValueError
    return False


def quick_into(out, a, b, out_dtype, extra):
    """None where out has been written; else what the call looks like, if such a one has not been seen before or out may
    lie where an input does, c itself aside."""
    bias, activation, c, alpha, beta = extra
    first, at_a, at_b = out.data_ptr(), a.data_ptr(), b.data_ptr()
    key = (a.get_device(), a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride(), at_a & 15, at_b & 15, out.dtype,
           out.shape, out.stride(), first & 15, out_dtype, activation, bias is not None and bias.dtype,
           c is not None and (c.dtype, c.shape, c.stride(), c.data_ptr() & 15), alpha == 1.0 or _varies(alpha),
           beta == 1.0, beta == 0.0 or (beta != 1.0 and _varies(beta)))
    known = _launch_cache_into.get(key)
    if known is None:
        return key
    kernel, blocks, of_a, of_b, of_bias, of_c, size = known
    end = first + size
    if (at_a < end and first < at_a + of_a) or (at_b < end and first < at_b + of_b):
        return key
    if bias is not None and bias.data_ptr() < end and first < bias.data_ptr() + of_bias:
        return key
    if c is not None and c.data_ptr() < end and first < c.data_ptr() + of_c and not memory.same_place(c, out):
        return key
    kernel(a, b, out, bias, c, alpha, beta, blocks)
    return None


def remember_into(key, launched, out, a, b, extra) -> None:
    """launched: what ``run`` gave."""
    if launched is not None:
        spans = [0 if x is None else memory.span(x) for x in (a, b, extra.bias, extra.c, out)]
        _launch_cache_into.add(key, (*launched, *spans))


def clear() -> None:
    """All kernels of earlier calls."""
    _launch_cache.clear()
    call_cache.clear()
    wave_sync_call_cache.clear()
    _launch_cache_into.clear()
    _launcher.cache_clear()


def run(a, b, out, config=None, blocks=None, *, accumulate=False, writable_padding=False, loose=False, extra=PLAIN,
        key=None):
    """out = a @ b and its epilogue, with no more checks than the compiled function makes. out: its rows are contiguous,
    their pitch is free. All matrices, or all with a batch in front. K is any number from 8 on (from 1 on where it is
    contiguous in neither a nor b); where it is not a multiple of 8, what follows a row of K numbers, up to 16 bytes, is
    zero.

    accumulate: out += a @ b, see GemmSpec. writable_padding: what follows a row of out, up to 16 bytes, may be
    overwritten: with zeros, or added to. loose: K is no multiple of 8, and anything follows a row of K numbers.
    key: what ``quick`` will know the call by. For tests and tuning: a Config and a number of blocks (at most; at least
    a cluster) instead of the plan's.

    Returns the kernel and its blocks; None where it took other views of a or b than these."""
    x, y, kind = kind_of(a, b, out, accumulate, writable_padding, extra, loose)
    if config or kind[2][2]:  # or TMA takes both operands
        kernel, planned = _launcher(kind, config)
    else:
        kernel, planned = _behind_copies(x, y, out, kind, extra, loose)
    kernel(x, y, out, extra.bias, extra.c, extra.alpha, extra.beta, blocks or planned)
    if x is not a or y is not b:
        return None
    if key is not None:
        _launch_cache.add(key, (kernel, planned, tuple(out.shape), out.stride(), out.dtype))
    return kernel, planned


def kind_of(a, b, out, accumulate, writable_padding, extra, loose=False):
    """(a, b as the kernel gets them, what decides on it: the arguments of ``spec_of`` and the device)."""
    batch, epilogue = (), ()
    if a.dim() == 3:
        a, b, batch = _batched(a, b)
    *_, m, k = a.shape
    *_, a_m, a_k = a.stride()
    *_, b_k, b_n = b.stride()
    n, size = b.shape[-1], out.element_size()
    a_is_k, b_is_k = is_k_major(m, a_m, a_k), is_k_major(n, b_n, b_k)
    if a_is_k is None or b_is_k is None or a.device != b.device:
        raise ValueError("gemm: a and b must be contiguous in one dimension, and on one device")
    fits = realigned.fits(a, b, out, (a_is_k, b_is_k), writable_padding, loose)
    load = fits.a and fits.b
    if extra is not PLAIN:
        epilogue = _epilogue(extra, size)
        load = load and realigned.gate_fits(extra.activation, b_is_k, n)
    ways = a_is_k, b_is_k, load, load and fits.out, accumulate
    return a, b, (a.dtype, out.dtype, ways, (m, n, k, *batch), epilogue, a.device)


def _behind_copies(a, b, out, kind, extra, loose):
    """(kernel, blocks) behind copies of what TMA does not take, where those are worth their time."""
    majors = kind[2][:2]
    around = realigned.around(realigned.fits(a, b, out, majors, False, loose), kind)
    if around is None:
        return _launcher(kind, None)
    copies, kind = copied(a, b, out, majors, around, extra)
    kernel, blocks = _launcher(kind, None)
    return realigned.Realigned(kernel, copies), blocks


def copied(a, b, out, majors, around, extra):
    """(the copies of a product's operands, what decides on the kernel behind them)."""
    copies = realigned.Copies.of(a, b, majors, around)
    x, y = copies.samples(a, b)
    if out.dim() == 3:  # one that all of a batch share
        x, y = (t if t.dim() == 3 else t.expand(out.shape[0], *t.shape) for t in (x, y))
    *_, kind = kind_of(x, y, out, False, False, extra)
    return copies, kind


def _batched(a, b):
    """(a, b, (batches, which of a and b have them)): an operand that all of a batch share becomes a matrix."""
    batches, which = a.shape[0], "ab"
    if batches > 1 and a.stride(0) == 0 and b.stride(0):
        which, a = "b", a[0]
    elif batches > 1 and b.stride(0) == 0:
        which, b = "a", b[0]
    return a, b, (batches, which)


def _epilogue(extra, size) -> tuple:
    """What of it decides on the kernel: the arguments of ``Epilogue``, its bias's dtype as torch has it."""
    bias, activation, c, alpha, beta = extra
    if c is None:
        return activation, bias if bias is None else bias.dtype, False, False, alpha != 1.0, False
    even = not (c.shape[-1] % 2 or c.stride(-2) % 2 or (c.dim() == 3 and c.stride(0) % 2))
    pairs = even and c.data_ptr() % (2 * size) == 0
    return activation, bias if bias is None else bias.dtype, True, pairs, alpha != 1.0, beta != 1.0


@lru_cache(4096)
def _launcher(kind, config):
    """(kernel, blocks) for a kind of call: the cache in front of planning and of the table of kernels. config: None for
    what ``tkq.tune`` found or else the plan's."""
    *facts, device = kind
    arch.require_hopper(device)
    spec, sizes, batches = spec_of(*facts)
    if config is None:
        config = tuned.chosen(CONFIGS, spec, (*sizes, batches), device)
    recipe, blocks = planned_kernel(spec, *sizes, arch.num_sms(device), config, batches)
    kernel = function(recipe)
    return (WaveSyncLaunch(kernel) if takes_counter(recipe) else kernel), blocks


def spec_of(dtype, out, ways, size, epilogue):
    """(spec, (M, N, K), batches) of a kind of call.

    ways: is K contiguous in a, in b; do the operands come, does the result go by TMA; accumulate. size: M, N, K and,
    with a batch, how many and which operands have it. epilogue: see ``_epilogue``, () for a plain one."""
    e = PLAIN_EPILOGUE
    if epilogue:
        activation, bias, *rest = epilogue
        e = Epilogue(activation, dtypes.name_of(bias) if bias else "", *rest, located=is_located(activation))
    a_is_k, b_is_k, load, store, accumulate = ways
    way_out = "tma" if store else "rows" if load and not accumulate else "direct"
    m, n, k, batches, which = size if len(size) == 5 else (*size, 1, "")
    spec = GemmSpec(dtypes.name_of(dtype), dtypes.name_of(out), "k" if a_is_k else "m", "k" if b_is_k else "n",
                    "tma" if load else "direct", way_out, accumulate, e, which)
    return spec, (m, n, k), batches


def tunable(a, b, *, bias=None, activation=None, c=None, alpha=1.0, beta=0.0, out=None, out_dtype=None):
    """For ``tkq.tune``: a call of ``gemm``."""
    _operands(a, b, bias, c, out)
    alpha, beta = _numbers(alpha, beta)
    out_dtype = _out_dtype(out_dtype)
    extra = Extra(bias, "" if activation is None else name_of(activation), c, alpha, beta)
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    check_call(a, b, dtype, extra, any_k=True)  # the products of a backward too
    if out is None:
        out = torch.empty(shape_of(a, b, extra.activation), dtype=dtype, device=a.device)
    else:
        check_out(out, a, b, out_dtype, extra)
        check_apart(out, a, b, extra)

    def call(config, out, a, b, bias, c):
        run(a, b, out, config, extra=extra._replace(bias=bias, c=c))
        return out

    *_, kind = kind_of(a, b, out, False, False, extra)
    spec, sizes, batches = spec_of(*kind[:-1])
    return tuned.Tunable(tuned.problem("gemm", spec, (*sizes, batches), a.device), CONFIGS, (a, b, bias, c), out,
                         call, clear)


# ---- what can be wrong with a call -----------------------------------------------------------------------


def shape_of(a, b, activation) -> tuple:
    """The result's."""
    *leading, _ = a.shape
    return (*leading, b.shape[-1] // 2 if activation in GATED else b.shape[-1])


def check_call(a, b, out_dtype, extra=PLAIN, *, any_k=False) -> None:
    """Everything that can be wrong with a call; names the argument, what came and what is allowed.

    any_k: K is anything, as in the gradients of an odd number of rows or columns."""
    _tensors(a, b, extra.bias)
    for name, x in (("a", a), ("b", b)):
        check.rank(name, x, 2, 3)
    check.same_device(a=a, b=b, bias=extra.bias, c=extra.c)
    if b.dtype != a.dtype:
        raise TypeError(f"gemm: b is {b.dtype}, a is {a.dtype}; both must have one dtype")
    _out_dtype(out_dtype)
    if a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"gemm: a is {tuple(a.shape)}, b is {tuple(b.shape)}; allowed are (M, K) and (K, N), or "
                         "(B, M, K) and (B, K, N): expand() shares one matrix among a batch")
    for name, x in (("a", a), ("b", b)):
        if 1 not in x.stride()[-2:] and 1 not in x.shape[-2:] and x.numel():
            raise ValueError(f"gemm: {name} has strides {x.stride()}, allowed are those with a 1: "
                             "call .contiguous()")
    if a.shape[-1] % 8 and not any_k:
        raise ValueError(f"gemm: a is {tuple(a.shape)} and b {tuple(b.shape)}: K is {a.shape[-1]}, "
                         "allowed are multiples of 8: pad with zeros")
    _check_epilogue(a, b, out_dtype or a.dtype, extra)


def inner_fits(a, b) -> bool:
    """K is a multiple of 8, or contiguous in neither a nor b."""
    k = a.shape[-1]
    return k % 8 == 0 or not (is_k_major(a.shape[-2], *a.stride()[-2:]) or is_k_major(b.shape[-1], *b.stride()[:-3:-1]))


def _check_epilogue(a, b, out_dtype, extra) -> None:
    bias, activation, c, alpha, beta = extra
    n = b.shape[-1]
    if activation in GATED and n % 2:
        raise ValueError(f"gemm: b is {tuple(b.shape)}, and with activation {activation!r} N must be even")
    if bias is not None:
        check.shape("bias", bias, (n,))
        check.last_dim_contiguous("bias", bias)
    if c is not None:
        if activation in GATED:
            raise NotImplementedError(f"gemm: c with activation {activation!r}; a gated activation has only alpha and "
                                      "bias")
        check.tensor("c", c)
        if c.dtype != out_dtype:
            raise TypeError(f"gemm: c is {c.dtype}, the result {out_dtype}; both must have one dtype")
        check.shape("c", c, shape_of(a, b, activation))
        check.last_dim_contiguous("c", c)
    _numbers(alpha, beta)
    if check.is_traced(beta):
        return
    if beta != 0.0 if c is None else beta == 0.0:  # Dynamo does not compare bools where one is of a float that varies
        raise ValueError(f"gemm: c is {'not given' if c is None else 'given'} and beta is {beta}; allowed are both, "
                         "beta not 0, or neither")


def check_out(out, a, b, out_dtype, extra) -> None:
    """Everything that can be wrong with a tensor to write to."""
    check.dtype("out", out, OUT_DTYPES)
    check.same_device(a=a, out=out)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"gemm: out is {out.dtype}, out_dtype {out_dtype}; give one of them, or the same")
    check.shape("out", out, shape_of(a, b, extra.activation))
    check.last_dim_contiguous("out", out)
    check.refuse_overlap("gemm", out=out)


def check_apart(out, a, b, extra) -> None:
    """ValueError where the tensor to write to shares memory with an input, but for c itself."""
    for name, x in (("a", a), ("b", b), ("bias", extra.bias), ("c", extra.c)):
        if x is not None and not (name == "c" and memory.same_place(x, out)) and memory.shared(x, out):
            raise ValueError(f"gemm: out shares memory with {name}" + ("; allowed is c itself" * (name == "c")))
