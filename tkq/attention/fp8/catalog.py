"""The kernels of float8 attention that tkq itself can choose, and what their machine code must show.

Masks, descales, dtypes of results and head dims combine freely: their kernels are compiled when they are first asked
for. Listed are the plans of every width, both ways to accumulate, with and without all descales, and windows; of packed
sequences those of every width with all descales."""
import itertools

from tkq.attention.fp8.plan import plan, recipe
from tkq.attention.fp8.spec import (
    ACCUMULATE,
    WIDTHS,
    Fp8Spec,
    GatherPagesSpec,
    QuantizeSpec,
    TransposePackedSpec,
    TransposeSpec,
)
from tkq.runtime.compile.expectation import Expectation
from tkq.runtime.compile.recipe import Shipped


def shipped():
    """Names are unique: flash_attn_fp8, the head dim, choices; and those that transpose V."""
    kernels = [Shipped(_name(spec), recipe(spec), _expectation(spec), spec == Fp8Spec(128, True, descales="qkv"))
               for spec in _specs()]
    for keys_contiguous, load in ((False, "STG.E"), (True, "STG.E.128")):
        name = "flash_attn_fp8_" + ("reorder" if keys_contiguous else "transpose")
        kernels.append(Shipped(name, recipe(TransposeSpec(keys_contiguous)),
                               Expectation(instructions=("LDG.E.128", load), registers=64)))
    kernels.append(Shipped("flash_attn_fp8_varlen_gather", recipe(GatherPagesSpec()),
                           Expectation(instructions=("LDG.E.128", "STG.E.128"), registers=64)))
    for used in (False, True):
        kernels.append(Shipped("flash_attn_fp8_varlen_transpose" + "_seqused_k" * used,
                               recipe(TransposePackedSpec(used)),
                               Expectation(instructions=("LDG.E.128", "STG.E", "SHFL"), registers=64)))
    for dtype in ("bf16", "fp16", "fp32"):
        kernels.append(Shipped(f"quantize_qkv_{dtype}", recipe(QuantizeSpec(dtype)), Expectation(
            instructions=("LDG.E.128", "STG.E.64", "F2FP.SATFINITE.E4M3"), registers=64,
            others=(("find", Expectation(instructions=("LDG.E.128", "REDUX", "REDG.E.MAX"), registers=64)),))))
    before = Expectation(instructions=("LDG.E.128",), registers=80)
    for width in WIDTHS:
        kernels.append(Shipped(f"quantize_qkv_bf16_rotated_smoothed_d{width}",
                               recipe(QuantizeSpec("bf16", width, True)), Expectation(
            instructions=("LDG.E.128", "F2FP.SATFINITE.E4M3"), registers=80,
            others=tuple((f"cutlass_{name}_", before) for name in ("add", "average", "find")))))
    return kernels


def _specs():
    for dim, accumulate, causal, descales in itertools.product(WIDTHS, ACCUMULATE, (False, True), ("", "qkv")):
        yield Fp8Spec(dim, causal, False, "bf16", accumulate, descales)
    for accumulate, causal in itertools.product(ACCUMULATE, (False, True)):
        yield Fp8Spec(128, causal, True, "fp16", accumulate, "kv")
    yield Fp8Spec(128, True, left=True, long_window=True, descales="qkv")
    yield Fp8Spec(128, left=True, right=True, descales="qkv")
    for dim, accumulate, causal in itertools.product(WIDTHS, ACCUMULATE, (False, True)):
        yield Fp8Spec(dim, causal, False, "bf16", accumulate, "qkv", varlen=True)
    yield Fp8Spec(128, True, descales="qkv", varlen=True, seqused_k=True)


def _name(spec):
    flags = [flag for flag in ("causal", "left", "long_window", "right", "lse", "seqused_k") if getattr(spec, flag)]
    name = "flash_attn_fp8_varlen" if spec.varlen else "flash_attn_fp8"
    return "_".join((name, f"d{spec.head_dim}", spec.out, spec.accumulate, *flags,
                     *[f"descale_{spec.descales}"] * bool(spec.descales)))


def _expectation(spec):
    """Products of float8: of the first S, of a step and of the end, for each 32 of their sum; with row_sum="mma"
    those with ones, too; P rounded two at a time. Registers handed from the producer to the consumers."""
    config = plan(spec)
    products = 2 * (spec.head_dim + (config.parts + (config.row_sum == "mma")) * config.kv) // 32
    loads = ("UTMALDG.3D",) if spec.varlen else ("UTMALDG.4D",)
    return Expectation(tensor=products, instructions=(*loads, "USETMAXREG", "QGMMA", "F2FP.SATFINITE.E4M3",
                                                      "STG.E.128"), absent=("HGMMA",))
