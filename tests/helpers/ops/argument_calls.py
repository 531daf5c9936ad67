"""For each public function a call by keywords, and the values that an argument of its table refuses.

`call(name, device)` gives the keywords of a call that is right; `refused(argument)` the values that have to be refused
in the place of one argument, with the error that the docstring promises.
"""
import fractions
import inspect
import os

import numpy
import torch

import tkq
from tests.helpers.ops.every_op import BF16, F8, F32, INT, Maker
from tkq.runtime import arguments

FUNCTIONS = [name for name in arguments.names() if name not in ("tune", "prefetch", "create_block_mask")]
HUGE = 10**5000  # of which Python makes no text


def call(name: str, device="cpu") -> dict:
    """Keywords of a right call: tensors, and what has no default."""
    t = Maker(device, 16, 0, BF16)
    x, vector = dict(x=t(16, 64)), dict(weight=t(64), bias=t(64), residual=t(16, 64))
    classes, flat = t.integers(0, 64, 16, dtype=torch.int64), t(16, 4, 64)
    starts = t.starts(3)
    return {
        "softmax": lambda: x,
        "log_softmax": lambda: x,
        "rmsnorm": lambda: x | vector,
        "layernorm": lambda: x | vector,
        "rmsnorm_quant": lambda: x | vector,
        "layernorm_quant": lambda: x | vector,
        "cross_entropy": lambda: dict(logits=t(16, 64), target=classes, weight=t.ones(64)),
        "cross_entropy_and_gradient": lambda: dict(logits=t(16, 64), target=classes, weight=t.ones(64)),
        "linear_cross_entropy": lambda: x | dict(weight=t(64, 64), target=classes, class_weight=t.ones(64)),
        "rope": lambda: dict(x=flat, cos=t(64, 32, dtype=F32), sin=t(64, 32, dtype=F32), cu_seqlens=starts),
        "rope_qk": lambda: dict(q=t(1, 16, 4, 64), k=t(1, 16, 2, 64), cos=t(64, 32, dtype=F32),
                                sin=t(64, 32, dtype=F32), position_ids=t.integers(0, 64, 1, 16)),
        "rope_cos_sin": lambda: dict(seqlen=16, dim=64, device=device, inv_freq=t.ones(32)),
        "swiglu": lambda: dict(gate=t(16, 64), up=t(16, 64)),
        "geglu": lambda: dict(gate=t(16, 64), up=t(16, 64)),
        "gemm": lambda: dict(a=t(16, 64), b=t(64, 32), bias=t(32)),
        "fp8_gemm": lambda: dict(a=t(16, 64, dtype=F8), b=t(32, 64, dtype=F8).t(), scale_a=t.ones(1), scale_b=t.ones(1),
                                 bias=t(32)),
        "quantize_fp8": lambda: x,
        "grouped_gemm": lambda: dict(a=t(16, 64), b=t(3, 64, 32), offsets=t.ends(3)),
        "flash_attn": lambda: dict(q=t(1, 16, 4, 64), k=t(1, 16, 4, 64), v=t(1, 16, 4, 64), sinks=t(4, dtype=F32)),
        "flash_attn_fp8": lambda: dict(
            q=t(2, 16, 4, 64, dtype=F8), k=t(2, 16, 2, 64, dtype=F8), v=t(2, 16, 2, 64, dtype=F8),
            q_descale=t.ones(2, 2), k_descale=t.ones(2, 2), v_descale=t.ones(2, 2)),
        "flash_attn_fp8_varlen": lambda: dict(
            q=t(16, 4, 64, dtype=F8), k=t(16, 2, 64, dtype=F8), v=t(16, 2, 64, dtype=F8), cu_seqlens_q=starts,
            cu_seqlens_k=starts, max_seqlen_q=16, max_seqlen_k=16, q_descale=t.ones(3, 2), k_descale=t.ones(3, 2),
            v_descale=t.ones(3, 2), seqused_k=torch.ones(3, dtype=INT, device=device)),
        "quantize_qkv": lambda: dict(q=t(2, 16, 4, 64), k=t(2, 16, 2, 64), v=t(2, 16, 2, 64),
                                     cos=t(16, 32, dtype=F32), sin=t(16, 32, dtype=F32)),
        "flash_attn_with_kvcache": lambda: dict(
            q=t(2, 1, 4, 64), k_cache=t(6, 8, 2, 64, dtype=F8), v_cache=t(6, 8, 2, 64, dtype=F8),
            cache_seqlens=t.integers(0, 17, 2), block_table=t.integers(0, 6, 2, 2), sinks=t(4, dtype=F32),
            k_descale=t.ones(2), v_descale=t.ones(2)),
        "plan_decode": lambda: dict(cache_seqlens=t.integers(0, 17, 2), num_heads_q=4, num_heads_kv=1, head_dim=64,
                                    cu_seqlens_q=torch.tensor([0, 3, 5], dtype=INT, device=device), total_q=5),
        "cascade_attention": lambda: dict(
            q=t(2, 1, 4, 64), k_cache=t(6, 8, 2, 64, dtype=F8), v_cache=t(6, 8, 2, 64, dtype=F8),
            block_table=torch.tensor([[4, 1], [4, 2]], dtype=INT, device=device), cache_seqlens=t.integers(9, 17, 2),
            prefix_len=8, sinks=t(4, dtype=F32), k_descale=t.ones(2), v_descale=t.ones(2), cascade=True),
        "plan_cascade": lambda: dict(cache_seqlens=t.integers(9, 17, 2), num_heads_q=4, num_heads_kv=1, head_dim=64,
                                     prefix_len=8, page_size=8, cu_seqlens_q=torch.tensor(
                                         [0, 3, 5], dtype=INT, device=device), total_q=5),
        "mla_decode": lambda: dict(q=t(2, 1, 4, 576), kv_cache=t(6, 8, 576), block_table=t.integers(0, 6, 2, 2),
                                   cache_seqlens=t.integers(0, 17, 2), softmax_scale=0.1),
        "check_plan": lambda: dict(plan=tkq.plan_decode(t.integers(0, 17, 2), 4, 2, 64)),
        "kv_append": lambda: dict(
            k=t(2, 2, 64), v=t(2, 2, 64), k_cache=t(6, 8, 2, 64, dtype=F8), v_cache=t(6, 8, 2, 64, dtype=F8),
            q=t(2, 4, 64), k_scale=t.ones(2), v_scale=t.ones(2),
            slot_mapping=torch.tensor([47, -1], dtype=INT, device=device), cos=t(20, 32, dtype=F32),
            sin=t(20, 32, dtype=F32), positions=t.integers(0, 20, 2)),
        "merge_state": lambda: dict(o_a=t(3, 4, 64), lse_a=t(4, 3, dtype=F32), o_b=t(3, 4, 64),
                                    lse_b=t(4, 3, dtype=F32)),
        "flex_attention": lambda: dict(query=t(1, 4, 16, 64), key=t(1, 4, 16, 64), value=t(1, 4, 16, 64)),
        "linear_attn": lambda: dict(q=t(1, 16, 4, 64), k=t(1, 16, 4, 64), v=t(1, 16, 4, 64), g=-t.ones(1, 16, 4),
                                    initial_state=t(3, 4, 64, 64, dtype=F32), cu_seqlens=starts),
        "gated_delta_rule": lambda: dict(q=t(1, 16, 4, 64), k=t(1, 16, 4, 64) / 16, v=t(1, 16, 4, 64),
                                         g=-t.ones(1, 16, 4), beta=t.ones(1, 16, 4) / 2,
                                         initial_state=t(3, 4, 64, 64, dtype=F32), cu_seqlens=starts),
        "mamba2_ssd": lambda: dict(x=t(1, 16, 4, 64), dt=t(1, 16, 4, dtype=F32).abs(), A=-t.ones(4),
                                   B=t(1, 16, 2, 64) / 8, C=t(1, 16, 2, 64), D=t.ones(4),
                                   z=t(1, 16, 4, 64), dt_bias=t.ones(4), initial_states=t(1, 4, 64, 64, dtype=F32)),
        "hedgehog": lambda: dict(q=t(1, 16, 4, 64), k=t(1, 16, 4, 64), v=t(1, 16, 4, 64), q_map=t(4, 64, 32),
                                 k_map=t(4, 64, 32), linear_factor=t.ones(4) / 2, window_factor=t.ones(4)),
        "based": lambda: dict(q=t(1, 16, 4, 16), k=t(1, 16, 4, 16), v=t(1, 16, 4, 64)),
        "causal_conv1d": lambda: dict(x=t(1, 16, 24), weight=t(24, 4), bias=t(24), initial_state=t(3, 24, 3),
                                      cu_seqlens=starts),
        "scan": lambda: dict(a=t(2, 16, 24), b=t(2, 16, 24), initial_state=t(2, 24)),
        "causal_conv1d_step": lambda: dict(x=t(3, 24), conv_states=t(5, 24, 3), weight=t(24, 4), bias=t(24),
                                           cache_indices=torch.tensor([4, -1, 0], dtype=INT, device=device)),
        "fft_conv": lambda: dict(u=t(3, 4, 24), k=t(4, 24, dtype=F32), d=t(4), pre_gate=t(3, 4, 24),
                                 post_gate=t(3, 4, 24)),
        "linear_attn_step": lambda: _tokens(t) | dict(state=t(6, 4, 64, 64, dtype=F32)),
        "gated_delta_rule_step": lambda: _tokens(t) | dict(beta=t.ones(2, 1, 4) / 2,
                                                           state=t(6, 4, 64, 64, dtype=F32)),
        "ssd_step": lambda: dict(state=t(2, 4, 32, 64, dtype=F32), x=t(2, 4, 32), dt=t.ones(2, 4), A=-t.ones(4),
                                 B=t(2, 4, 64), C=t(2, 4, 64), D=t(4), z=t(2, 4, 32), dt_bias=t.ones(4)),
        "flash_attn_varlen": lambda: dict(q=flat, k=t(16, 4, 64), v=t(16, 4, 64), cu_seqlens_q=starts,
                                          cu_seqlens_k=starts, max_seqlen_q=16, max_seqlen_k=16,
                                          seqused_k=torch.ones(3, dtype=INT, device=device)),
    }[name]()


