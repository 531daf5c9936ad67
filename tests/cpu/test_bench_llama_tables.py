"""The tables of a Llama's steps and tokens, from results."""
import json

from bench import llama_tables
from bench.results import Case, Cost, Report
from tests.cpu.test_bench_plots import HERE
from tkq.testing.timing import Comparison, Timing


def case(section, **names):
    timings = tuple(Timing(name.replace("_", ", "), "wall" if ms else "failed", (ms,) * 5 if ms else (), note=note)
                    for name, (ms, note) in names.items())
    return Case(section, f"training step, {section}", "B2 S8", "TFLOP/s", 1e9, Comparison(timings, 1, 1, 1))


EAGER = case("eager", tkq=(2.0, "1.50 GiB at most"), tkq_none=(None, "out of memory"),
             torch=(3.0, "2.25 GiB at most, cudnn attention; flash 4.0 ms"))


def test_what_was_measured_is_told(tmp_path):
    costs = [Cost(f"{who}: a token, B1 prompt 4", us, us, us, 5, note="9 tokens/s")
             for who, us in (("tkq", 1500.0), ("torch", 2500.0))]
    Report(HERE, [EAGER, case("compiled", tkq=(None, ""), torch=(2.5, ""))], costs).save(tmp_path / "llama.json")
    text = llama_tables.section(tmp_path)
    assert "| patched, `linear=\"tkq\"` | 2.0 ms, 1.50 GiB | 1.500 |  |  |" in text
    assert "| torch | 3.0 ms, 2.25 GiB |  | 2.5 ms |  |" in text and "patched |" not in text  # that one failed
    assert "the fastest of its attentions: cudnn." in text and "B2 S8" in text
    assert "| B1 prompt 4 | 1.50 ms (9 tokens/s) | 2.50 ms (9 tokens/s) |" in text
    assert "in one step" not in text
    profile = {name: {"ms": {"products": 2.0}, "all": 3.0, "launches": 7} for name in ("tkq, none", "torch")}
    (tmp_path / "llama_profile.json").write_text(json.dumps(profile))
    assert "| kernels | patched | torch |" in llama_tables.section(tmp_path)


def test_without_results_nothing_is_claimed(tmp_path):
    assert llama_tables.section(tmp_path) == "Not measured yet."
