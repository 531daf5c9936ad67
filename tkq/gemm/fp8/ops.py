"""tkq.fp8_gemm: what PyTorch sees of the float8 matrix product."""
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.gemm import tuned
from tkq.gemm.dense.plan import takes_counter
from tkq.gemm.dense.spec import TMA_BYTES, fits_tma_store
from tkq.gemm.fp8.plan import planned_kernel
from tkq.gemm.fp8.spec import ACTIVATIONS, BIASES, FP8, K_UNIT, OUT, Fp8Spec, granularity, shapes_allowed
from tkq.gemm.fp8.stored import CONFIGS
from tkq.reference import fp8
from tkq.runtime import arguments, function
from tkq.runtime.call import alloc, check, counters, dtypes, ops
from tkq.runtime.call.replay import Address, CallCache
from tkq.runtime.device import arch

ACCUMULATE = ("fast", "fp32")
_options = arguments.checker("fp8_gemm", "activation", "out_dtype", "accumulate")
_tensors = arguments.checker("fp8_gemm", "a", "b", "scale_a", "scale_b", "bias", "out_scale")
_call_cache, _wave_sync_call_cache = CallCache(), CallCache(by_stream=True)  # of kernels without and with a counter


class Names(NamedTuple):
    """What a caller's words for the call are: errors name its own arguments."""

    op: str = "fp8_gemm"
    a: str = "a"
    b: str = "b"


_NAMES = Names()


class WaveSyncLaunch(NamedTuple):
    """A kernel with wave sync: its blocks wait for each other by a counter of the stream that it runs on, which lives
    for ever."""

    kernel: Callable

    def __call__(self, a, *more):
        """Returns the counter's address."""
        counter = counters.counter(a.get_device()).data_ptr()
        self.kernel(a, *more, counter)
        return counter


def fp8_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias: Optional[Tensor] = None,
             activation: Optional[str] = None, out_dtype: torch.dtype = torch.bfloat16,
             out_scale: Optional[Tensor] = None, accumulate: Optional[str] = None) -> Tensor:
    """activation((a * scale_a) @ (b * scale_b) + bias) on float8 tensor cores.

    Args:
        a: (M, K), float8_e4m3fn or float8_e5m2, K contiguous. K is a multiple of 16; base and row pitch are, in bytes.
        b: (K, N), either float8 type, K contiguous too (column-major): the ``.t()`` of a row-major (N, K).
        scale_a, scale_b: float32, which multiply to dequantise. Their shapes say what shares a scale, by the names of
            ``tkq.quantize_fp8`` for a and for b.t(); one of these pairs:
            one element each ("tensor"): for all of a and all of b;
            (M, 1) with (1, N) ("row"): for each row of a and each column of b;
            (M, ceil(K / 128)) with (ceil(K / 128), ceil(N / 128)) ("1x128" with "128x128"): for each 128 of K of a row
            of a, and each 128 x 128 of b;
            (M, ceil(K / 128)) with (ceil(K / 128), N) ("1x128" both): for each 128 of K of a row of a and of a column
            of b (weight gradients).
            Any strides. Fast are scale_a's whose M is contiguous, as ``tkq.quantize_fp8`` makes them, and scale_b's
            whose N is.
        bias: (N,), bfloat16, float16 or float32, contiguous.
        activation: "relu", "silu", "gelu" (by erf) or "gelu_tanh". Of a 16-bit result of "fast" sums it may be computed
            while the next tile's products run, of the sum in the result's type: rounded before and after, as by two
            calls. On a GPU gelu, gelu_tanh and, with 128x128 scales of b, silu are less exact where the result is
            bfloat16 or float8: docs/numerics.md says by how much; gelu of -inf is 0 there, else NaN, as PyTorch's.
        out_dtype: bfloat16, float16, float32 or float8_e4m3fn.
        out_scale: for float8 results, and only for them: float32, one element; the result is y / out_scale, and what is
            beyond 448 becomes 448.
        accumulate: "fast": the tensor cores' own sum, of about 14 bits, over all of K. "fp32": their sums of 128 of K
            are added up in float32. Not given: "fast", and "fp32" where scales change along K, which allows no other.
            Sums are cut off, not rounded, and so come out too near to zero. Their mean signed error at K = 16384 on an
            H100, as a share of the mean of |y|: "fast" -3.6e-4 for normal a and b, -0.25 where all products are
            positive; "fp32" -3.9e-5 and -5.0e-4; torch's were the same in that run. Other K: docs/speed.md
            (bench.studies.fp8_accumulation_error). Where blocks share K, as of few rows, "fast" sums are cut off less.

    Returns:
        (M, N), contiguous.

    Raises:
        TypeError: a or b is no dense tensor of e4m3 or e5m2; scale_a, scale_b or out_scale is no dense tensor of fp32;
            bias is no dense tensor of bf16, fp16 or fp32; activation or accumulate is no word; out_dtype is not bf16,
            fp16, fp32 or e4m3.
        ValueError: accumulate is another word; not 2-D, sizes or scales that do not go together, K not a multiple of
            16, an operand that is not K-contiguous, several devices.
        NotImplementedError: another activation; a gradient asked for.
        RuntimeError: a GPU other than Hopper.

    CPU tensors take ``tkq.reference.fp8.fp8_gemm``.

    Example::

        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
        a, scale_a = tkq.quantize_fp8(x, "row")
        b, scale_b = tkq.quantize_fp8(w, "row")
        y = tkq.fp8_gemm(a, b.t(), scale_a, scale_b.t())  # (64, 512) bfloat16
    """
    if not ops.traced():
        found = _call_cache.take(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate)
        if found is None:
            found = _wave_sync_call_cache.take(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale,
                                               accumulate)
        if found is not None:
            return found
    activation, out_dtype, accumulate = _options(activation, out_dtype, accumulate)
    if ops.direct(a, b, scale_a, scale_b, bias, out_scale):
        run = _launched if a.is_cuda else _cpu
        return run(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate)
    check.refuse_gradient("fp8_gemm", a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias,
                          out_scale=out_scale)
    _check(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate)
    return _op(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate)