def _tokens(t):
    return dict(q=t(2, 1, 4, 64), k=t(2, 1, 4, 64) / 16, v=t(2, 1, 4, 64), g=-t.ones(2, 1, 4),
                state_indices=t.integers(0, 3, 2) * 2)


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, as a view with a pending negation; float8, which torch cannot negate, as it is."""
    return torch._neg_view(x.neg()) if x.itemsize > 1 else x


def run(name: str, given: dict):
    """A pool of states, which a call writes to, is copied: that of the next call is the same. Of a plan of several
    parts the tensors."""
    if isinstance(given.get("state"), torch.Tensor):
        given = given | {"state": given["state"].clone()}
    found = getattr(tkq, name)(**given)
    return tuple(x for x in found if isinstance(x, torch.Tensor)) if name == "plan_cascade" else found


def signature(name: str):
    return inspect.signature(getattr(tkq, name)).parameters


NO_NUMBERS = (True, False, numpy.True_, "1", b"1", [1.0], {}, 1j, object(), torch.tensor(1.0), torch.tensor([1.0, 2.0]),
              numpy.array([1.0, 2.0]))
NO_FLAGS = (0, 1, 2, 1.0, "yes", "", [], object(), numpy.True_, float("nan"), torch.tensor(True),
            torch.tensor([True, False]), numpy.array([True, False]))
NO_WORDS = (1, True, b"row", ["row"], {}, object(), torch.tensor(1), numpy.array(["row", "1x128"]))
NO_DTYPES = ("bf16", "float32", float, 5, [F32], numpy.float32, torch.tensor(1.0))


def refused(argument):
    """(value, error) of all that is to be refused in an argument's place."""
    values = []
    if not argument.none:
        values.append((None, TypeError))
    values += [(value, error) for value, error in getattr(_Refused, argument.kind)(argument)
               if not (argument.dtypes and argument.kind == "integer" and isinstance(value, torch.Tensor))]
    return values


