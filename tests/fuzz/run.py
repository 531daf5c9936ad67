"""Makes a call and says how it ended: ``Outcome``."""
import inspect
import os
import re
import time
import traceback
import warnings
from functools import partial
from typing import NamedTuple

import torch

import tkq
from tkq.runtime import arguments

from . import (
    judge,
    odd,
    oracles,
    oracles_attention,
    oracles_caches,
    oracles_linear,
    oracles_steps,
    usual,
    usual_caches,
    usual_float8,
)
from .kinds import kind_of

GOOD = "right", "refused"


class Operation(NamedTuple):
    """usual: makes arguments, of a ``Draw``. oracle: gives a list of ``Wanted`` for them. leaves: have gradients."""

    usual: object
    oracle: object
    leaves: tuple = ()


_NORMED = "x", "weight", "bias", "residual"
_ATTENDED = "q", "k", "v", "sinks"
OPERATIONS = {
    "softmax": Operation(usual.softmax, oracles.softmax, ("x",)),
    "log_softmax": Operation(usual.softmax, oracles.log_softmax, ("x",)),
    "cross_entropy": Operation(usual.cross_entropy, oracles.cross_entropy, ("logits",)),
    "cross_entropy_and_gradient": Operation(usual.cross_entropy_and_gradient, oracles.cross_entropy_and_gradient),
    "linear_cross_entropy": Operation(usual.linear_cross_entropy, oracles.linear_cross_entropy, ("x", "weight")),
    "rmsnorm": Operation(usual.norm, partial(oracles.norm, centred=False), _NORMED),
    "layernorm": Operation(usual.norm, partial(oracles.norm, centred=True), _NORMED),
    "rmsnorm_quant": Operation(usual.norm_quant, partial(oracles.norm_quant, centred=False)),
    "layernorm_quant": Operation(usual.norm_quant, partial(oracles.norm_quant, centred=True)),
    "quantize_fp8": Operation(usual.quantize_fp8, oracles.quantize_fp8),
    "gemm": Operation(usual.gemm, oracles.gemm, ("a", "b", "bias", "c")),
    "fp8_gemm": Operation(usual.fp8_gemm, oracles.fp8_gemm),
    "grouped_gemm": Operation(usual.grouped_gemm, oracles.grouped_gemm, ("a", "b")),
    "flash_attn": Operation(usual.flash_attn, oracles_attention.flash_attn, _ATTENDED),
    "flash_attn_varlen": Operation(usual.flash_attn_varlen, oracles_attention.flash_attn_varlen, _ATTENDED),
    "flash_attn_with_kvcache": Operation(usual_caches.flash_attn_with_kvcache, oracles_caches.flash_attn_with_kvcache),
    "kv_append": Operation(usual_caches.kv_append, oracles_caches.kv_append),
    "cascade_attention": Operation(usual_caches.cascade_attention, oracles_caches.cascade_attention),
    "merge_state": Operation(usual_caches.merge_state, oracles_caches.merge_state),
    "linear_attn": Operation(usual.linear_attn, oracles_linear.linear_attn, ("q", "k", "v", "g", "initial_state")),
    "gated_delta_rule": Operation(usual.gated_delta_rule, oracles_linear.gated_delta_rule,
                                  ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")),
    "mamba2_ssd": Operation(usual.mamba2_ssd, oracles_linear.mamba2_ssd, oracles_linear.SSD),
    "hedgehog": Operation(usual.hedgehog, oracles_linear.hedgehog, oracles_linear.HEDGEHOG),
    "based": Operation(usual.based, oracles_linear.based, ("q", "k", "v")),
    "causal_conv1d": Operation(usual.causal_conv1d, oracles_linear.causal_conv1d, oracles_linear.CONVOLVED),
    "scan": Operation(usual.scan, oracles_linear.scan, oracles_linear.SCANNED),
    "fft_conv": Operation(usual.fft_conv, oracles_linear.fft_conv, ("u", "k", "d", "pre_gate", "post_gate")),
    "causal_conv1d_step": Operation(usual.causal_conv1d_step, oracles_steps.causal_conv1d_step),
    "linear_attn_step": Operation(usual.linear_attn_step, oracles_steps.linear_attn_step),
    "gated_delta_rule_step": Operation(usual.gated_delta_rule_step, oracles_steps.linear_attn_step),
    "ssd_step": Operation(usual.ssd_step, oracles_steps.ssd_step),
    "rope": Operation(usual.rope, oracles.rope, ("x",)),
    "rope_qk": Operation(usual.rope_qk, oracles.rope_qk, ("q", "k")),
    "rope_cos_sin": Operation(usual.rope_cos_sin, oracles.rope_cos_sin),
    "swiglu": Operation(usual.swiglu, oracles.swiglu, ("gate", "up")),
    "geglu": Operation(usual.geglu, oracles.geglu, ("gate", "up")),
    "mla_decode": Operation(usual_caches.mla_decode, oracles_caches.mla_decode),
    "quantize_qkv": Operation(usual_float8.quantize_qkv, oracles_attention.quantize_qkv),
    "flash_attn_fp8": Operation(usual_float8.flash_attn_fp8, oracles_attention.flash_attn_fp8),
    "flash_attn_fp8_varlen": Operation(usual_float8.flash_attn_fp8_varlen, oracles_attention.flash_attn_fp8_varlen),
}

# What docstrings promise besides TypeError, ValueError and NotImplementedError.
PROMISED = [
    (IndexError, r"^dim: got"),
    (RuntimeError, r"is a leaf that requires a gradient|was made under torch.inference_mode|is one of several views|"
                   r"Inference tensors cannot be saved for backward|"
                   r"out is given and an argument requires a gradient|compute capability|share memory"),
]
LOST_GPU = re.compile("illegal|misaligned address|unspecified launch|CUDA error")
# Data that says where rows lie: what comes of lies is documented and has tests of its own; here it may not fail.
PLACES = "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "offsets", "state_indices", \
    "state_batch_indices", "num_accepted_tokens", "cache_indices", "cache_seqlens", "block_table", "slot_mapping", \
    "positions", "plan"


class Outcome(NamedTuple):
    """verdict: "right", "refused", or what is bad. what: which arguments were odd. detail: words."""

    operation: str
    verdict: str
    what: str
    detail: str = ""

    @property
    def good(self):
        return self.verdict in GOOD


class LostGPU(Exception):
    """After an illegal access every further call in the process fails."""


def call(name, device, seed):
    """The Outcome of one call. ``LostGPU`` (whose argument is an Outcome) ends the process's part."""
    op, draw = OPERATIONS[name], usual.Draw(device, seed)
    given, changed = op.usual(draw), {}
    for _ in range(draw.one(0, 1, 1, 1, 1, 2)):
        replace(name, given, changed, draw)
    gradients = not changed and draw.chance(0.5) and choose_leaves(op, given, draw)
    what = ", ".join(f"{a}={tag}" for a, tag in changed.items()) or ("plain, gradients" if gradients else "plain")
    verdict, detail = outcome_of(name, op, given, changed, draw, gradients)
    return Outcome(name, verdict, what, detail)


def run(names, device, calls, seed, seconds):
    """The outcomes of a number of calls, of each operation in turn."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    outcomes, end = [], time.monotonic() + seconds
    for i in range(calls):
        if time.monotonic() > end:
            break
        name = names[i % len(names)]
        try:
            outcomes.append(call(name, device, seed * 1_000_003 + i))
        except LostGPU as lost:
            outcomes.append(Outcome(name, "BAD: the GPU is lost", f"seed {seed * 1_000_003 + i}", str(lost)))
            break
    return outcomes


def replace(name, given, changed, draw):
    """Put an odd value in the place of an argument, and note it in changed."""
    for _ in range(50):
        argument = draw.one(*given)
        kind = kind_of(name, argument, given[argument])
        if argument in changed or kind is None:
            continue
        if kind != "tensor":
            legal, illegal = odd.REPLACED[kind]
            tag = draw.one(*legal, *illegal)
            if name == "rope_cos_sin" and tag == "2**31":
                continue  # a table of 16 GB and more, which some machines have
            given[argument], changed[argument] = {**legal, **illegal}[tag], tag
            return
        if given[argument] is None:
            given[argument], changed[argument] = another_tensor(draw), "a tensor"
            return
        tag = draw.one(*odd.TENSOR)
        if draw.few and tag in odd.NOT_ON_CUDA:
            continue
        try:
            given[argument] = odd.TENSOR[tag](given[argument], draw)
        except Exception:  # torch has no such form of this tensor
            continue
        changed[argument] = tag
        return


def another_tensor(draw):
    """Where usually None stands: of any type and shape."""
    make = draw.one(draw.normal, lambda *s: draw.integers(0, 4, *s), lambda *s: draw.integers(0, 4, *s).int(),
                    lambda *s: draw.normal(*s, dtype=torch.float32))
    return make(*draw.one((), (1,), (3,), (4,), (40,), (64,), (5, 64), (5, 32), (2, 6), (5, 1), (1, 32)))


def choose_leaves(op, given, draw):
    """Some of the operation's leaves require gradients from now on; True if there are any."""
    if given.get("scale_a") is not None or ("offsets" in given and given["b"].dim() == 2):
        return False
    found = [n for n in op.leaves if isinstance(given.get(n), torch.Tensor) and draw.chance(0.7)]
    for n in found:
        given[n] = given[n].detach().requires_grad_()
    given.update({n: off for n, off in (("out", None), ("inplace", False), ("inplace_backward", False)) if n in given})
    return bool(found)


_CACHES = "k_cache", "v_cache", "k_scale", "v_scale"  # and scales that kv_append finds


def outcome_of(name, op, given, changed, draw, gradients):
    """(verdict, detail)"""
    function = getattr(tkq, name)
    written = {n for n in ("out", "state", "conv_states", *_CACHES * (name == "kv_append"),
                           *("x", "logits") * (given.get("inplace") is True),
                           *("initial_state",) * (given.get("state_indices") is not None)) if n in given}
    before = {n: bits(x) for n, x in given.items() if isinstance(x, torch.Tensor) and n not in written}
    seen = {n: copied(x) if n in written and is_plain(x) else x for n, x in given.items()}
    try:
        found = function(**given)
        again = 0 if gradients or written - {"out"} or given.get("out") is not None else 3 * draw.few
        for _ in range(again):  # calls that came before go another way
            found = function(**given)
        if draw.few:
            torch.cuda.synchronize()
    except Exception as error:
        return refusal(error, function, changed)
    for n, x in before.items():
        if x is not None and not torch.equal(x, bits(given[n])):
            return "BAD: an input has changed", n
    wrongly = [f"{a}={tag}" for a, tag in changed.items() if tag in must_refuse(name, a, seen)]
    if wrongly:
        return "BAD: taken", ", ".join(wrongly)
    return judged(op, given, seen, changed, found, draw, gradients)


def refusal(error, function, changed):
    words = str(error)
    if LOST_GPU.search(words):
        raise LostGPU(words[:160]) from error
    if isinstance(error, (TypeError, ValueError, NotImplementedError)):
        if not changed:
            return "BAD: refused a usual call", f"{type(error).__name__}: {words[:200]}"
        if any(re.search(rf"(?<!\w){n}(?!\w)", words) for n in inspect.signature(function).parameters):
            return "refused", ""
        return "BAD: names no argument", f"{type(error).__name__}: {words[:160]}"
    if any(isinstance(error, kind) and re.search(pattern, words) for kind, pattern in PROMISED):
        return "refused", ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}tkq{os.sep}" in f.filename]
    at = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"BAD: {type(error).__name__}", f"{words[:160]!r}{at}"


