"""Every op of tkq, in one list: a call of it, on small tensors that are made here.

What holds for all ops is tested over this list (tests/cpu/runtime/test_every_op_cpu.py,
tests/gpu/runtime/test_every_op.py); a function or a custom op that is not in it fails there.
"""
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tkq
from tests.helpers.ops import attention_calls as attention
from tests.helpers.ops import cache_calls as caches
from tests.helpers.ops import packed_calls as packed
from tests.helpers.ops import step_calls as steps

BF16, F8, F32, INT = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32


@dataclass(frozen=True)
class Case:
    """call: the function on the tensors, which `tensors(make)` gives by name.

    leaves: the names of those that have gradients.
    cast: the names of those that torch.autocast casts; the result then has autocast's type, or is float32.
    graphs: how many torch.compile makes for all numbers of rows.
    alone: the function alone, where the call adds copies of what the function writes to.
    exact: False where gradients are added in an order that varies, a call whose gradient is recorded rounds more, or
        one gradient rounds otherwise where another is asked for.
    """

    name: str
    tensors: Callable
    call: Callable
    leaves: tuple = ()
    cast: tuple = ()
    graphs: int = 1
    exact: bool = True
    alone: Callable | None = None

    @property
    def function(self) -> str:
        """The public function's name."""
        return self.name.partition(",")[0]

    def inputs(self, device="cpu", rows: int = 24, seed: int = 0, grad: bool = False, dtype=BF16) -> dict:
        """Tensors by name. rows: of x, logits, a; tokens of a sequence. seed: other numbers, other lengths and classes,
        the same shapes. dtype: of those that are bfloat16 otherwise."""
        made = self.tensors(Maker(device, rows, seed, dtype))
        for name in self.leaves if grad else ():
            made[name].requires_grad_()
        return made


class Maker:
    """Makes tensors: calling it gives random numbers."""

    def __init__(self, device, rows, seed, dtype):
        self.device, self.rows, self.dtype = device, rows, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype=None) -> Tensor:
        made = torch.randn(shape, generator=self._generator)
        return made.to(dtype or self.dtype).to(self.device)

    def integers(self, least, below, *shape, dtype=INT) -> Tensor:
        return torch.randint(least, below, shape, generator=self._generator).to(dtype).to(self.device)

    def ones(self, *shape) -> Tensor:
        return torch.ones(shape, device=self.device)

    def ends(self, groups) -> Tensor:
        """Where each of some groups of the rows ends: all rows are in one."""
        inner = torch.randint(0, self.rows + 1, (groups - 1,), generator=self._generator).sort().values
        return torch.cat((inner, torch.tensor([self.rows]))).to(INT).to(self.device)

    def rows_apart(self, low, high) -> Tensor:
        """The integers from low to below high, but for one, in any order: none of them twice."""
        return (torch.randperm(high - low, generator=self._generator)[1:] + low).to(INT).to(self.device)

    def starts(self, sequences) -> Tensor:
        """cu_seqlens."""
        return torch.cat((torch.zeros(1, dtype=INT, device=self.device), self.ends(sequences)))


def _rows(t):
    return dict(x=t(t.rows, 64), weight=t(64))


def _with_residual(t):
    return dict(**_rows(t), residual=t(t.rows, 64))


def _with_bias(t):
    return dict(**_rows(t), bias=t(64))


def _heads(t):
    return dict(x=t(2, t.rows, 4, 64), weight=t(4, 64))


def _one(t):
    return dict(x=t(t.rows, 64))


def _classes(t):
    return dict(logits=t(t.rows, 64), target=t.integers(0, 64, t.rows))


def _layer(t):
    return dict(x=t(t.rows, 64), weight=t(96, 64), target=t.integers(0, 96, t.rows))


def _gate_and_up(t):
    return dict(gate=t(t.rows, 64), up=t(t.rows, 64))


def _rotary(t):
    return dict(x=t(2, t.rows, 4, 64), cos=t(64, 32, dtype=F32), sin=t(64, 32, dtype=F32))