class _Refused:
    @staticmethod
    def flag(_):
        return [(value, TypeError) for value in NO_FLAGS]

    @staticmethod
    def number(a):
        values = [(value, TypeError) for value in NO_NUMBERS]
        values += [(value, ValueError) for value in (float("nan"), float("inf"), -float("inf"), HUGE, -HUGE,
                                                     fractions.Fraction(HUGE))]
        if a.end < 1e300:
            values += [(1e39, ValueError), (10**39, ValueError), (numpy.float64(1e39), ValueError)]
        if a.low is not None:
            values += [(a.low - 1, ValueError), (a.low - 1e-3, ValueError)] + [(a.low, ValueError)] * a.above
        return values + ([] if a.high is None else [(a.high + 1, ValueError)])

    @staticmethod
    def integer(a):
        values = [(value, TypeError) for value in (*NO_NUMBERS, 1.0, 2.5, numpy.float32(1), float("nan"))]
        if a.low is not None:
            values.append((a.low - 1, ValueError))
        if a.high is not None:
            values += [(a.high + 1, ValueError), (HUGE, ValueError)]
        return values

    @staticmethod
    def choice(a):
        return [(value, TypeError) for value in NO_WORDS] + [
            (value, a.error) for value in ("", "nonsense", "a\0b", "x" * 10000)]

    @staticmethod
    def function(_):
        return [(value, TypeError) for value in (1, True, ["relu"], object(), max, os.system, str, torch.tensor(1))] + [
            (value, ValueError) for value in ("nonsense", ":", "os:system", "math:sqrt", "a\0b", lambda x: x)]

    @staticmethod
    def dtype(a):
        return [(value, TypeError) for value in (*NO_DTYPES, torch.float64, torch.int32, torch.complex64, torch.bool)]

    @staticmethod
    def window(_):
        return [(value, TypeError) for value in (None, 5, (1,), (1, 2, 3), "12", (1.0, 2), ("a", 1), (True, False),
                                                 {1: 2, 3: 4}, torch.tensor([1, 2]), (torch.tensor(1), 1))] + [
            (value, ValueError) for value in ((-2, 0), (1 << 30, 0), (0, 10**30))]

    @staticmethod
    def limits(_):
        return [(value, TypeError) for value in (None, 5, (1.0,), (1, 2, 3), "12", (None, 1.0), ("a", 1), (0.0, True),
                                                 {0.0: 1.0, 2.0: 3.0}, torch.tensor([1, 2]), (torch.tensor(1), 1))] + [
            (value, ValueError) for value in ((1.0, 0.5), (float("nan"), 1.0), (0.0, float("nan")),
                                           (0.0, 1e39), (-1e39, 0.0))]

    @staticmethod
    def device(_):
        return [(value, TypeError) for value in ([], 1.5, True)] + [
            (value, ValueError) for value in ("nonsense", "cuda:99", "cpu:5", "mps", "xpu:0")]

    @staticmethod
    def tensor(a):
        x = torch.ones(4, 64)
        not_tensors = [1.5, "x", [1.0], object(), numpy.ones((4, 64), dtype=numpy.float32)]
        not_dense = [x.to_sparse(), x.to_sparse_csr(), torch.nested.nested_tensor([x, x]),
                     torch.nested.nested_tensor([x, x], layout=torch.jagged), x.to_mkldnn()]
        others = {torch.float64, torch.int8, torch.bool, torch.complex64} - set(a.types)
        return [(value, TypeError) for value in (*not_tensors, *not_dense, *(x.to(dtype) for dtype in others))]
