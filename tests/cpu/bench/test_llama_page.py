"""docs/integrations.md's figures are those of the results."""
import json
from types import SimpleNamespace

import pytest

from bench.core.results import Bound, Case, Cost, Environment, Report
from bench.report import llama_page
from bench.studies import llama
from tkq.testing.timing import Comparison, Timing


def test_the_page_is_of_the_results():
    page = llama_page.PAGE.read_text()
    assert llama_page.written(page, llama_page.section()) == page


def case(section, **ms):
    timings = tuple(Timing(name.replace("_", ", "), "wall", times, note="17.00 GiB at most")
                    for name, times in ms.items())
    return Case(section, f"training step, {section}", "B2 S4096", "TFLOP/s", 1, Comparison(timings, 1, 1, 1),
                ours="tkq", bound=Bound(("torch",), 1.0))


@pytest.fixture
def results(tmp_path):
    cases = [case("eager", tkq=(10.0, 20.0), torch=(20.0, 20.0)),
             case("compiled", tkq=(10.0, 10.0), torch=(11.0, 12.0), tkq_eager=(10.0, 10.0), tkq_fp8=(8.0, 8.0))]
    costs = [Cost(f"{peer}: a token, B1 prompt 8", 1000.0 * ms, 900.0 * ms, 1500.0 * ms, 1, note=f"{7 * ms} tokens/s")
             for peer, ms in (("tkq", 1), ("torch", 2))]
    Report(Environment.here(), cases, costs).save(tmp_path / "llama.json")
    return tmp_path


def test_ratios_are_of_turns_and_gaps_are_left(results):
    text = llama_page.section(results)
    assert '| patched, `linear="tkq"` | 15.0 | 546133 | 1.500 | 17.00 | 10.0 | 819200 | 1.150 | 17.00 |' in text
    assert "| torch, fastest attention | 20.0 | 409600 |  | 17.00 | 11.5 | 712348 |  | 17.00 |" in text
    assert '| patched, `linear="fp8"` |  |  |  |  | 8.0 | 1024000 | 1.438 | 17.00 |' in text
    assert 'turns: patched, `linear="tkq"` 1.150.' in text
    assert "| a token, B1 prompt 8 | 2.00 (1.80 to 3.00), 14 | 1.00 (0.90 to 1.50), 7 |" in text
    assert "kernels" not in text and "Losses" not in text


def test_an_eager_run_says_beside_what_it_was(tmp_path):
    cases = [case(section, tkq=(9.0, 9.0), torch=(torch, torch), tkq_eager=(10.0, 10.0))
             for section, torch in (("compiled", 11.0), ("whole", 12.0))]
    Report(Environment.here(), cases).save(tmp_path / "llama.json")
    text = llama_page.section(tmp_path)
    assert 'turns: patched, `linear="tkq"` 1.100, patched, `linear="tkq"` 1.200 (whole).' in text


def test_sections_of_different_runs_are_said_to_be(results):
    assert "medians over\ninterleaved turns, in one run." in llama_page.section(results)
    path = results / "llama.json"
    data = json.loads(path.read_text())
    for case, date in zip(data["cases"], ("2026-11-22T21:23:37+00:00", "2026-11-22T22:29:58+00:00"), strict=True):
        case["date"] = date
    path.write_text(json.dumps(data))
    text = llama_page.section(results)
    assert "in separate runs: eager at 2026-11-22 21:23, compiled at 2026-11-22 22:29." in text
    assert text.startswith("Measured 2026-11-22 on one ")  # not the day of the newest of what stands beside them
    data["cases"][0]["date"] = "2026-11-20T21:23:37+00:00"
    path.write_text(json.dumps(data))
    assert llama_page.section(results).startswith("Measured 2026-11-20 to 2026-11-22 on one ")
    assert "\nDecoding, one CUDA graph" in text
    for cost in data["costs"]:
        cost["date"] = "2026-11-21T20:00:00+00:00"
    path.write_text(json.dumps(data))
    assert "\nDecoding (2026-11-21), one CUDA graph" in llama_page.section(results)


