"""What follows the engine's launches in a backward, where no GPU is needed: the kernels' own code on the CPU against
float64, the plans, machine code."""
import pytest
import torch

from tests.helpers.emulation.finish import ColumnSumsOnCpu, HeadSumsOnCpu, RowDotsOnCpu, function
from tests.helpers.shipped import of_name
from tkq.linear_attention.channels.catalog import shipped as shipped_columns
from tkq.linear_attention.channels.launch import column_sums
from tkq.linear_attention.channels.plan import FILLED, sums_segments
from tkq.linear_attention.channels.spec import SumsSpec
from tkq.linear_attention.finish.catalog import shipped
from tkq.linear_attention.finish.launch import over_shared, row_dots
from tkq.linear_attention.finish.spec import HeadSumsSpec, RowDotsSpec, at_once, lanes
from tkq.testing import sass

BF16, F32 = torch.bfloat16, torch.float32


def randn(*shape, dtype=F32):
    return torch.randn(*shape).to(dtype)


def differences(terms):
    return sum((-1)**i * x.double() for i, x in enumerate(terms))


# ---- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns, of, heads, dtype", [
    (128, "bf16", 2, "bf16"), (96, "fp16", 24, "fp16"), (32, "fp32", 1, "bf16"), (48, "fp32", 3, "fp16")])
def test_sums_over_heads(monkeypatch, columns, of, heads, dtype):
    torch.manual_seed(0)
    kernel = HeadSumsOnCpu(HeadSumsSpec(dtype, columns, of, at_once(heads)))
    wide = {"bf16": BF16, "fp16": torch.float16, "fp32": F32}
    given, y = randn(37, heads, columns, dtype=wide[of]), torch.full((37, columns), torch.nan, dtype=wide[dtype])
    function(kernel, monkeypatch)(given, y)
    want = 0
    for h in range(heads):
        want = want + given[:, h].float()
    assert torch.equal(y, want.to(y.dtype))


@pytest.mark.parametrize("columns, dtype, out", [(128, "bf16", F32), (80, "fp16", BF16)])
def test_dot_products(monkeypatch, columns, dtype, out):
    torch.manual_seed(0)
    names = {F32: "fp32", BF16: "bf16"}
    kernel = RowDotsOnCpu(RowDotsSpec(dtype, columns, names[out], 1))
    a, b = (randn(300, columns, dtype=BF16 if dtype == "bf16" else torch.float16) for _ in range(2))
    y = torch.full((300,), torch.nan, dtype=out)
    function(kernel, monkeypatch)(a, b, y)
    torch.testing.assert_close(y.double(), (a.double() * b.double()).sum(-1), rtol=2**-8 if out == BF16 else 1e-6,
                               atol=1e-5)


@pytest.mark.parametrize("end", [True, False])
def test_sums_behind_each_token(monkeypatch, end):
    """In one segment and in several, the same bits."""
    torch.manual_seed(0)
    specs = SumsSpec(end=end), SumsSpec("totals")
    sums, totals = (function(ColumnSumsOnCpu(spec), monkeypatch) for spec in specs)
    for S in (1, 63, 64, 65, 300):
        given = first, less = randn(2, S, 5), randn(2, S, 5)
        at_end = randn(2, 5) if end else None
        y, chunks = torch.full((2, S, 5), torch.nan), -(-S // 64)
        sums(first, (less, y[:, :0], at_end, y, None), 1)
        want = differences(given).flip(1).cumsum(1).flip(1) + (at_end.double()[:, None] if end else 0.0)
        torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(column_sums(*given, at_end).double(), want, rtol=1e-5, atol=1e-3)
        for segments in range(2, chunks + 2):
            behind, again = torch.full((2, chunks, 5), torch.nan), torch.full_like(y, torch.nan)
            totals(first, (less, None, None, behind, None), segments)
            sums(first, (less, behind, at_end, again, None), segments)
            assert torch.equal(again, y) and behind[:, :-(-chunks // segments)].isnan().all()


# ---- in plain PyTorch -----------------------------------------------------------------------------------------------


def test_functions_of_cpu_tensors():
    torch.manual_seed(0)
    a, b = (randn(2, 5, 6, 32, dtype=BF16) for _ in range(2))
    x = randn(2, 5, 3, 32, dtype=BF16)
    assert torch.equal(over_shared(a, x), a.float().unflatten(2, (3, 2)).sum(3).to(BF16))
    assert over_shared(a, b) is a
    found = row_dots(a, b, F32)
    assert found.shape == (2, 5, 6) and torch.equal(found, (a.float() * b.float()).sum(-1))


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 512, 4096, FILLED, 10 * FILLED])
@pytest.mark.parametrize("chunks", [1, 7, 32, 512])
def test_segments_fill_a_gpu(columns, chunks):
    segments = sums_segments(columns, chunks)
    assert 1 <= segments <= chunks and (columns < FILLED) >= (segments > 1)
    assert segments == chunks or segments * columns > FILLED // 2


def test_heads_at_once_and_lanes():
    assert [at_once(heads) for heads in (1, 2, 3, 4, 12, 80)] == [1, 2, 1, 4, 4, 8]
    assert [lanes(columns) for columns in (32, 48, 64, 80, 128, 144, 256)] == [4, 8, 8, 16, 16, 32, 32]


@pytest.mark.parametrize("kind, given, words", [
    (HeadSumsSpec, dict(dtype="fp32"), "dtype is 'fp32'"), (HeadSumsSpec, dict(of="fp16"), "of is 'fp16'"),
    (HeadSumsSpec, dict(columns=36), "columns is 36"), (HeadSumsSpec, dict(at_once=16), "at_once is 16"),
    (RowDotsSpec, dict(lanes=3), "lanes is 3"), (RowDotsSpec, dict(out="fp64"), "out is 'fp64'"),
    (RowDotsSpec, dict(dtype="fp32"), "dtype is 'fp32'"), (RowDotsSpec, dict(columns=4), "columns is 4"),
    (SumsSpec, dict(what="all"), "what is 'all'"),
    (SumsSpec, dict(what="totals", end=True), "end"),
    (SumsSpec, dict(packed="int8"), "packed is 'int8'")])
def test_what_a_spec_refuses(kind, given, words):
    usual = {HeadSumsSpec: dict(dtype="bf16", columns=64, of="bf16"), SumsSpec: {},
             RowDotsSpec: dict(dtype="bf16", columns=64, out="fp32", lanes=8)}[kind]
    with pytest.raises(ValueError, match=f"{kind.__name__}: {words}"):
        kind(**usual | given)


# ---- machine code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "linear_attn_shared_heads-bf16-k128-2", "linear_attn_shared_heads-bf16-k128-column-1",
    "linear_attn_shared_heads-bf16-k128-8", "gated_delta_rule_dbeta-bf16-v128-beta_fp32", "linear_attn_dg-column",
    "linear_attn_dg-column-end", "linear_attn_dg_totals-column"])
@pytest.mark.machine_code(recipe=lambda name: of_name((*shipped(), *shipped_columns()), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name((*shipped(), *shipped_columns()), name).expectation)
