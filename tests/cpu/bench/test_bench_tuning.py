"""What the tuning scripts share, as far as it goes without a GPU; and that each of them takes its options."""
import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from bench.tune import common
from tkq.runtime import Recipe
from tkq.runtime.compile.cache import Cache
from tkq.testing.timing import Comparison, Timing

SCRIPTS = ("attention", "attention_backward", "fp8", "gemm", "norms", "one_pass_rows", "persistent_rows", "short_norms")


def test_size():
    assert common.size("4096") == (4096, 4096, 4096) and common.size("1x2x3") == (1, 2, 3)


def test_what_does_not_compile_is_named_and_returned(capsys):
    bad = Recipe("tkq.cli.demo:nothing", ())
    assert common.precompile([bad, bad], 1) == {bad}
    out = capsys.readouterr().out
    assert out.count("nothing") == 1 and "0 kernels compiled" in out


def test_what_is_in_the_cache_starts_no_process(monkeypatch, tmp_path, capsys):
    stored = Cache(tmp_path)
    monkeypatch.setattr(common, "cache", lambda: stored)
    monkeypatch.setattr(common.keys, "entry_name", lambda recipe: recipe.builder.partition(":")[2])
    monkeypatch.delattr(common.concurrent.futures.ProcessPoolExecutor, "submit")
    for name in ("one.so", "two.o"):
        stored.put(name, b"x", {})
    assert common.precompile([Recipe("a:one", ()), Recipe("a:two", ())]) == set()
    assert "2 kernels compiled, or in the cache" in capsys.readouterr().out


def test_variants_are_listed_by_their_ratio_to_torch():
    case = {"ms": {"torch": [2.0, 2.0], "slow": [4.0, 4.0], "quick": [1.0, 2.0]},
            "clocks": {"torch": [[1000, 300], [1200, 500]], "slow": [], "quick": [[None, None]]},
            "notes": {"torch": "", "slow": "", "quick": "WRONG by 1", "broken": "ValueError: no"}}
    lines = common.lines_of(case, lambda ms: f"<{ms:.1f}>")
    assert [line.split()[0] for line in lines] == ["quick", "torch", "slow", "broken"]
    assert "1.500  (1.000..2.000)  <1.5>" in lines[0] and "WRONG by 1" in lines[0]
    assert "1100 MHz  400 W" in lines[1] and "MHz" not in lines[2] and "ValueError: no" in lines[3]


def test_a_final_is_of_the_quickest_the_planned_one_and_the_others(monkeypatch, capsys):
    from tkq.testing import timing

    cost, asked = {"a": 4.0, "b": 1.0, "c": 2.0, "d": 3.0, "peer": 1.5}, []

    def compare(candidates, make_inputs, effort, error=None):
        asked.append((list(candidates), effort))
        return Comparison(tuple(Timing(name, "", (cost[name],) * 7) for name in candidates), 1, 1, 1)

    monkeypatch.setattr(timing, "compare", compare)
    found = common.final(dict.fromkeys("abcd"), "a", {"peer": None}, None, ("short", "long"), 2)
    assert asked == [(["a", "b", "c", "d"], "short"), (["peer", "a", "b", "c"], "long")]
    assert found.as_dict()["second"]["b"] == (1.0,) * 7
    common.show(found, 1e-3, {"QuACK": "not installed"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["b", "1.0000", "ms", "1", "GB/s", "1.500"] and "QuACK is not there" in lines[-1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_takes_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"tune_{name}", "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"bench.tune.{name}").main()
    assert end.value.code == 0 and "--" in capsys.readouterr().out


def test_turns_go_on_without_a_variant_that_fails(tmp_path, capsys):
    class Gpu:
        def first_calls(self, f, sets):
            return f(*sets[0]), 0.01

        def batch(self, f, sets, calls):
            return SimpleNamespace(run=lambda seconds, hook: f(*sets[0]))

        def release(self):
            pass

    turns = object.__new__(common.Turns)
    turns.options = SimpleNamespace(rounds=3, pause=0.0, seconds=0.0, out=tmp_path / "f.json")
    turns.gpu, turns.monitor, turns.report = Gpu(), SimpleNamespace(live=False), {"cases": []}
    calls = {"torch": (lambda x: x, [(2.0,)]), "half": (lambda x: x / 2, [(2.0,)]), "bad": (lambda x: x / 0, [(2.0,)])}
    turns.case({"kind": "row", "shape": (1, 2, 3)}, calls, lambda name, got: got - 1, lambda ms: f"{ms} ms")
    case, = json.loads((tmp_path / "f.json").read_text())["cases"]
    assert case["ms"] == {"torch": [2.0] * 3, "half": [1.0] * 3} and case["kind"] == "row"
    assert case["notes"]["torch"] == "WRONG by 1" and case["notes"]["half"] == "" and "Zero" in case["notes"]["bad"]
    assert capsys.readouterr().out.splitlines()[1:3] == ["row (1, 2, 3)", "  half                          2.000  "
                                                         "(2.000..2.000)  1.0 ms    "]


def test_the_peers_of_row_passes_are_known_by_the_names_that_are_asked_for():
    from bench.peers import common as peers
    from bench.tune import one_pass_rows

    for kind in one_pass_rows.KINDS:
        job = one_pass_rows._job(kind, 8, 1024)
        assert set(one_pass_rows.PEERS[kind]) <= set(peers.PEERS[job.peer_op])
