"""What a row of a table says of each baseline: timed, failed, not installed, not run; the shapes of a roofline."""
import dataclasses

import pytest
import torch

from bench.core import ops, row_peers
from bench.core.results import Bound, Case, Report
from bench.ops import gemm, norm_backward
from bench.peers import common, deepgemm, liger_cute
from bench.peers import gemm as gemm_peers
from bench.report import readme_table, summary, tables
from tests.cpu.bench.test_bench_harness import timed
from tkq.testing.timing import Comparison, Timing

MS = (1.0,) * 7


def case(shape="M1 N1", section="forward", op="softmax", bound=None, missing=None, roof=None, failed=None, **others):
    timings = [timed("tkq", MS), *(timed(name, [ms * x for x in MS]) for name, ms in others.items())]
    timings += [Timing(name, "failed", note=why) for name, why in (failed or {}).items()]
    return Case(section, op, shape, "GB/s", 1e9, Comparison(tuple(timings), 2, 1, 1), bound=bound,
                missing=missing or {}, roof=roof)


def said(cases, requested=()):
    return list(map(str, row_peers.of_row(cases, requested)))


def test_a_peer_that_was_timed_everywhere_needs_no_word():
    assert said([case(QuACK=2.0), case(QuACK=0.5)]) == ["QuACK"]


def test_a_peer_that_failed_at_a_shape_is_named_with_how_often():
    """Also where it was timed at no shape, as QuACK of linear_cross_entropy."""
    broken = {"QuACK": "TypeError: epilogue"}
    assert said([case(torch=2.0), case(torch=2.0, failed=broken), case(QuACK=1.0, torch=2.0)]) == [
        "torch", "QuACK at 1 of 3 (failed at 1, not run at 1)"]
    assert said([case(failed=broken)] * 4) == ["QuACK at 0 of 4 (failed)"]
    assert said([case(missing=broken)] * 4) == ["QuACK at 0 of 4 (failed)"]  # when it was made


@pytest.mark.parametrize("reason, word", (
    ("NotImplementedError: torch has none", "unsupported"),
    ("ModuleNotFoundError: No module named 'quack'", "not installed"),
    ("ImportError: no such symbol", "not installed"), ("left out (--without)", "excluded"),
    ("RuntimeError: CUDA error", "failed")))
def test_why_a_peer_was_not_timed(reason, word):
    assert said([case(missing={"QuACK": reason})]) == said([case(failed={"QuACK": reason})]) == [
        f"QuACK at 0 of 1 ({word})"]


def test_a_peer_that_is_asked_for_today_and_not_in_the_file_was_not_run():
    assert said([case(QuACK=1.0)] * 2, ("FA3",)) == ["QuACK", "FA3 at 0 of 2 (not run)"]
    assert said([case(bound=Bound(("FA4", "copy"), 1.0))]) == ["FA4 at 0 of 1 (not run)"]  # its bound names it


def test_roofs_and_our_own_are_no_peers():
    assert said([case(copy=1.0, plain=1.0)], ("add", "as usual")) == []


def test_the_benches_say_whom_they_ask_for_without_a_gpu():
    for op, parts in ops.OPS.items():
        for part in parts:
            name = f"{op}, {part.what}" if part.what else op
            own = {"flash_attn, GQA vs. MHA", "flash_attn, GQA, backward", "fp8_gemm, bias and activation",
                   "quantize_fp8, with transpose"}
            assert bool(row_peers.asked_for(name)) is (name not in own), name
    assert row_peers.asked_for("gemm, bias and activation") == (
        "torch", "torch._addmm_activation", "torch.compile", "torch.compile autotuned", "QuACK")
    assert {"FA4", "cuDNN", "FA3"} == set(row_peers.asked_for("flash_attn"))
    assert {"torch", "DeepGEMM"} == set(row_peers.asked_for("grouped_gemm"))


def test_every_peer_that_is_asked_for_has_a_name_for_against():
    named = {name for names in ops.AGAINST.values() for name in names}
    for op, parts in ops.OPS.items():
        for part in parts:
            assert set(row_peers.asked_for(f"{op}, {part.what}" if part.what else op)) <= named


# ---- roofs ---------------------------------------------------------------------------------------------------------


def test_every_shape_of_the_norms_gradients_has_a_roof():
    jobs = list(norm_backward.jobs(norm_backward.BENCH.shapes["backward"]))
    assert len(jobs) == 20 and all(job.question.roof.against == ("add",) for job in jobs)
    found = {name: [each for _, each in cases] for name, cases in summary.grouped(readme_table.reports()).items()}
    for name in ("rmsnorm, backward", "layernorm, backward"):
        assert len(found[name]) == 10 and summary.beside_roofs(found[name]).endswith(" (10)")


def test_a_roof_is_of_so_many_shapes():
    roof = Bound(("copy",), 0.9)
    assert summary.beside_roofs([case(copy=0.5, roof=roof), case(copy=2.0, roof=roof)]) == "1.00 (2)"
    assert summary.beside_roofs([case(copy=0.5, roof=roof), case()]) == "0.50 (1 of 2)"
    assert summary.beside_roofs([case(plain=0.5, roof=Bound(("plain",), 0.9))]) == ""  # tkq's own


def test_a_file_without_roofs_has_those_of_its_bench():
    shape = "M1024 N4096"
    old = case(shape, "backward", "rmsnorm_backward", add=0.8)
    report = dataclasses.replace(next(iter(readme_table.reports().values())), cases=[
        old, case(shape, "backward", "rmsnorm_backward"), case("M1 N2", "backward", "rmsnorm_backward", add=0.8)])
    roofs = [each.roof for each in row_peers.with_roofs({"norm_backward": report})["norm_backward"].cases]
    assert roofs == [Bound(("add",), 0.65), None, None]  # the second did not time it, the third is of no bench
    assert isinstance(report, Report) and report.cases[0].roof is None