def _rotary_qk(t):
    return dict(q=t(2, t.rows, 4, 64), k=t(2, t.rows, 2, 64), cos=t(64, 32, dtype=F32), sin=t(64, 32, dtype=F32))


def _rotary_packed(t):
    return dict(x=t(t.rows, 4, 64), cos=t(64, 32, dtype=F32), sin=t(64, 32, dtype=F32), cu_seqlens=t.starts(3))


def _qkv(t):
    return dict(q=t(2, t.rows, 4, 64), k=t(2, t.rows, 4, 64), v=t(2, t.rows, 4, 64))


def _qkv_packed(t):
    return dict(q=t(t.rows, 4, 64), k=t(t.rows, 4, 64), v=t(t.rows, 4, 64), cu_seqlens_q=t.starts(3),
                cu_seqlens_k=t.starts(3))


def _gated_heads(t):
    return dict(**_qkv(t), g=-t(2, t.rows, 4, dtype=F32).abs())


def _gated_heads_shared(t):
    return dict(q=t(2, t.rows, 2, 64), k=t(2, t.rows, 2, 64), v=t(2, t.rows, 4, 64), g=-t(4, dtype=F32).abs(),
                initial_state=t(2, 4, 64, 64, dtype=F32))


def _unit_keys(t):
    """The delta rule's: keys of length 1, beta from 0 to 1."""
    k = torch.nn.functional.normalize(t(2, t.rows, 2, 64).float(), dim=-1).to(t.dtype)
    return dict(q=t(2, t.rows, 2, 64), k=k, v=t(2, t.rows, 4, 64), g=-t(2, t.rows, 4, dtype=F32).abs(),
                beta=t(2, t.rows, 4, dtype=F32).sigmoid())


def _unit_keys_with_state(t):
    return dict(**_unit_keys(t), initial_state=t(2, 4, 64, 64, dtype=F32))


def _ssd(t):
    """Two groups of B and C for four heads; dt of 16 bits."""
    return dict(x=t(2, t.rows, 4, 64), dt=t(2, t.rows, 4, dtype=BF16), A=-t(4, dtype=F32).exp(),
                B=t(2, t.rows, 2, 64) / 8, C=t(2, t.rows, 2, 64) / 8, D=t(4, dtype=F32), dt_bias=t(4, dtype=F32))


def _ssd_with_states(t):
    return dict(**_ssd(t), z=t(2, t.rows, 4, 64), initial_states=t(2, 4, 64, 64, dtype=F32))


def _sixteen(t):
    """q and k of 16 columns; two heads of v share them."""
    return dict(q=t(2, t.rows, 2, 16), k=t(2, t.rows, 2, 16), v=t(2, t.rows, 4, 64))


def _heads_and_maps(t):
    return dict(_qkv(t), q_map=t(4, 64, 32) / 8, k_map=t(4, 64, 32) / 8, linear_factor=t.ones(4) / 2,
                window_factor=t.ones(4))


def _matrices(t):
    return dict(a=t(t.rows, 64), b=t(64, 32))


def _matrices_and_bias(t):
    return dict(**_matrices(t), bias=t(32, dtype=BF16))


def _groups(t):
    return dict(a=t(t.rows, 64), b=t(3, 64, 32), offsets=t.ends(3))


def _float8(t):
    return dict(a=t(t.rows, 64, dtype=F8), b=t(32, 64, dtype=F8), scale_a=t.ones(t.rows, 1), scale_b=t.ones(1, 32))