def test_profiles_and_losses_come_when_they_are_there(results):
    from bench.studies.llama_profile import KINDS, REST

    one = {"ms": dict.fromkeys((*KINDS, REST), 2.0), "all": 12.0, "launches": 7, "span": 11.5}
    (results / "llama_profile.json").write_text(json.dumps({"torch": one, "tkq": one, "tkq, eager": one}))
    (results / "llama_learning.json").write_text(json.dumps(
        {"losses": {"torch": [8.0] * 100, "tkq": [8.0] * 50}, "apart": {"torch": 0.0, "tkq": 0.0012}}))
    text = llama_page.section(results)
    assert '| kernels | torch | patched, `linear="tkq"` |\n' in text
    assert "| sum (launches) | 12.0 (7) | 12.0 (7) |" in text
    assert "| run | first | step 50 | step 100 | max difference |" in text
    assert '| patched, `linear="tkq"` | 8.000 | 8.000 |  | 0.120 % |' in text


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="lacks the markers"):
        llama_page.written("a page", "figures")


def test_whole_curves_of_runs_that_were_alike_are_resumed():
    new = dict(at_most=0.005, rate=1e-4, batch=2, seqlen=4096, sizes={"hidden_size": 8}, versions={"torch": "2.11"},
               made={}, apart={}, losses={})
    whole = [8.0] * llama.STEPS
    old = {**new, "made": {"torch": "2026-11-22T10:00", "tkq": "2026-11-22T10:00"},
           "apart": {"torch": 0.0, "tkq": 0.001}, "losses": {"torch": whole, "tkq": [8.0] * 50}}
    merged = {**new, "made": {"torch": "2026-11-22T10:00"}, "apart": {"torch": 0.0}, "losses": {"torch": whole}}
    assert llama.resumed_curves(old, new) == merged
    for key, other in (("rate", 1e-3), ("seqlen", 512), ("sizes", {}), ("versions", {"torch": "2.12"})):
        with pytest.raises(ValueError, match=f"{key}: the curves on file are of .*: begin a new file"):
            llama.resumed_curves({**old, key: other}, new)
    for key in ("seqlen", "sizes", "versions", "made"):
        del old[key]  # as files were
    assert llama.resumed_curves(old, new) == {**merged, "made": {"torch": ""}}


def test_the_page_says_which_curves_are_of_an_earlier_run():
    found = {"losses": {"torch": [8.0] * 50, "tkq": [8.0] * 50}, "apart": {"torch": 0.0, "tkq": 0.001}}
    assert "earlier" not in llama_page.learning(found)
    found["made"] = {"torch": "", "tkq": "2026-11-22T10:00"}
    assert llama_page.learning(found).endswith("\n\nFrom an earlier run than the rest: torch (no date on file).")
    found["made"] = {"torch": "2026-11-22T10:00", "tkq": "2026-11-23T10:00"}
    assert "rest: torch (2026-11-22)." in llama_page.learning(found)
    found["made"]["torch"] = found["made"]["tkq"]
    assert "earlier" not in llama_page.learning(found)


def test_decoding_takes_turns(monkeypatch):
    """Of a prefill and a token, tkq and torch one after the other, each as often first."""
    turns = []

    class Decoder:
        def __init__(self, model, ids, room):
            self.model = model
            assert (ids.shape, room) in {((b, n), n + llama.DECODED) for b, n in llama.DECODE}

        def seconds(self, count):
            turns.append(self.model)
            return (3e-3 if self.model == "ours" else 5e-3), 1e-3

    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9), device="cpu", set_attn_implementation=lambda _: None)
    model.eval = lambda: model
    monkeypatch.setattr(llama.llama_generate, "Decoder", Decoder)
    monkeypatch.setattr(llama.llama_train, "patched", lambda model, attention: ("ours", None))
    costs = list(llama.decoding(model, rounds=4))
    names = ["ours" if turn == "ours" else "torch" for turn in turns]
    assert names[:8] == names[8:] and sorted(names[:2]) == sorted(names[2:4]) == ["ours", "torch"]
    assert {names[0], names[2]} == {"ours", "torch"}
    assert [c.name for c in costs[:4]] == [f"{name}: {what}, B1 prompt 1024" for name in ("tkq", "torch")
                                           for what in ("prefill", "a token")]
    assert [round(c.median_us) for c in costs[:4]] == [3000, 1000, 5000, 1000] and {c.samples for c in costs} == {4}