def _cuda(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Optional[Tensor], activation: Optional[str],
          out_dtype: torch.dtype, out_scale: Optional[Tensor], accumulate: Optional[str]) -> Tensor:
    given = a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate
    found = _call_cache.take(*given)
    if found is None:
        found = _wave_sync_call_cache.take(*given)
    return _launched(*given) if found is None else found


def _launched(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate):
    try:
        extras, index = None, a.get_device()
        if bias is not None or activation is not None or out_scale is not None:
            extras = bias is not None and _facts(bias), activation, out_scale is not None and _facts(out_scale)
        kernel, blocks, m, n, strided = _launcher(
            a.dtype, b.dtype, a.shape, b.shape, scale_a.dtype, scale_b.dtype, scale_a.shape, scale_b.shape, extras,
            out_dtype, accumulate, index, scale_a.get_device(), scale_b.get_device())
        c = alloc.empty(index, (m, n), (n, 1), out_dtype)
        if strided:
            (rows, steps), (steps_b, cols) = scale_a.stride(), scale_b.stride()
            of_a, of_b = (rows, steps), (cols, steps_b)
        else:
            of_a = of_b = 1, 1
        # it checks what is not in the key: strides, addresses and devices of a, b and c
        counter = kernel(
            a, b, c, (scale_a.data_ptr(), *of_a), (scale_b.data_ptr(), *of_b), 0 if bias is None else bias.data_ptr(),
            0 if out_scale is None else out_scale.data_ptr(), blocks)
        given = a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate
        arguments = (a, b, c, (Address(scale_a), *of_a), (Address(scale_b), *of_b), 0 if bias is None else
                     Address(bias), 0 if out_scale is None else Address(out_scale), blocks)
        if isinstance(kernel, WaveSyncLaunch):
            _wave_sync_call_cache.add(given, kernel.kernel, (*arguments, counter), c)
        else:
            _call_cache.add(given, kernel, arguments, c)
        return c
    except Exception:
        # What a launch stumbles over; the words for a user are found only when something is wrong.
        _check(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate)
        _aligned(a=a, b=b)
        if not (a.shape[0] and a.shape[1] and b.shape[1]):  # nothing to multiply, and nothing wrong
            return fp8.fp8_gemm(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale)
        raise


def run(spec: Fp8Spec, a, b, scale_a, scale_b, c, config=None, blocks=None, *, bias=None, out_scale=None):
    """The kernel of a spec, with no more checks than its own: for tests and tuning, with a config and a number of
    blocks (at most; at least a cluster) instead of the plan's."""
    recipe, planned = planned_kernel(spec, *c.shape, a.shape[1], arch.num_sms(a.device), config)
    _kernel(recipe)(a, b, c, _place(scale_a), _place(scale_b, True), 0 if bias is None else bias.data_ptr(),
                    0 if out_scale is None else out_scale.data_ptr(), blocks or planned)


def _kernel(recipe):
    found = function(recipe)
    return WaveSyncLaunch(found) if takes_counter(recipe) else found


def clear() -> None:
    """All kernels of earlier calls."""
    _launcher.cache_clear()
    _call_cache.clear()
    _wave_sync_call_cache.clear()


def _facts(x):
    return x.dtype, x.shape, x.is_contiguous(), x.get_device()