CASES = {case.name: case for case in (
    Case("rmsnorm", _rows, lambda x, weight: tkq.rmsnorm(x, weight), ("x", "weight")),
    Case("rmsnorm, with a residual", _with_residual,
         lambda x, weight, residual: tkq.rmsnorm(x, weight, residual=residual, prenorm=True),
         ("x", "weight", "residual")),
    Case("rmsnorm, of heads", _heads, lambda x, weight: tkq.rmsnorm(x, weight), ("x", "weight")),
    Case("layernorm", _with_bias, lambda x, weight, bias: tkq.layernorm(x, weight, bias), ("x", "weight", "bias")),
    Case("rmsnorm_quant", _rows, lambda x, weight: tkq.rmsnorm_quant(x, weight)),
    Case("layernorm_quant", _with_bias,
         lambda x, weight, bias: tkq.layernorm_quant(x, weight, bias, granularity="1x128")),
    Case("softmax", _one, lambda x: tkq.softmax(x), ("x",)),
    Case("log_softmax", _one, lambda x: tkq.log_softmax(x), ("x",)),
    Case("cross_entropy", _classes, lambda logits, target: tkq.cross_entropy(logits, target), ("logits",)),
    Case("cross_entropy, of each row", _classes,
         lambda logits, target: tkq.cross_entropy(logits, target, reduction="none"), ("logits",)),
    Case("cross_entropy_and_gradient", _classes, lambda logits, target: tkq.cross_entropy_and_gradient(logits, target)),
    Case("linear_cross_entropy", _layer, lambda x, weight, target: tkq.linear_cross_entropy(x, weight, target),
         ("x", "weight"), ("x", "weight"), exact=False),
    Case("linear_cross_entropy, of each row", _layer,
         lambda x, weight, target: tkq.linear_cross_entropy(x, weight, target, reduction="none"),
         ("x", "weight"), ("x", "weight"), exact=False),
    Case("swiglu", _gate_and_up, lambda gate, up: tkq.swiglu(gate, up), ("gate", "up")),
    Case("geglu", _one, lambda x: tkq.geglu(x, layout="interleaved"), ("x",)),
    Case("rope", _rotary, lambda x, cos, sin: tkq.rope(x, cos, sin), ("x",)),
    Case("rope, of packed sequences", _rotary_packed,
         lambda x, cos, sin, cu_seqlens: tkq.rope(x, cos, sin, cu_seqlens=cu_seqlens), ("x",)),
    Case("rope_qk", _rotary_qk, lambda q, k, cos, sin: tkq.rope_qk(q, k, cos, sin), ("q", "k")),
    Case("flash_attn", _qkv, lambda q, k, v: tkq.flash_attn(q, k, v, causal=True), ("q", "k", "v"), ("q", "k", "v"),
         exact=False),
    Case("flash_attn, with sinks", attention.shared_heads,
         lambda q, k, v, sinks: tkq.flash_attn(q, k, v, causal=True, sinks=sinks, return_lse=True),
         ("q", "k", "v", "sinks"), ("q", "k", "v"), exact=False),
    Case("flex_attention", attention.heads_first, lambda query, key, value, slopes: attention.with_slopes(
        query, key, value, slopes),
         ("query", "key", "value", "slopes"), ("query", "key", "value"), exact=False),
    Case("flash_attn_varlen", _qkv_packed,
         lambda q, k, v, cu_seqlens_q, cu_seqlens_k: tkq.flash_attn_varlen(
             q, k, v, cu_seqlens_q, cu_seqlens_k, 64, 64, causal=True), ("q", "k", "v"), ("q", "k", "v"), exact=False),
    Case("quantize_qkv", attention.few_kv_heads, lambda q, k, v: tkq.quantize_qkv(q, k, v)),
    Case("quantize_qkv, rotated and smoothed", attention.few_kv_heads,
         lambda q, k, v: tkq.quantize_qkv(q, k, v, rotate=True, smooth_k=True)),
    Case("flash_attn_fp8", attention.float8_heads, attention.attend_float8),
    Case("flash_attn_fp8_varlen", attention.packed_float8_heads, attention.attend_packed_float8),
    Case("linear_attn", _gated_heads, lambda q, k, v, g: tkq.linear_attn(q, k, v, g), ("q", "k", "v", "g"),
         ("q", "k", "v"), exact=False),
    Case("linear_attn, with states", _gated_heads_shared,
         lambda q, k, v, g, initial_state: tkq.linear_attn(
             q, k, v, g, initial_state=initial_state, output_final_state=True),
         ("q", "k", "v", "g", "initial_state"), ("q", "k", "v"), exact=False),
    Case("linear_attn, of packed sequences", packed.packed_heads,
         lambda q, k, v, g, initial_state, cu_seqlens: tkq.linear_attn(
             q, k, v, g, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens),
         ("q", "k", "v", "g", "initial_state"), ("q", "k", "v"), exact=False),
    Case("linear_attn, with a pool", packed.packed_heads_and_indices,
         lambda q, k, v, g, pool, cu_seqlens, state_indices: packed.with_pool(
             tkq.linear_attn, q, k, v, g, pool=pool, cu_seqlens=cu_seqlens, state_indices=state_indices),
         cast=("q", "k", "v")),
    Case("gated_delta_rule", _unit_keys, lambda q, k, v, g, beta: tkq.gated_delta_rule(q, k, v, g, beta),
         ("q", "k", "v", "g", "beta"), ("q", "k", "v"), exact=False),
    Case("gated_delta_rule, with states", _unit_keys_with_state,
         lambda q, k, v, g, beta, initial_state: tkq.gated_delta_rule(
             q, k, v, g, beta, initial_state=initial_state, output_final_state=True),
         ("q", "k", "v", "g", "beta", "initial_state"), ("q", "k", "v"), exact=False),
    Case("mamba2_ssd", _ssd,
         lambda x, dt, A, B, C, D, dt_bias: tkq.mamba2_ssd(x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True),
         ("x", "dt", "B", "C", "A", "D", "dt_bias"), ("x", "B", "C"), exact=False),
    Case("mamba2_ssd, with states", _ssd_with_states,
         lambda x, dt, A, B, C, D, dt_bias, z, initial_states: tkq.mamba2_ssd(
             x, dt, A, B, C, D, z, dt_bias, initial_states, True, return_final_states=True),
         ("x", "dt", "B", "C", "z", "A", "D", "dt_bias", "initial_states"), ("x", "B", "C", "z"), exact=False),
    Case("gated_delta_rule, of packed sequences", packed.packed_unit_keys,
         lambda q, k, v, g, initial_state, cu_seqlens, beta: tkq.gated_delta_rule(
             q, k, v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens),
         ("q", "k", "v", "g", "beta", "initial_state"), ("q", "k", "v"), exact=False),
    Case("gated_delta_rule, with a pool", packed.packed_unit_keys_and_indices,
         lambda q, k, v, g, beta, pool, cu_seqlens, state_indices: packed.with_pool(
             tkq.gated_delta_rule, q, k, v, g, beta, pool=pool, cu_seqlens=cu_seqlens, state_indices=state_indices),
         cast=("q", "k", "v")),
    Case("linear_attn, with checkpoints", _gated_heads,
         lambda q, k, v, g: tkq.linear_attn(q, k, v, g, checkpoint_every=64), cast=("q", "k", "v")),
    Case("gated_delta_rule, with checkpoints", _unit_keys,
         lambda q, k, v, g, beta: tkq.gated_delta_rule(q, k, v, g, beta, checkpoint_every=64), cast=("q", "k", "v")),
    Case("mamba2_ssd, with checkpoints", _ssd,
         lambda x, dt, A, B, C, D, dt_bias: tkq.mamba2_ssd(x, dt, A, B, C, D, dt_bias=dt_bias, checkpoint_every=64),
         cast=("x", "B", "C")),
    Case("linear_attn, with packed gates of columns", packed.packed_columns,
         lambda q, k, v, g, initial_state, cu_seqlens: tkq.linear_attn(
             q, k, v, g, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens),
         ("q", "k", "v", "g", "initial_state"), ("q", "k", "v"), exact=False),
    Case("gated_delta_rule, with packed gates of columns", packed.packed_columns_and_unit_keys,
         lambda q, k, v, g, initial_state, cu_seqlens, beta: tkq.gated_delta_rule(
             q, k, v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens),
         ("q", "k", "v", "g", "beta", "initial_state"), ("q", "k", "v"), exact=False),
    Case("mamba2_ssd, of packed sequences", packed.packed_ssd,
         lambda x, dt, A, B, C, D, initial_states, cu_seqlens: tkq.mamba2_ssd(
             x, dt, A, B, C, D, initial_states=initial_states, dt_softplus=True, return_final_states=True,
             cu_seqlens=cu_seqlens),
         ("x", "dt", "B", "C", "A", "D", "initial_states"), ("x", "B", "C"), exact=False),
    Case("mamba2_ssd, with a pool", packed.packed_ssd_and_indices,
         lambda x, dt, A, B, C, D, initial_states, cu_seqlens, state_indices: tkq.mamba2_ssd(
             x, dt, A, B, C, D, initial_states=initial_states.clone(), dt_softplus=True, return_final_states=True,
             cu_seqlens=cu_seqlens, state_indices=state_indices), cast=("x", "B", "C")),
    Case("hedgehog", _heads_and_maps,
         lambda q, k, v, q_map, k_map, linear_factor, window_factor: tkq.hedgehog(
             q, k, v, q_map, k_map, linear_factor, window_factor),
         ("q", "k", "v"), ("q", "k", "v", "q_map", "k_map"), exact=False),
    Case("based", _sixteen, lambda q, k, v: tkq.based(q, k, v), ("q", "k", "v"), ("q", "k", "v"), exact=False),
    Case("causal_conv1d", packed.channels, lambda x, weight, bias: tkq.causal_conv1d(x, weight, bias, "silu"),
         ("x", "weight", "bias"), ("x", "weight", "bias")),
    Case("causal_conv1d, of contiguous tokens", packed.channels_along_time,
         lambda x, weight, bias: tkq.causal_conv1d(x.mT, weight, bias), ("x", "weight", "bias"),
         ("x", "weight", "bias")),
    Case("causal_conv1d, of packed sequences", packed.packed_channels,
         lambda x, weight, bias, initial_state, cu_seqlens: tkq.causal_conv1d(
             x, weight, bias, "silu", initial_state, True, cu_seqlens),
         ("x", "weight", "bias", "initial_state"), ("x", "weight", "bias"), exact=False),
    Case("causal_conv1d, by seq_idx and with normed heads", packed.channels_and_numbers,
         lambda x, weight, bias, seq_idx: tkq.causal_conv1d(
             x, weight, bias, "silu", seq_idx=seq_idx, norm_heads=1, head_dim=64),
         ("x", "weight", "bias"), ("x", "weight", "bias")),
    Case("scan", packed.factors, lambda a, b, initial_state: tkq.scan(a, b, initial_state, False, True),
         ("a", "b", "initial_state")),
    Case("scan, of contiguous tokens", packed.factors_along_time, lambda a, b: tkq.scan(a.mT, b.mT, None, True),
         ("a", "b")),
    Case("fft_conv", packed.sequences_and_filters, lambda u, k, d: tkq.fft_conv(u, k, d), ("u", "k", "d"), ("u",)),
    Case("causal_conv1d_step", steps.channels, steps.conv_step, cast=("x", "weight", "bias"),
         alone=lambda x, conv_states, weight, bias, cache_indices: tkq.causal_conv1d_step(
             x, conv_states, weight, bias, "silu", cache_indices)),
    Case("linear_attn_step", steps.one_token_without_beta, steps.linear_attn_step, cast=("q", "k", "v"),
         alone=lambda q, k, v, g, state, rows: tkq.linear_attn_step(q, k, v, g, state, None, rows)),
    Case("linear_attn_step, with num_accepted_tokens", steps.accepted, steps.accepting_step, cast=("q", "k", "v"),
         alone=lambda q, k, v, g, state, rows, accepted: tkq.linear_attn_step(
             q, k, v, g, state, None, rows, num_accepted_tokens=accepted)),
    Case("gated_delta_rule_step", steps.one_token, steps.delta_step, cast=("q", "k", "v"),
         alone=lambda q, k, v, g, beta, state, rows: tkq.gated_delta_rule_step(
             q, k, v, g, beta, state, None, True, rows)),
    Case("gated_delta_rule_step, with state_v_first", steps.one_token_of_v_first, steps.delta_step_of_v_first,
         cast=("q", "k", "v"), alone=lambda q, k, v, g, beta, state, rows: tkq.gated_delta_rule_step(
             q, k, v, g, beta, state, None, False, rows, state_v_first=True)),
    Case("ssd_step", steps.state_space, steps.ssd_step, cast=("x", "B", "C", "z"),
         alone=lambda x, dt, A, B, C, D, z, state: tkq.ssd_step(state, x, dt, A, B, C, D, z, dt_softplus=True)),
    *caches.cases(Case),
    Case("gemm", _matrices, lambda a, b: tkq.gemm(a, b), ("a", "b"), ("a", "b")),
    Case("gemm, with an epilogue", _matrices_and_bias,
         lambda a, b, bias: tkq.gemm(a, b, bias=bias, activation="silu", alpha=2.0),
         ("a", "b", "bias"), ("a", "b"), exact=False),
    Case("grouped_gemm", _groups, lambda a, b, offsets: tkq.grouped_gemm(a, b, offsets), ("a", "b"), ("a", "b")),
    Case("fp8_gemm", _float8, lambda a, b, scale_a, scale_b: tkq.fp8_gemm(a, b.t(), scale_a, scale_b)),
    Case("quantize_fp8", _one, lambda x: tkq.quantize_fp8(x, "1x128", transpose=True)),
)}

