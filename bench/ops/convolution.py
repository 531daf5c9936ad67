"""causal_conv1d and causal_conv1d_step against causal-conv1d, fla and torch: forward, and forward with backward.

    python -m bench.ops.convolution [--sections calls,forward,training,packed,packed_training,numbered,
                                    numbered_training,normed,normed_training,step] [--quick] [--shapes 8x2048x8192]

bf16, four taps, bias and silu. numbered: packed sequences by seq_idx. normed: the first half of the channels are heads
of 128 with an l2 norm. Shapes: sequences, their length, channels; packed ones: how many, tokens of all, channels;
steps: sequences, channels. The work is the bytes of x and y, with the backward of five such tensors, of a
step of its states, in and out. A result is judged by the reference in float64, on the first 64 channels of the first
sequence. Results go to OUT/convolution.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.packed_states import cu_seqlens
from bench.ops.rows_common import randn
from bench.peers import common, convolution
from tkq.reference.convolution import causal_conv1d as exactly
from tkq.reference.convolution import causal_conv1d_backward as exact_gradients
from tkq.testing.timing import relative_error

W, JUDGED, HEAD = 4, 64, 128
SHAPES, PACKED, STEPS = ((8, 2048, 8192), (1, 32768, 8192), (8, 2048, 5376)), ((16, 32768, 8192),), (
    (1, 8192), (64, 8192), (256, 8192))
QUICK = SHAPES[:1] + STEPS[1:2]
AT_LEAST = {"forward": 1.05, "training": 1.2, "packed": 1.15, "packed_training": 1.15, "numbered": 1.15,
            "numbered_training": 1.15, "normed": 1.15, "normed_training": 1.15, "step": 1.0}  # times the best


def inputs(i, batch, length, channels):
    """x, weight, bias."""
    return (randn(2 * i, batch, length, channels), randn(7000 + i, channels, W) / 2, randn(8000 + i, channels))


def ours(x, weight, bias, cu=None):
    return tkq.causal_conv1d(x, weight, bias, "silu", cu_seqlens=cu)


def ours_by_numbers(x, weight, bias, seq_idx):
    return tkq.causal_conv1d(x, weight, bias, "silu", seq_idx=seq_idx)


def ours_normed(x, weight, bias):
    return tkq.causal_conv1d(x, weight, bias, "silu", norm_heads=normed_heads(x))


def normed_heads(x):
    return x.shape[2] // 2 // HEAD


def ours_step(x, weight, bias, states):
    return tkq.causal_conv1d_step(x, states, weight, bias, "silu")


def judged(given, channels):
    """x, weight and bias of the channels that are judged, wide."""
    x, weight, bias = given[:3]
    return x[:1, :, :channels].double(), weight[:channels].double(), bias[:channels].double()


def error_of(section):
    normed, apart = section.startswith("normed"), section.startswith(("packed", "numbered"))
    channels, heads = (HEAD, (1, HEAD)) if normed else (JUDGED, ())  # of normed channels the first head

    def whole(found):
        """Of normed heads and the rest, as peers give them, the heads."""
        return found[0].flatten(2) if isinstance(found, tuple) else found

    def forward(name, given, found):
        if name == "copy":
            return None
        cu = given[3] if apart else None
        want = exactly(*judged(given, channels), "silu", None, cu, *heads)[0]
        return relative_error(whole(found)[:1, :, :channels], want)

    def training(name, given, found):
        """The largest of y's and dx's: sums for the weights are over all sequences."""
        if name == "copy":
            return None
        cu = given[3] if apart else None
        of = judged(given, channels)
        dx = exact_gradients(given[-1][:1, :, :channels].double(), None, *of, "silu", None, cu, *heads)[0]
        want = exactly(*of, "silu", None, cu, *heads)[0], dx
        return max(relative_error(whole(mine)[:1, :, :channels], exact) for mine, exact in zip(found, want))

    def step(name, given, _):
        """On a copy of the states: those of the case have been updated by calls before."""
        if name == "copy":
            return None
        x, weight, bias, states = given
        call = ours_step if name == "tkq" else convolution.PEERS["convolution_step"][name]()
        found = call(x, weight, bias, states.clone())
        want = exactly(x[:1, None].double(), weight.double(), bias.double(), "silu", states[:1].double())[0]
        return relative_error(found[:1, None], want)

    return step if section == "step" else training if section.endswith("training") else forward


def made(section, shape, i):
    if section == "step":
        count, channels = shape
        x, weight, bias = inputs(i, count, 1, channels)
        return x[:, 0], weight, bias, randn(9000 + i, count, channels, W - 1)
    packed = section.startswith(("packed", "numbered"))
    batch, length, channels = shape
    given = inputs(i, 1 if packed else batch, length, channels)
    if packed:
        cuts = cu_seqlens(batch, length, given[0].device)
        place = torch.arange(length, device=cuts.device)
        numbers = (torch.searchsorted(cuts, place, right=True) - 1).int()[None]
        given = *given, numbers if section.startswith("numbered") else cuts
    return given if not section.endswith("training") else (*given, randn(2 * i + 1, *given[0].shape))


def jobs(section, shapes) -> Iterator[Job]:
    op = "convolution" if section == "forward" else f"convolution_{section}"
    names = tuple(convolution.PEERS[op])
    for shape in shapes:
        if section == "step":
            title, work = "B{} C{}".format(*shape), 2 * 2 * (W - 1) * shape[0] * shape[1]
        else:
            packed = section.startswith(("packed", "numbered"))
            title = ("packed{}x{} C{}" if packed else "{}x{} C{}").format(*shape) + f" W{W}"
            tokens = shape[1] if packed else shape[0] * shape[1]
            work = 2 * tokens * shape[2] * (5 if section.endswith("training") else 2)
        function = "causal_conv1d_step" if section == "step" else "causal_conv1d"
        question = harness.Question(section, function, title, "GB/s", work, Bound(names[:-1], AT_LEAST[section]),
                                    roof=Bound(names[-1:], 0.9))
        run = {"step": ours_step, "numbered": ours_by_numbers, "normed": ours_normed}.get(section.split("_")[0], ours)
        yield Job(question, convolution.training(run) if section.endswith("training") else run, op, names,
                  lambda i, size=shape: made(section, size, i), error_of(section))


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    given, step = inputs(0, 1, 64, 64), made("step", (2, 64), 0)
    found = {"x + x": Call(lambda: given[0] + given[0]), "causal_conv1d tkq": Call(lambda: ours(*given)),
             "causal_conv1d_step tkq": Call(lambda: ours_step(*step))}
    for name, call in common.find("convolution", ("causal-conv1d", "fla", "torch"))[0].items():
        found[f"causal_conv1d {name}"] = Call(lambda call=call: call(*given))
    return found


SECTIONS = {"forward": SHAPES, "training": SHAPES, "packed": PACKED, "packed_training": PACKED, "numbered": PACKED,
            "numbered_training": PACKED, "normed": SHAPES, "normed_training": SHAPES, "step": STEPS}
BENCH = Bench(
    "convolution", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in SECTIONS},
    shapes=SECTIONS,
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