def _place(scale, columns=False):
    """(address, stride of rows or columns, stride of steps of K) of scales: (M, steps), or (steps, N)."""
    if scale.dim() != 2:
        return scale.data_ptr(), 1, 1
    first, second = scale.stride()
    return (scale.data_ptr(), second, first) if columns else (scale.data_ptr(), first, second)


@lru_cache(4096)
def _launcher(a_dtype, b_dtype, shape_a, shape_b, dtype_sa, dtype_sb, shape_sa, shape_sb, extras, out_dtype, accumulate,
              *devices):
    """(kernel, blocks, M, N, whether scales have strides) for a kind of call: the cache in front of the checks, of
    planning and of the table of kernels. Raises where there is nothing to multiply, too."""
    bias, activation, out_scale = extras or (False, None, False)
    (m, k), n = shape_a, shape_b[1]
    spec = _spec(a_dtype, b_dtype, shape_a, shape_b, (k, 1), (1, k), (dtype_sa, shape_sa, dtype_sb, shape_sb),
                 (bias, activation, out_dtype, out_scale), accumulate)
    if not (m and n and k):
        raise ValueError("fp8_gemm: nothing to multiply")
    if len({*devices, *(facts[3] for facts in (bias, out_scale) if facts)}) != 1:
        raise ValueError("fp8_gemm: several devices")
    device = arch.device(devices[0])
    arch.require_hopper(device)
    recipe, blocks = planned_kernel(spec, m, n, k, arch.num_sms(device), tuned.chosen(CONFIGS, spec, (m, n, k), device))
    return _kernel(recipe), blocks, m, n, spec.scale_b != "tensor"


def _spec(a_dtype, b_dtype, shape_a, shape_b, stride_a, stride_b, scales, ways, accumulate, names=_NAMES) -> Fp8Spec:
    """Everything that can be wrong with shapes, strides, dtypes and words of a call, and what it asks for."""
    op, a, b = names
    for name, dtype in ((a, a_dtype), (b, b_dtype)):
        _dtype(name, dtype, FP8)
    for name, shape in ((a, shape_a), (b, shape_b)):
        if len(shape) != 2:
            raise ValueError(f"{name}: has {len(shape)} dimensions, shape {tuple(shape)}; allowed: 2")
    (m, k), n = shape_a, shape_b[1]
    if shape_b[0] != k:
        help = f": pass {b}.t()" if shape_b[1] == k else ""
        raise ValueError(f"{op}: {a} is {tuple(shape_a)}, {b} is {tuple(shape_b)}; allowed are (M, K) and (K, N){help}")
    if k % K_UNIT:
        raise ValueError(f"{op}: {a} is {tuple(shape_a)} and {b} {tuple(shape_b)}: K is {k}, allowed are multiples of "
                         f"{K_UNIT}: pad with zeros")
    _contiguous_in_k(a, "rows", shape_a, stride_a, k, m)
    _contiguous_in_k(b, "columns", shape_b, stride_b[::-1], k, n)
    kind = _scales(m, n, k, *scales)
    bias, activation, out_dtype, out_scale = ways
    _dtype("out_dtype", out_dtype, OUT)
    if bias:
        _dtype("bias", bias[0], BIASES)
        if tuple(bias[1]) != (n,) or not bias[2]:
            raise ValueError(f"bias: shape is {tuple(bias[1])}, allowed is ({n},), contiguous")
    if activation is not None and activation not in ACTIVATIONS:
        raise NotImplementedError(f"activation: got {activation!r}, allowed are None, {', '.join(ACTIVATIONS)}")
    _out_scale(out_dtype, out_scale)
    row = n * out_dtype.itemsize
    return Fp8Spec(dtypes.name_of(a_dtype), dtypes.name_of(b_dtype), dtypes.name_of(out_dtype), *kind,
                   _promote(kind, accumulate), dtypes.name_of(bias[0]) if bias else None, activation,
                   "tma" if fits_tma_store(0, n, m, n, out_dtype.itemsize) and row else "direct")


def _dtype(name, dtype, allowed):
    if not isinstance(dtype, torch.dtype) or dtypes.name_of(dtype) not in allowed:
        names = ", ".join(f"{dtypes.torch_type(x)} ({x})" for x in allowed)
        raise TypeError(f"{name}: dtype is {dtype}, allowed are {names}")


def _contiguous_in_k(name, lines, shape, strides, k, count):
    """lines: "rows" of a or "columns" of b, count of them. strides: of them, and of K."""
    pitch, step = strides
    if k > 1 and count and step != 1:
        what, help = ("(M, K)", f"{name}.contiguous()") if lines == "rows" else ("(K, N)",
                                                                                f"{name}.t().contiguous().t()")
        raise ValueError(f"{name}: {what} of shape {tuple(shape)} has stride {step} along K, allowed is 1 "
                         f"({lines[:-1]}-major): pass {help}")
    if k and count > 1 and pitch % TMA_BYTES:
        raise ValueError(f"{name}: its {lines} lie {pitch} bytes apart, allowed are multiples of {TMA_BYTES}: copy it")


