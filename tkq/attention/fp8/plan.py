"""From what was asked for to how the kernel is built: pure Python, tested without a GPU. No kernel depends on this
file."""
from __future__ import annotations

from dataclasses import replace

from tkq.attention.fp8.config import Fp8Config
from tkq.attention.fp8.spec import Fp8Spec, GatherPagesSpec, QuantizeSpec, TransposePackedSpec, TransposeSpec
from tkq.runtime.compile.recipe import Recipe

_BEFORE = {TransposeSpec: "transpose:TransposeValues", TransposePackedSpec: "packed:TransposePacked",
           GatherPagesSpec: "pages:GatherPages", QuantizeSpec: "quantize:QuantizeQkv"}


def recipe(spec, config: Fp8Config | None = None) -> Recipe:
    """Of the kernel of a configuration, without one of the planned one; or of those that transpose V, gather pages, or
    quantise."""
    if type(spec) in _BEFORE:
        return Recipe(f"tkq.attention.fp8.{_BEFORE[type(spec)]}", (spec,))
    config = config or plan(spec)
    return Recipe("tkq.attention.fp8.kernel:Fp8Forward", (spec.kernel(), config))


def plan(spec: Fp8Spec) -> Fp8Config:
    """The configuration, for sequences of any length.

    Timed at 16384 keys. At 64 columns the softmax takes longest, and a third consumer runs more of it under products;
    of blocks of 96 keys where P V of one block needs registers beside O: there, handing over late is
    slower. At 256 columns O and that P V do not fit beside S: it comes in two parts, in S's registers, and the
    other consumer's products run under a consumer's softmax.

    lse is of exponentials that are not rounded, so the rows' sums are, too, where lse is asked for. Elsewhere the
    tensor cores sum up P of sequences of equal lengths, and a share of its exponentials is made in software where these
    and conversions are what a step takes longest for: at 64 columns, and at 128 of fast sums with a causal mask."""
    spec = spec.kernel()
    config = _packed(spec) if spec.varlen else _of_equal_lengths(spec)
    if not (spec.lse or spec.varlen):
        config = replace(config, **_without_lse(spec))
    return config.check(spec.head_dim, spec.two_level, spec.varlen)


def _of_equal_lengths(spec):
    if spec.head_dim == 64:
        if spec.two_level:
            return Fp8Config(kv=96, consumers=3, stages=3, hand_over="products")
        return Fp8Config(consumers=3, stages=3)
    if spec.head_dim == 128:
        return Fp8Config()
    if spec.two_level:
        return Fp8Config(overlap=False, parts=2, q_stages=1, ping_pong=False)
    return Fp8Config(q_stages=1, ping_pong=False)


def _without_lse(spec):
    """What is other than where lse is asked for: handing over after the range check is slower beside exponentials in
    software at 64 columns. Where O and P V take most registers, few kernels of windows have any left for the sums."""
    wide = spec.head_dim == 256 or (spec.head_dim == 128 and spec.two_level)
    if wide and (spec.left or spec.right):
        return {}
    if spec.head_dim == 64:
        return dict(row_sum="mma", software_exp2=3 if spec.two_level else 2, hand_over="products")
    software = spec.head_dim == 128 and spec.causal and not spec.two_level
    return dict(row_sum="mma", software_exp2=4 if software else 0)


def _packed(spec):
    """Finding a task among sequences takes the producer more registers than three consumers leave it, or two by
    default; a tile of V is of one sequence, so its keys divide those that are transposed together. At 256 columns the
    rest is too few for an S under P V. At 128 of two levels the assembler moves all exponentials of some kernels before
    what hands over after the range check."""
    if spec.head_dim < 256:
        moved = spec.head_dim == 128 and spec.two_level
        return Fp8Config(hand_over="products" if moved else "range", registers=(40, 232))
    return Fp8Config(overlap=False, parts=2 if spec.two_level else 1, q_stages=1, ping_pong=False, registers=(40, 232))