WITH_GRADIENTS = [case for case in CASES.values() if case.leaves]
FUNCTIONS = [case for case in CASES.values() if case.name == case.function]
VARIANTS = [case for case in CASES.values() if case.name != case.function]
# What tkq has that is no function of tensors, or one of other ops.
NOT_OPS = {"check_plan", "plan_cascade", "rope_cos_sin", "create_block_mask", "prefetch", "tune", "Exchange",
           "Monoid", "ReductionBase", "RowKernel"}


def of_each(cases):
    """Parametrizes by `case`: one of each function; its others are slow."""
    return pytest.mark.parametrize("case", [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name != case.function)) for case in cases])


def of_all(cases):
    """The same of all."""
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def results(found) -> tuple:
    """What a call gave, as a tuple of tensors."""
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def incoming(found, seed: int = 7) -> tuple:
    """(the results that have a gradient, such gradients of them: always the same)"""
    recorded = [t for t in results(found) if t.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    return recorded, [torch.randn(t.shape, generator=generator).to(t.dtype).to(t.device) for t in recorded]


def backward(found) -> None:
    """A backward through all results that have one."""
    torch.autograd.backward(*incoming(found))


def run(case: Case, inputs: dict, call=None) -> list:
    """Results and, where the leaves require them, their gradients; all without a history."""
    found = results((call or case.call)(*inputs.values()))
    if any(t.requires_grad for t in found):
        backward(found)
    return [t.detach() for t in found] + [inputs[name].grad for name in case.leaves if inputs[name].requires_grad]


def assert_same(found, wanted, exact=True, what="") -> None:
    """exact: to the bit (NaN is NaN). Otherwise as close as two ways of computing the same in 16 bits are."""
    assert len(found) == len(wanted), what
    for i, (a, b) in enumerate(zip(found, wanted)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {i}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        a, b = (t.float() for t in (a, b))
        near = dict(rtol=0, atol=0) if exact or not b.numel() else dict(rtol=2**-6, atol=b.abs().max().item() * 2**-6)
        torch.testing.assert_close(a, b, **near, equal_nan=True, msg=lambda text, i=i: f"{what}: {i}: {text}")
