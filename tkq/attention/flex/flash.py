"""flash_attn with functions of the user's: flex_attention's kernels, on (B, S, H, D)."""
from typing import Any, NamedTuple

import torch

from tkq.attention.arguments import OPEN, check_operands, limits, numbers
from tkq.attention.flex.attend import NOTHING, Asked, attend, given_of, recorded_again, records
from tkq.attention.flex.check import check_columns, scale_of
from tkq.attention.flex.launch import calls
from tkq.runtime.call import check, ops

OP = "flash_attn"
WITH = "with score_mod, mask_mod or block_mask"


class Functions(NamedTuple):
    score_mod: Any
    mask_mod: Any
    block_mask: Any


class Options(NamedTuple):
    """Of flash_attn, as they came."""

    causal: bool
    softmax_scale: Any
    window_size: Any
    softcap: Any
    deterministic: bool


def attention(tensors: tuple, functions: Functions, options: Options):
    """(o, lse). tensors: q, k, v, sinks.

    Raises:
        ValueError: mask_mod beside block_mask, which has its own.
        NotImplementedError: options that these kernels do not have, by name.
    """
    qkv = tensors[:3]
    recorded = not ops.traced() and records(qkv)
    given = _given(tensors, functions, options)
    found = given[0] and (recorded_again(qkv, given[0], True) if recorded else calls.take(*given[0]))
    return found or _attended(tensors, functions, options, given)


def _given(tensors, functions, options):
    """What such a call is looked up by, as of ``given_of``; Nones for options that may be refused."""
    qkv, sinks = tensors[:3], tensors[3]
    score_mod, mask_mod, block_mask = functions
    causal, scale, window, softcap, deterministic = options
    if ops.traced() or sinks is not None or causal or window is not OPEN or type(softcap) is not float or deterministic:
        return NOTHING
    if mask_mod is not None and block_mask is not None:
        return NOTHING
    score_mod = capped(score_mod, softcap) if softcap else score_mod
    return given_of(qkv, (True, scale, OP), score_mod, mask_mod, block_mask)


def _attended(tensors, functions, options, given):
    q, k, v, sinks = tensors
    check_operands(OP, q, k, v, sinks, 4)
    check.refuse_tangent(OP, q=q, k=k, v=v)
    scale, softcap = numbers[OP](options.softmax_scale, options.softcap)
    _refuse(sinks, options)
    check_columns(q, v, ("q", "v"), op=OP, when=WITH)
    if functions.mask_mod is not None and functions.block_mask is not None:
        raise ValueError(f"{OP}: mask_mod and block_mask: allowed is one of them; a block_mask has its mask_mod")
    score_mod = capped(functions.score_mod, softcap) if softcap else functions.score_mod
    asked = Asked(score_mod, functions.mask_mod, functions.block_mask, scale_of(scale, q.shape[3]), OP, given, True)
    return attend((q, k, v), asked, True)


def _refuse(sinks, options):
    left, right = limits[OP](options.window_size)
    for name, there in (("causal", options.causal), ("window_size", left >= 0 or right >= 0),
                        ("sinks", sinks is not None), ("deterministic", options.deterministic)):
        if there:
            instead = "; say it in mask_mod" if name in ("causal", "window_size") else ""
            raise NotImplementedError(f"{OP}: {name} {WITH} is not supported{instead}")


def capped(score_mod, softcap):
    """softcap * tanh(score / softcap), then score_mod."""
    def score(score, b, h, q_idx, kv_idx):
        score = softcap * torch.tanh(score / softcap)
        return score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)

    return score