# ---- tables --------------------------------------------------------------------------------------------------------


def report(*cases):
    return dataclasses.replace(next(iter(readme_table.reports().values())), cases=list(cases), costs=[], problems=[])


def test_a_table_of_a_run_names_what_failed_beside_the_fastest():
    row = tables.short(report(case(torch=2.0, failed={"QuACK": "TypeError: x"}, missing={"FA4": "ImportError: no"})))
    assert "| torch 500 GB/s (QuACK failed; FA4 not installed) | 2.000 |" in row
    whole = tables.whole(report(case(failed={"QuACK": "TypeError: a | b\nc"})))
    assert "| QuACK | failed: TypeError: a / b c |" in whole


def test_a_table_of_a_run_has_the_errors_beside_the_speeds():
    made = case(torch=2.0, QuACK=1.5)
    errors = {"tkq": 1.6e-3, "torch": 1.7e-3, "QuACK": 1.8e-3}
    timings = tuple(dataclasses.replace(t, error=errors[t.name]) for t in made.comparison.timings)
    made = dataclasses.replace(made, comparison=dataclasses.replace(made.comparison, timings=timings))
    text = tables.short(report(made))
    assert "| speedup | errors, tkq / baseline |" in text and "| 1.500 | 1.6e-03 / 1.8e-03 |" in text
    assert "errors" not in tables.short(report(case(torch=2.0)))


def test_the_summary_names_every_peer():
    found = {"softmax": report(case(torch=2.0, failed={"QuACK": "TypeError: x"}))}
    row, = (line for line in summary.summary(found).splitlines() if line.startswith("| `softmax`"))
    assert row.startswith("| `softmax` | torch; failed: QuACK; not run: torch.compile, ")
    assert "Liger CuTe | 1 | 2.00 |" in row


def test_what_has_no_baseline_is_named():
    found = {"fp8_gemm": report(case(section="epilogue", op="fp8_gemm row", plain=1.0)), "softmax": report(case())}
    assert summary.without_baseline(found) == (
        "Compared only with other forms of tkq itself, and so not in the table: "
        "`fp8_gemm`, bias and activation; `softmax`.")
    assert summary.without_baseline({"softmax": report(case(torch=1.0))}) == ""


# ---- the peers themselves ------------------------------------------------------------------------------------------


def test_fused_products_of_torch_agree_where_they_compute_the_same():
    a, b, bias = (torch.randn(*shape) for shape in ((8, 16), (16, 24), (24,)))
    addmm = common.PEERS["gemm_linear"]["torch._addmm_activation"]
    for activation in ("relu", "gelu_tanh"):
        wanted = common.PEERS["gemm_linear"]["torch"](activation)(a, b, bias)
        assert torch.allclose(addmm(activation)(a, b, bias), wanted, atol=1e-3)  # on a CPU its gelu is the exact one
    for activation in set(gemm_peers.ACTIVATIONS) - {"relu", "gelu_tanh"}:
        with pytest.raises(NotImplementedError, match=f"relu and gelu_tanh alone, got '{activation}'"):
            addmm(activation)
    assert {"torch", "torch._addmm_activation", "torch.compile", "torch.compile autotuned", "QuACK"} == set(
        gemm_peers.LINEAR)  # all are asked for all activations, and what one has not is named so
    assert gemm.BENCH.shapes["epilogue"] == gemm.FUSED


def test_groups_of_deepgemm():
    rows = deepgemm._rows(torch.tensor([128, 128, 384]), 512)
    assert rows.dtype == torch.int32
    assert rows.tolist() == [0] * 128 + [2] * 256 + [-1] * 128  # an empty group; rows of none
    with pytest.raises(NotImplementedError, match="multiples of 128"):
        deepgemm._rows(torch.tensor([100, 256]), 256)


@pytest.mark.parametrize("make, kind", ((deepgemm.fp8, "1x128_1x128"), (deepgemm.fp8, "row"),
                                        (deepgemm.grouped, "row"), (deepgemm.grouped, "gradient")))
def test_what_deepgemm_has_no_product_for_is_said_before_it_is_imported(make, kind):
    with pytest.raises(NotImplementedError, match="DeepGEMM has no "):
        make(kind)


def test_deepgemm_is_missing_with_what_each_place_said(monkeypatch):
    monkeypatch.setattr(deepgemm, "PLACES", ("no_such_deep_gemm", "no_such_vllm.third_party"))
    found, missing = common.find("gemm", ("DeepGEMM",))
    assert not found
    assert missing["DeepGEMM"].startswith("ImportError: no_such_deep_gemm: ModuleNotFoundError: No module named")
    assert "no_such_vllm" in missing["DeepGEMM"]


def test_what_is_prepared_is_prepared_once():
    made, prepared = [], deepgemm._Prepared()
    x = torch.ones(3)
    for _ in range(2):
        assert prepared.of(x, lambda t: made.append(1) or t * 2).tolist() == [2, 2, 2]
    assert made == [1]


def test_ligers_second_implementation_is_a_peer_of_each_operation_that_it_has():
    for op in liger_cute.PEERS:
        assert common.PEERS[op]["Liger CuTe"] is liger_cute.PEERS[op], op
    assert "Liger CuTe" not in common.PEERS["cross_entropy_mean"]
    assert liger_cute.names(32768) == ("Liger CuTe",) and liger_cute.names(65536) == ()
