"""The kernel time of a training step by kind: a profile of one step."""

from __future__ import annotations

import collections
import re

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {  # the first whose words are in a kernel's name
    "quantising": r"tkqquantize",
    "attention": r"tkqattention|sdpa|fmha|flash|cudnn",
    "loss": r"tkqlosses|softmax|nll_loss|cross_entropy",
    "products": r"gemm|nvjet|cublas|splitk",
    "optimizer": r"multi_tensor_apply",
}
REST = "norms, rotation, gate, additions, casts, copies"
TITLES = {"quantising": "quantisation", "products": "GEMM",
          REST: "elementwise: norms, rope, gate, additions, casts, copies"}


def titled(kind: str) -> str:
    """A kind's name in tables; files of results keep the words above."""
    return TITLES.get(kind, kind)


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), REST)


def profiled(step) -> dict:
    """Of a call: {kind: milliseconds of kernels}, how many launches, the time from the first kernel's beginning to the
    last one's end, and the kernels that took the most: (name, milliseconds, launches)."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kinds, names, launches, begin, end = dict.fromkeys((*KINDS, REST), 0.0), collections.Counter(), {}, [], []
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms = event.self_device_time_total / 1e3
            kinds[kind_of(event.name)] += ms
            names[event.name[:120]] += ms
            launches[event.name[:120]] = launches.get(event.name[:120], 0) + 1
            begin.append(event.time_range.start)
            end.append(event.time_range.end)
    return dict(ms=kinds, all=sum(kinds.values()), launches=sum(launches.values()),
                span=(max(end) - min(begin)) / 1e3 if end else 0.0,
                most=[(name, ms, launches[name]) for name, ms in names.most_common(24)])


def lines(found: dict) -> list[str]:
    """{name of a run: what `profiled` gave} as a table."""
    rows = [("kernels, ms", *found), *((titled(kind), *(f"{each['ms'][kind]:.1f}" for each in found.values()))
                                       for kind in (*KINDS, REST))]
    rows.append(("sum (launches)", *(f"{each['all']:.1f} ({each['launches']})" for each in found.values())))
    rows.append(("wall time", *(f"{each['span']:.1f}" for each in found.values())))
    return ["| " + " | ".join(row) + " |" for row in rows]
