"""DeepGEMM's kernels, compiled on first use by the machine's nvcc (or NVRTC). Only this file imports it.

It is taken where it is installed by itself or inside vllm. Its products of float8 take the scales that it calls 1D2D,
(1, 128) for a and (128, 128) for b, and write bf16; those of (1, 128) for both write float32 alone, added to what is
there, which is another problem. Groups begin at multiples of 128 rows. Scales lie as it wants them before the clock
runs.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable

import torch

NAME = "DeepGEMM"
ALIGNMENT = 128  # of groups, in rows
PLACES = ("deep_gemm", "vllm.third_party.deep_gemm")


def library():
    """DeepGEMM, whose kernels may begin while the one before them ends, by NVRTC where there is no nvcc.

    Raises:
        ImportError: what each place said."""
    if shutil.which("nvcc") is None:
        os.environ.setdefault("DG_JIT_USE_NVRTC", "1")
    said = []
    for place in PLACES:
        try:
            found = importlib.import_module(place)
        except Exception as problem:  # not there, or of another torch
            said.append(f"{place}: {type(problem).__name__}: {str(problem)[:80]}")
        else:
            found.set_pdl(True)
            return found
    raise ImportError("; ".join(said))


def bf16() -> Callable:
    """f(a, b), b of (K, N) in either order of memory."""
    deep = library()

    def run(a, b):
        out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=torch.bfloat16)
        deep.bf16_gemm_nn(a, b, out)
        return out

    return run


def fp8(kind: str) -> Callable:
    """f(a, b, scale_a, scale_b, ...) as bench/peers/fp8.py has it, of kind "1x128_128x128"."""
    if kind != "1x128_128x128":
        raise NotImplementedError(f"DeepGEMM has no product of scales by {kind} that writes bf16")
    deep, ours = library(), _Prepared()

    def run(a, b, sa, sb, *_):
        out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=torch.bfloat16)
        of_a = ours.of(sa, deep.get_mn_major_tma_aligned_tensor)
        of_b = ours.of(sb, lambda scale: scale.t().contiguous())
        deep.fp8_gemm_nt((a, of_a), (b.t(), of_b), out, recipe=(1, 128, 128))
        return out

    return run


def grouped(kind: str) -> Callable:
    """f(a, b, offsets[, scale_a, scale_b]) as bench/ops/grouped_gemm.py has it, of groups along M."""
    if kind not in ("bf16", "1x128_128x128"):
        raise NotImplementedError(f"DeepGEMM has no grouped product of kind {kind} that writes bf16")
    deep, ours = library(), _Prepared()

    def run(a, b, offsets, sa=None, sb=None):
        rows = ours.of(offsets, lambda ends: _rows(ends, a.shape[0]))
        out = torch.empty(a.shape[0], b.shape[2], device=a.device, dtype=torch.bfloat16)
        if kind == "bf16":
            deep.m_grouped_bf16_gemm_nt_contiguous(a, b.transpose(1, 2), out, rows)
        else:
            of_a = ours.of(sa, deep.get_mn_major_tma_aligned_tensor)
            of_b = ours.of(sb, lambda scale: scale.transpose(1, 2).contiguous())
            deep.m_grouped_fp8_gemm_nt_contiguous((a, of_a), (b.transpose(1, 2), of_b), out, rows,
                                                  recipe=(1, 128, 128))
        return out

    return run


class _Prepared:
    """What is made once of a tensor: in the first call, before the clock runs. The tensor stays alive with it, so that
    its address means it."""

    def __init__(self):
        self._made: dict[int, tuple] = {}

    def of(self, tensor: torch.Tensor, make: Callable) -> torch.Tensor:
        key = tensor.data_ptr()
        if key not in self._made:
            self._made[key] = tensor, make(tensor)
        return self._made[key][1]


def _rows(offsets: torch.Tensor, m: int) -> torch.Tensor:
    """The group of each row, as DeepGEMM asks for it.

    Raises:
        NotImplementedError: groups that do not begin at multiples of 128."""
    ends = offsets.tolist()
    if any(end % ALIGNMENT for end in ends):
        raise NotImplementedError(f"groups of DeepGEMM begin at multiples of {ALIGNMENT} rows")
    sizes = torch.tensor([end - begin for begin, end in zip([0, *ends], ends)])
    found = torch.repeat_interleave(torch.arange(len(ends)), sizes).int()
    return torch.nn.functional.pad(found, (0, m - len(found)), value=-1).to(offsets.device)
