"""Float8 attention where there is no GPU: V transposed by the kernel's own thread, CPU tensors, plans, and what is
refused."""
import itertools
import math

import pytest
import torch

import tkq
from tests.helpers.emulation.transpose_values import TransposeValuesOnCpu, function
from tkq.attention.fp8.check import Options
from tkq.attention.fp8.config import Fp8Config
from tkq.attention.fp8.launch import limited
from tkq.attention.fp8.plan import plan
from tkq.attention.fp8.spec import ACCUMULATE, HEAD_DIMS, Fp8Spec, TransposeSpec
from tkq.reference import attention_fp8 as reference

F8 = torch.float8_e4m3fn
NAN = 0x7F


def _operand_order(keys):
    """The key at each place of the workspace, as the tensor cores' operand has it: written down by hand."""
    sixteen = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    return [16 * group + key for group in range(keys // 16) for key in sixteen]


def test_the_order_of_keys():
    from tkq.tile.float8 import operand_column

    assert [operand_column(k) for k in range(16)] == _operand_order(16)


@pytest.mark.parametrize("keys_contiguous", [False, True])
def test_values_are_transposed(keys_contiguous, monkeypatch):
    """Every key at its place, zeros behind the last; NaN lies behind v's end, and wherever the workspace was not
    written."""
    run = function(TransposeValuesOnCpu(TransposeSpec(keys_contiguous)), monkeypatch)
    for B, keys, H, D in ((1, 1, 1, 32), (2, 130, 3, 64), (1, 128, 2, 96), (1, 255, 1, 32), (2, 15, 1, 32)):
        bytes_ = torch.randint(0, 256, (B, keys, H, D), dtype=torch.uint8)
        room = torch.full((B, keys + 40, H, D), NAN, dtype=torch.uint8)
        if keys_contiguous:
            room = torch.full((B, H, D, -(-keys // 16) * 16 + 16), NAN, dtype=torch.uint8).permute(0, 3, 1, 2)
        v = room[:, :keys]
        v.copy_(bytes_)
        padded = -(-keys // 128) * 128
        workspace = torch.full((B, H, D, padded), NAN, dtype=torch.uint8)
        run(v.view(F8) if not keys_contiguous else _as_float8(v), workspace.view(F8))
        wanted = torch.zeros(B, padded, H, D, dtype=torch.uint8)
        wanted[:, :keys] = bytes_
        assert torch.equal(workspace, wanted[:, _operand_order(padded)].permute(0, 2, 3, 1)), (B, keys, H, D)


def _as_float8(x):
    """Of a last dimension that is not contiguous."""
    return torch.as_strided(x.permute(0, 2, 3, 1).view(F8).permute(0, 3, 1, 2), x.shape, x.stride())


def test_plans():
    """Every spec has a configuration that fits; two levels where they are asked for."""
    for dim, accumulate, causal in itertools.product(HEAD_DIMS, ACCUMULATE, (False, True)):
        spec = Fp8Spec(dim, causal, accumulate=accumulate)
        config = plan(spec)
        assert config == config.check(spec.kernel().head_dim, spec.two_level)
        assert spec.kernel().head_dim >= dim and spec.kernel().head_dim in (64, 128, 256)


@pytest.mark.parametrize("varlen", (False, True))
@pytest.mark.parametrize("window", (False, True))
def test_plans_without_lse(varlen, window):
    """What tests/gpu/attention/test_fp8_software_exp2.py holds; with lse exponentials are summed up before they are
    rounded."""
    def of(dim, way, causal, lse=False):
        config = plan(Fp8Spec(dim, causal, lse, accumulate=way, descales="qkv", left=window, varlen=varlen))
        return config.row_sum, config.software_exp2

    for dim, way, causal in itertools.product((64, 128, 256), ACCUMULATE, (False, True)):
        assert of(dim, way, causal, lse=True) == ("registers", 0)
        software = {(64, "fast"): 2, (64, "two_level"): 3, (128, "fast"): 4 * causal}.get((dim, way), 0)
        none_left = varlen or (window and (dim == 256 or (dim, way) == (128, "two_level")))
        assert of(dim, way, causal) == (("registers", 0) if none_left else ("mma", software))


@pytest.mark.parametrize("changed, dim, two_level, words", [
    (dict(kv=256), 256, False, "bytes of shared memory"), (dict(), 256, True, "registers"),
    (dict(kv=144), 64, True, "multiples of 32"), (dict(parts=3, overlap=False), 64, True, "parts is 3"),
    (dict(row_sum="sums"), 64, True, "row_sum is 'sums'"), (dict(software_exp2=2), 64, True, "software_exp2 is 2"),
    (dict(row_sum="mma", software_exp2=5), 64, True, "software_exp2 is 5"),
    (dict(overlap=False), 64, True, "ping_pong"), (dict(hand_over="late"), 64, True, "hand_over is 'late'"),
    (dict(parts=2), 64, True, "with overlap"), (dict(consumers=3), 128, True, "registers")])
def test_configurations_that_cannot_run(changed, dim, two_level, words):
    with pytest.raises(ValueError, match=words):
        Fp8Config(**changed).check(dim, two_level)


def test_limits_that_no_query_reaches():
    of = lambda rows, keys, **given: limited(Options(**given), rows, keys)[:4]
    assert of(10, 20, left=19, right=9) == (False, None, -1, -1)
    assert of(10, 20, left=18, right=8) == (False, None, 18, 8)
    assert of(10, 20, right=0) == (True, None, -1, -1)
    assert of(10, 20, causal=True, right=5) == (True, None, -1, -1)


def _call(**changed):
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g).to(F8)
    return dict(q=new(2, 5, 6, 64), k=new(2, 9, 2, 64), v=new(2, 9, 2, 64), q_descale=torch.rand(2, 2, generator=g),
                k_descale=torch.rand(2, 2, generator=g), v_descale=torch.rand(2, 2, generator=g)) | changed


@pytest.mark.parametrize("causal, window", [(False, (None, None)), (True, (None, None)), (False, (2, 1))])
def test_cpu_tensors(causal, window):
    """The definition, head by head."""
    given = _call()
    o, lse = tkq.flash_attn_fp8(**given, causal=causal, window_size=window, out_dtype=torch.float16, return_lse=True)
    assert o.dtype == torch.float16 and o.shape == (2, 5, 6, 64) and lse.shape == (2, 6, 5)
    q, k, v = (given[n].float() for n in "qkv")
    own, keys = torch.arange(5)[:, None] + 4, torch.arange(9)
    seen = keys <= (own if causal else own + 9 if window[1] is None else own + window[1])
    seen &= keys >= (own - 9 if window[0] is None else own - window[0])
    for b, h in itertools.product(range(2), range(6)):
        by = [given[f"{n}_descale"][b, h // 3] for n in "qkv"]
        scores = (q[b, :, h] @ k[b, :, h // 3].T * by[0] * by[1] / 8).masked_fill(~seen, -math.inf)
        torch.testing.assert_close(lse[b, h], scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(o[b, :, h].float(), scores.softmax(-1) @ v[b, :, h // 3] * by[2], rtol=1e-2,
                                   atol=1e-3)


def test_no_keys_and_no_queries():
    o, lse = tkq.flash_attn_fp8(**_call(k=torch.empty(2, 0, 2, 64, dtype=F8), v=torch.empty(2, 0, 2, 64, dtype=F8)),
                                return_lse=True)
    assert not o.any() and (lse == -math.inf).all()
    assert tkq.flash_attn_fp8(**_call(q=torch.empty(2, 0, 6, 64, dtype=F8))).shape == (2, 0, 6, 64)


def test_the_reference_in_float64():
    given = _call()
    o, _ = reference.flash_attn_fp8(**given, out_dtype=torch.float64)
    assert o.dtype == torch.float64
    torch.testing.assert_close(o.float(), tkq.flash_attn_fp8(**given).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("error, words, changed", [
    (TypeError, "q", dict(q=torch.zeros(2, 5, 6, 64))),
    (TypeError, "v", dict(v=torch.zeros(2, 9, 2, 64, dtype=torch.float8_e5m2))),
    (TypeError, "k_descale", dict(k_descale=torch.ones(2, 2, dtype=torch.float64))),
    (ValueError, "q: has 3 dimensions", dict(q=torch.zeros(5, 6, 64, dtype=F8))),
    (NotImplementedError, "head_dim is 48", dict(q=torch.zeros(2, 5, 6, 48, dtype=F8))),
    (NotImplementedError, "head_dim is 288", dict(q=torch.zeros(2, 5, 6, 288, dtype=F8))),
    (ValueError, "k: shape", dict(k=torch.zeros(2, 9, 2, 128, dtype=F8))),
    (ValueError, "k: shape", dict(k=torch.zeros(3, 9, 2, 64, dtype=F8))),
    (ValueError, "v: shape", dict(v=torch.zeros(2, 8, 2, 64, dtype=F8))),
    (ValueError, "must be a multiple", dict(q=torch.zeros(2, 5, 5, 64, dtype=F8))),
    (ValueError, "q_descale: shape", dict(q_descale=torch.ones(2, 6))),
    (ValueError, "v_descale: shape", dict(v_descale=torch.ones(2))),
    (ValueError, "softmax_scale", dict(softmax_scale=-1.0)),
    (ValueError, "accumulate", dict(accumulate="slow")),
    (TypeError, "out_dtype", dict(out_dtype=torch.float32)),
    (ValueError, "window_size", dict(window_size=(-2, 0))),
    (ValueError, "q: strides are .* last dimension must", dict(q=torch.zeros(2, 5, 64, 6, dtype=F8).mT)),
    (ValueError, "k: strides are .* stride 0 must", dict(k=torch.zeros(2, 9, 136, dtype=F8)[..., :128].unflatten(
        2, (2, 64)))),
    (ValueError, "v: strides are .* or its dimension of keys", dict(v=torch.zeros(2, 9, 2, 128, dtype=F8)[..., ::2])),
    (ValueError, "v: strides are .* stride 3 must", dict(v=torch.zeros(2, 2, 64, 9, dtype=F8).permute(0, 3, 1, 2))),
])
def test_what_is_refused(error, words, changed):
    with pytest.raises(error, match=words):
        tkq.flash_attn_fp8(**_call(**changed))


def test_gradients_are_refused():
    with pytest.raises(NotImplementedError, match="v_descale requires a gradient"):
        tkq.flash_attn_fp8(**_call(v_descale=torch.ones(2, 2, requires_grad=True)))


def test_quantised():
    """Scales of sequences and K/V heads; zeros, NaN; what is refused."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, rows, heads, 32, generator=g).bfloat16() for rows, heads in ((5, 6), (9, 2), (9, 2)))
    k[0, :, 1], v[1, 3, 0, 7] = 0, math.nan
    *low, a, b, c = tkq.quantize_qkv(q, k, v)
    assert all(x.dtype == F8 and x.is_contiguous() for x in low) and all(x.shape == (2, 2) for x in (a, b, c))
    torch.testing.assert_close(a[1, 1], q[1, :, 3:].float().abs().max() / 448)
    assert b[0, 1] == 2.0 ** -126 and not low[1][0, :, 1].float().any()
    assert c[1, 0].isnan() and low[2][1, :, 0].isnan().all() and not low[2][:, :, 1].isnan().any()
    back = low[0].float() * a.repeat_interleave(3, 1)[:, None, :, None]
    assert (back - q.float()).abs().max() <= 2 ** -4 * q.float().abs().max()
    empty = tkq.quantize_qkv(q[:, :0], k[:, :0], v[:, :0])
    assert empty[0].shape == (2, 0, 6, 32) and (empty[3] == 2.0 ** -126).all()
    for error, words, given in ((TypeError, "k is torch.float32", (q, k.float(), v)),
                                (ValueError, "multiple of k's", (q[:, :, :5], k, v)),
                                (ValueError, "v: shape", (q, k, v[:, 1:])),
                                (NotImplementedError, "rows of 12", (q[..., :12], k[..., :12], v[..., :12]))):
        with pytest.raises(error, match=words):
            tkq.quantize_qkv(*given)


def _quantise_inputs(D=64, rows=9):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, rows, heads, D, generator=g) for heads in (6, 2, 2))
    k = k + 3 * torch.randn(2, 1, 2, D, generator=g)
    return q, k, v, *(f(torch.randn(rows, D // 2, generator=g)) for f in (torch.cos, torch.sin))


@pytest.mark.parametrize("rotate, smooth_k, tables", list(itertools.product((False, True), repeat=3)))
def test_quantised_with_options(rotate, smooth_k, tables):
    """By the definition, with the matrix written down; softmax of the scores is what it was."""
    q, k, v, cos, sin = _quantise_inputs()
    cos, sin = (cos, sin) if tables else (None, None)
    q8, k8, v8, a, b, c = tkq.quantize_qkv(q, k, v, rotate=rotate, smooth_k=smooth_k, cos=cos, sin=sin)
    plain = tkq.quantize_qkv(q, k, v)
    assert torch.equal(v8.view(torch.uint8), plain[2].view(torch.uint8)) and torch.equal(c, plain[5])
    at = [tkq.rope(x, cos, sin) if tables else x for x in (q, k)]
    want = list(at)
    if smooth_k:
        want[1] = want[1] - want[1].mean(1, keepdim=True)
    if rotate:
        signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]) / 8
        want = [x @ signs for x in want]
    for low, scale, x in ((q8, a, want[0]), (k8, b, want[1])):
        back = low.float() * scale.repeat_interleave(low.shape[2] // 2, 1)[:, None, :, None]
        assert (back - x).abs().max() <= 2 ** -4 * x.abs().max()
        torch.testing.assert_close(scale, x.unflatten(2, (2, -1)).abs().amax((1, 3, 4)) / 448, rtol=1e-5, atol=0)
    before, after = (torch.einsum("bihd,bjhd->bhij", x.repeat_interleave(6 // x.shape[2], 2),
                                  y.repeat_interleave(3, 2)).softmax(-1) for x, y in (at, want))
    torch.testing.assert_close(before, after, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("error, words, changed", [
    (TypeError, "rotate", dict(rotate=1)), (TypeError, "smooth_k", dict(smooth_k=None)),
    (TypeError, "cos", dict(cos=torch.ones(9, 32, dtype=torch.float64))),
    (ValueError, "sin is None", dict(sin=None)), (ValueError, "cos is None", dict(cos=None)),
    (ValueError, "cos: shape", dict(cos=torch.ones(9, 16))), (ValueError, "sin: shape", dict(sin=torch.ones(10, 32))),
    (ValueError, "cos has 8 rows", dict(cos=torch.ones(8, 32))),
    (ValueError, "cos: strides are", dict(cos=torch.ones(32, 9).T)),
    (ValueError, "q has 8 tokens", dict(q=torch.ones(2, 8, 6, 64))),
    (NotImplementedError, "rows of 8,", dict(q=torch.ones(2, 9, 6, 8), k=torch.ones(2, 9, 2, 8),
                                             v=torch.ones(2, 9, 2, 8))),
    (NotImplementedError, "rotate of rows of 96", dict(q=torch.ones(2, 9, 6, 96), k=torch.ones(2, 9, 2, 96),
                                                       v=torch.ones(2, 9, 2, 96), rotate=True))])
def test_options_that_are_refused(error, words, changed):
    given = dict(zip(("q", "k", "v", "cos", "sin"), _quantise_inputs(), strict=True)) | changed
    with pytest.raises(error, match=words):
        tkq.quantize_qkv(given.pop("q"), given.pop("k"), given.pop("v"), **given)


class _WithTables(torch.nn.Module):
    def forward(self, q, k, v, cos, sin):
        return tkq.quantize_qkv(q, k, v, cos=cos, sin=sin)


def test_tables_are_traced():
    """Where a table begins is asked when what was compiled or exported runs; torch.func.vmap is refused by name."""
    given, module = _quantise_inputs(), _WithTables()
    want = module(*given)
    for call in (torch.compile(module, backend="eager", fullgraph=True),
                 *(torch.export.export(module, given, strict=strict).module() for strict in (False, True))):
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(call(*given), want))
        for i in (3, 4):
            apart = torch.ones(9 * 32 + 1)[1:].view(9, 32)
            with pytest.raises(ValueError, match=f"quantize_qkv: {('cos', 'sin')[i - 3]}: begins at an address"):
                call(*given[:i], apart, *given[i + 1:])
    for i in range(5):
        with pytest.raises(NotImplementedError, match="quantize_qkv: torch.func.vmap is not supported"):
            torch.func.vmap(lambda x, i=i: module(*given[:i], x, *given[i + 1:]))(given[i].expand(2, *given[i].shape))
