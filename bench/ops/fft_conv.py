"""fft_conv against FlashFFTConv and torch.fft: causal forward, forward with backward, and circular.

    python -m bench.ops.fft_conv [--sections calls,forward,training,circular] [--quick] [--shapes 64x768x4096]

bf16, filters as long as the sequences. Shapes: sequences, heads, tokens. The work is the bytes of u and y, with the
backward of five such tensors. A result is judged by the reference in float64, on the first sequence's first 16 heads: a
peer's time counts where its result is right. Results go to OUT/fft_conv.json after every case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.rows_common import randn
from bench.peers import common, fft_conv
from tkq.reference.long_convolution import fft_conv as exactly
from tkq.reference.long_convolution import fft_conv_backward as exact_gradients
from tkq.testing.timing import relative_error

JUDGED = 16
TRAINING = (64, 768, 1024), (64, 768, 4096), (64, 768, 8192), (16, 768, 32768), (2, 768, 262144)
SHAPES = *TRAINING, (1, 768, 1048576)
CIRCULAR = (64, 768, 1024), (64, 768, 4096)
QUICK = SHAPES[1:2]
AT_LEAST = {"forward": 10.0, "training": 10.0, "circular": 8.3}  # times torch
AT_LENGTH = {("forward", 1024): 12.0, ("circular", 4096): 8.7, ("forward", 262144): 4.0, ("training", 262144): 4.0,
             ("forward", 1048576): 3.0}  # in the place of these


def inputs(i, batch, heads, tokens):
    """u and k."""
    return randn(2 * i, batch, heads, tokens), randn(7000 + i, heads, tokens).float() / tokens**0.5


def ours(u, k):
    return tkq.fft_conv(u, k)


def circular(u, k):
    return tkq.fft_conv(u, k, None, False)


def error_of(section):
    def judged(x):
        return x[:1, :JUDGED].double()

    def forward(name, given, found):
        if name == "copy":
            return None
        u, k = given
        return relative_error(found[:1, :JUDGED], exactly(judged(u), k[:JUDGED].double(), causal=section != "circular"))

    def training(name, given, found):
        """The larger of y's and du's: a filter's gradient is a sum over all sequences."""
        if name == "copy":
            return None
        u, k, dy = given
        want = exactly(judged(u), k[:JUDGED].double()), exact_gradients(judged(dy), judged(u), k[:JUDGED].double())[0]
        return max(relative_error(mine[:1, :JUDGED], exact) for mine, exact in zip(found, want))

    return training if section == "training" else forward


def made(section, shape, i):
    given = inputs(i, *shape)
    return (*given, randn(2 * i + 1, *shape)) if section == "training" else given


# By tokens, times FlashFFTConv, where it is there and right; else as many times torch as AT_LEAST and AT_LENGTH say,
# but for what is asked of beside the package alone.
BESIDE_PACKAGE = {32768: 1.5, 262144: 2.0, 1048576: 2.5}
PACKAGE_ALONE = (("training", 32768),)


def jobs(section, shapes) -> Iterator[Job]:
    op = "fft_conv" if section == "forward" else f"fft_conv_{section}"
    names = tuple(fft_conv.PEERS[op])
    for shape in shapes:
        at_least = AT_LENGTH.get((section, shape[2]), AT_LEAST[section])
        work = 2 * shape[0] * shape[1] * shape[2] * (5 if section == "training" else 2)
        bound, package = Bound(("torch",), at_least), BESIDE_PACKAGE.get(shape[2])
        question = harness.Question(section, "fft_conv", "{}x{} N{}".format(*shape), "GB/s", work,
                                    Bound(("FlashFFTConv",), package) if package else bound,
                                    roof=Bound(names[-1:], 0.9),
                                    instead=None if (section, shape[2]) in PACKAGE_ALONE else bound)
        run = fft_conv.training(ours) if section == "training" else circular if section == "circular" else ours
        yield Job(question, run, op, names, lambda i, size=shape: made(section, size, i), error_of(section))


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    given = inputs(0, 1, 8, 64)
    found = {"x + x": Call(lambda: given[0] + given[0]), "fft_conv tkq": Call(lambda: ours(*given))}
    for name, call in common.find("fft_conv", ("torch",))[0].items():
        found[f"fft_conv {name}"] = Call(lambda call=call: call(*given))
    return found


SECTIONS = {"forward": SHAPES, "training": TRAINING, "circular": CIRCULAR}
BENCH = Bench(
    "fft_conv", __doc__,
    {section: lambda shapes, section=section: jobs(section, shapes) for section in SECTIONS},
    shapes=SECTIONS,
    quick=QUICK,
    calls=calls,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