def must_refuse(name, argument, given):
    kind = kind_of(name, argument, given[argument], replaced=True)
    refused = set(odd.REPLACED[kind][1]) if kind in odd.REPLACED else set()
    return refused - {"None"} if any(a.name == argument and a.none for a in arguments.table(name)) else refused


def judged(op, given, seen, changed, found, draw, gradients):
    if set(changed) & set(PLACES) or set(changed.values()) & {"3.4e38", "huge"}:
        return "right", ""  # nothing is compared
    if draw.few and (seen.get("softcap") or 0) > 1e3:
        return "right", ""  # on a GPU logits are good to softcap * 2^-22, as is documented: nothing is left to compare
    meta = [n for n, x in seen.items() if isinstance(x, torch.Tensor) and x.is_meta]
    if meta:
        if not set(changed.values()) <= {"meta", "elsewhere"}:
            return "right", ""
        seen = {n: torch.zeros(x.shape, dtype=x.dtype) if n in meta else x for n, x in seen.items()}
    if gradients:
        seen["leaves"] = {n: oracles.wide(x).requires_grad_() for n, x in given.items()
                          if isinstance(x, torch.Tensor) and x.requires_grad}
    try:
        wanted = op.oracle(seen)
    except Exception as error:
        return "BAD: taken, and the oracle cannot say what it means", f"{type(error).__name__}: {str(error)[:120]}"
    wrong = judge.results(found, wanted)
    if wrong:
        return "BAD: wrong result", wrong
    return judged_gradients(given, seen["leaves"], found, wanted, draw) if gradients else ("right", "")