def _scales(m, n, k, dtype_a, shape_a, dtype_b, shape_b):
    for name, dtype in (("scale_a", dtype_a), ("scale_b", dtype_b)):
        _dtype(name, dtype, ("fp32",))
    kind = granularity(m, n, k, shape_a, shape_b)
    if kind is None:
        raise ValueError(f"scale_a, scale_b: shapes are {tuple(shape_a)} and {tuple(shape_b)}; allowed for a product "
                         f"of ({m}, {k}) and ({k}, {n}) are {shapes_allowed(m, n, k)}")
    return kind


def _out_scale(out_dtype, facts):
    wanted = out_dtype.itemsize == 1
    if wanted and not facts:
        raise ValueError(f"out_scale: got None, a result of {out_dtype} needs one: float32, one element")
    if facts and not wanted:
        raise ValueError(f"out_scale: given with a result of {out_dtype}, allowed with float8_e4m3fn")
    if facts:
        _dtype("out_scale", facts[0], ("fp32",))
        if facts[1].numel() != 1:
            raise ValueError(f"out_scale: shape is {tuple(facts[1])}, allowed is one element")


def _promote(kind, accumulate):
    if accumulate is not None and accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate: got {accumulate!r}, allowed are {', '.join(map(repr, ACCUMULATE))}")
    per_step = kind[0] == "1x128"
    if per_step and accumulate == "fast":
        raise ValueError("accumulate: got 'fast' with scales that change along K, allowed is 'fp32'")
    return per_step or accumulate == "fp32"


def _check(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate, names=_NAMES):
    """The same for tensors, by name: what they are, and where they are."""
    given = {names.a: a, names.b: b, "scale_a": scale_a, "scale_b": scale_b}
    given |= {name: x for name, x in (("bias", bias), ("out_scale", out_scale)) if x is not None}
    if names is _NAMES:
        _tensors(a, b, scale_a, scale_b, bias, out_scale)
    for name, x in given.items():
        check.tensor(name, x)
    words = bias is not None and _facts(bias), activation, out_dtype, out_scale is not None and _facts(out_scale)
    spec = _spec(a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(),
                 (scale_a.dtype, scale_a.shape, scale_b.dtype, scale_b.shape),
                 words, accumulate, names)
    check.same_device(**given)
    return spec


def refusal(call: tuple, names: Names) -> Optional[Exception]:
    """What is wrong with a call, in the caller's words; None where nothing is. call: as of ``_cpu``."""
    try:
        _check(*call, names=names)
        _aligned(**{names.a: call[0], names.b: call[1]})
    except Exception as error:
        return error
    return None


def _aligned(**operands):
    for name, x in operands.items():
        if x.numel() and x.data_ptr() % TMA_BYTES:
            raise ValueError(f"{name}: begins at an address that is not a multiple of {TMA_BYTES} bytes: copy it")


def _cpu(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Optional[Tensor], activation: Optional[str],
         out_dtype: torch.dtype, out_scale: Optional[Tensor], accumulate: Optional[str]) -> Tensor:
    _check(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate)
    _aligned(a=a, b=b)  # the GPU's rule, so that what works here works there
    return fp8.fp8_gemm(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale)


def _fake(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Optional[Tensor], activation: Optional[str],
          out_dtype: torch.dtype, out_scale: Optional[Tensor], accumulate: Optional[str]) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_op = ops.torch_op("fp8_gemm", cuda=_cuda, cpu=_cpu, fake=_fake)


def tunable(a, b, scale_a, scale_b, *, bias=None, activation=None, out_dtype=torch.bfloat16, out_scale=None,
            accumulate=None):
    """For ``tkq.tune``: a call of ``fp8_gemm``."""
    _tensors(a, b, scale_a, scale_b, bias, out_scale)
    activation, out_dtype, accumulate = _options(activation, out_dtype, accumulate)
    spec = _check(a, b, scale_a, scale_b, bias, activation, out_dtype, out_scale, accumulate)
    _aligned(a=a, b=b)
    (m, k), n = a.shape, b.shape[1]

    def call(config, c, a, b, scale_a, scale_b, bias, out_scale):
        run(spec, a, b, scale_a, scale_b, c, config, bias=bias, out_scale=out_scale)
        return c

    return tuned.Tunable(tuned.problem("fp8_gemm", spec, (m, n, k), a.device), CONFIGS,
                         (a, b, scale_a, scale_b, bias, out_scale),
                         torch.empty(m, n, dtype=out_dtype, device=a.device), call, clear)
