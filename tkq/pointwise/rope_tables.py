"""tkq.rope_cos_sin: the tables of a rotary embedding, computed once."""
import collections
import threading

import torch
from torch import Tensor

from ..runtime import arguments
from ..runtime.call import check, ops
from ..runtime.system import forks

CACHED = 16  # tables (pairs) in memory
_arguments = arguments.checker("rope_cos_sin", "seqlen", "dim", "base", "dtype", "device", "inv_freq")

_tables: collections.OrderedDict = collections.OrderedDict()  # (dim, base, dtype, device) -> (cos, sin), latest last
_one_at_a_time = forks.Renewed(threading.Lock)


def rope_cos_sin(seqlen: int, dim: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float32,
                 device=None, inv_freq: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2 i / dim), what ``rope`` takes (Su et al., 2021).

    Computed in float64 and rounded once. The last 16 tables are cached by dim, base, dtype and device; a call gets a
    copy of its rows of one: what is written to it changes no other. Nothing is cached, or taken from the cache, while
    torch.compile traces, a dispatch mode (FakeTensorMode) or a functorch transform is under way, or a CUDA graph is
    captured; nor with ``inv_freq``.

    Args:
        seqlen: positions 0 to seqlen - 1; 0 and more.
        dim: columns of a head that rotate; even.
        base: theta, above 0.
        dtype: float32 unless given; bfloat16 and float16 too.
        device: unless given inv_freq's; without one the current CUDA device where there is one, else the CPU.
        inv_freq: (dim / 2,) angles per position, in place of base^(-2 i / dim): for scaled rotary embeddings.

    Returns:
        cos, sin: (seqlen, dim / 2), contiguous, the caller's own.

    Raises:
        TypeError: seqlen or dim is no int; base is no number; dtype is not bf16, fp16 or fp32; device is no device;
            inv_freq is no dense tensor of bf16, fp16, fp32 or float64.
        ValueError: seqlen is outside 0 to 2^31 - 1; dim is outside 2 to 65536; base is not above 0; device is one that
            is not there; a number that is not finite; an odd dim, an inv_freq on meta for tables elsewhere.

    Example::

        cos, sin = tkq.rope_cos_sin(2048, 64, device="cuda")  # (2048, 32) float32; (2048, 32) float32
    """
    seqlen, dim, base, dtype, device = _checked(seqlen, dim, base, dtype, device, inv_freq)
    if inv_freq is not None:
        return _computed(seqlen, inv_freq.to(dtype=torch.float64, device=device or inv_freq.device), dtype)
    device = _device(device)
    # A table made under a mode is fake, or part of a trace, and no later call's.
    if torch.compiler.is_compiling() or not ops.direct() or (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _computed(seqlen, _frequencies(dim, base, device), dtype)
    cos, sin = _cached(seqlen, dim, float(base), dtype, device)
    with torch.inference_mode(False):  # what an inference-mode call has made, training may use
        return cos[:seqlen].clone(), sin[:seqlen].clone()


def _checked(seqlen, dim, base, dtype, device, inv_freq):
    seqlen, dim, base, dtype, device, inv_freq = _arguments(seqlen, dim, base, dtype, device, inv_freq)
    if dim % 2:
        raise ValueError(f"rope_cos_sin: dim: got {dim}, allowed are even numbers from 2 on")
    if inv_freq is not None:
        check.shape("rope_cos_sin: inv_freq", inv_freq, (dim // 2,))
        if inv_freq.is_meta and device is not None and device.type != "meta":
            raise ValueError(f"rope_cos_sin: inv_freq: is on meta, where it has no values, for tables on {device}; "
                             "allowed are other devices, or meta for both")
    return seqlen, dim, base, dtype, device


def _device(device) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _cached(seqlen, dim, base, dtype, device):
    key = dim, base, dtype, device
    with _one_at_a_time:
        found = _tables.get(key)
        if found is None or found[0].shape[0] < seqlen:
            rows = 1 << max(int(seqlen) - 1, 0).bit_length()  # a sequence that grows does not make a table each time
            with torch.inference_mode(False):
                found = _tables[key] = _computed(rows, _frequencies(dim, base, device), dtype)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # once: any stream may use it next
        _tables.move_to_end(key)
        while len(_tables) > CACHED:
            _tables.popitem(last=False)
        return found


def _frequencies(dim, base, device):
    return base ** (torch.arange(0, dim, 2, dtype=torch.float64, device=device) / -dim)


def _computed(seqlen, frequencies, dtype):
    angles = torch.outer(torch.arange(seqlen, dtype=torch.float64, device=frequencies.device), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)