def judged_gradients(given, leaves, found, wanted, draw):
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    pairs = [(f, w) for f, w in zip(found, wanted) if f.requires_grad and w.value.requires_grad]
    if not pairs or not all(torch.isfinite(w.value[... if w.rows is None else w.rows]).all() for _, w in pairs):
        return "right", ""
    above = [draw.normal(*f.shape, dtype=f.dtype) for f, _ in pairs]
    for (_, w), dy in zip(pairs, above):
        if w.rows is not None:
            dy[~w.rows.to(dy.device)] = 0
    try:
        got = torch.autograd.grad([f for f, _ in pairs], [given[n] for n in leaves], above, allow_unused=True)
        if draw.few:
            torch.cuda.synchronize()
    except Exception as error:
        if LOST_GPU.search(str(error)):
            raise LostGPU(str(error)[:160]) from error
        return f"BAD: {type(error).__name__} in the backward", str(error)[:200]
    right = torch.autograd.grad([w.value for _, w in pairs], list(leaves.values()), [oracles.wide(x) for x in above],
                                allow_unused=True)
    coarsest = max(judge.ROUNDING[x.dtype] for x in given.values()
                   if isinstance(x, torch.Tensor) and x.dtype in judge.ROUNDING)
    for n, g, r in zip(leaves, got, right):
        if g is None and r is not None and r.abs().sum() > 0:
            return "BAD: a gradient is missing", n
        if g is None or r is None or not torch.isfinite(r).all():
            continue
        dtype = given[n].dtype
        tolerance = 24 * coarsest / judge.ROUNDING[dtype]
        if "softmax_scale" in given and n != "v":
            tolerance = "beside", tolerance, coarsest / 4 * oracles_attention.slope(given, above[0])
        if n.endswith("_factor"):
            tolerance = "beside", tolerance, coarsest / 2 * oracles_linear.of_factor(n, given, above[0], pairs[0][1])
        wrong = judge.tensor(g, oracles.Wanted(f"d{n}", r, tolerance, dtype))
        if wrong:
            return "BAD: wrong gradient", wrong
    return "right", ""


def is_plain(x):
    return isinstance(x, torch.Tensor) and not (x.is_quantized or x.is_meta or x.is_nested or
                                                x.layout is not torch.strided)


def copied(x):
    """A copy, or x itself where torch can make none, which no call takes: float8 with a negation pending."""
    try:
        return x.detach().clone()
    except NotImplementedError:
        return x


def bits(x):
    """A copy of what x has, to be compared; None where it cannot be read."""
    if not is_plain(x):
        return None
    try:
        x = x.detach().cpu().contiguous()
        return (torch.view_as_real(x) if x.is_complex() else x.reshape(-1).view(torch.uint8)).clone()
    except Exception:  # of a type that torch cannot copy
        return None
