"""A norm's backward has a plan for few rows and one for many: pure Python, so every number of rows can be looked at."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.rows.test_row_plan import shapes
from tkq.norms.backward import catalog, ops
from tkq.norms.backward import launch as backward_launch
from tkq.norms.backward import plan as backward_plan
from tkq.norms.backward.launch import ByRows
from tkq.norms.backward.plan import limits, of_rows, steps
from tkq.rows.persistent import plan as rows
from tkq.rows.persistent.launch import recipe_of
from tkq.rows.persistent.plan import RowShape, plan
from tkq.runtime.compile import dry_run
from tkq.runtime.device import arch

M = st.one_of(st.integers(1, 1 << 30), st.integers(1, 70000))
PROCESSORS = st.sampled_from([132, 114, 78, 1])
WAYS = [(kind, N) for kind in ("rmsnorm", "layernorm") for N in (64, 520, 1024, 2048, 2056, 4096, 8192, 131072)]


def norm(kind, N):
    return catalog.spec(kind, N, weight="bf16" if kind == "rmsnorm" else "fp32").shape


@given(st.one_of(shapes(), st.sampled_from(WAYS).map(lambda way: norm(*way))), M, PROCESSORS)
@settings(deadline=None)
def test_every_number_of_rows_has_one_of_few_plans(shape, m, num_sms):
    found = limits(shape, num_sms)
    assert 1 <= len(found) <= backward_plan.MOST_PLANS, "a kernel each"
    *some, (last, many) = found
    assert last is None and many == plan(shape)
    most = [rows_ for rows_, _ in some]
    assert most == sorted(set(most)) and all(m > 0 for m in most)
    for _, p in found:
        rows.check(shape, p)
        assert p.direct or p.per_thread * shape.columns <= p.consumer_registers
    chosen = of_rows(shape, m, num_sms)
    assert chosen in [p for _, p in found]
    assert of_rows(shape, 1 << 30, 1) == many


@given(st.sampled_from(WAYS), st.integers(1, 6000), st.integers(1, 140))
@settings(deadline=None, max_examples=40)
def test_each_row_once_by_any_of_the_plans(way, m, most):
    for _, p in limits(norm(*way), 132):
        units = p.units(m, p.min_blocks_per_sm * most // p.cluster or 1)
        found = [row for unit in range(units) for row in p.rows_of(unit, units, m)]
        assert sorted(found) == list(range(m))


@pytest.mark.parametrize("kind, N, by_rows", [
    ("rmsnorm", 1024, {1: (8, False), 32768: (8, False), 135168: (8, False), 135169: (4, False), 262144: (4, False)}),
    ("layernorm", 1024, {1: (8, False), 32768: (8, False), 33793: (4, False), 262144: (4, False)}),
    ("layernorm", 4096, {1: (8, True), 1024: (8, True), 8192: (8, True), 8448: (8, True), 8449: (4, False)}),
    ("rmsnorm", 4096, {1: (8, True), 4096: (8, True), 4224: (8, True), 4225: (8, False), 8192: (8, False)}),
    ("rmsnorm", 2048, {1: (8, False), 8448: (8, False), 8449: (4, False), 131072: (4, False)}),
    ("layernorm", 2048, {1: (8, False), 16384: (8, False), 16897: (4, False), 131072: (4, False)})])
def test_what_was_measured_on_132_processors(kind, N, by_rows):
    """(warps, do loads leave L2 first?) by rows."""
    found = {m: of_rows(norm(kind, N), m) for m in by_rows}
    assert {m: (p.warps, p.evict_first) for m, p in found.items()} == by_rows


@pytest.mark.parametrize("change", [dict(loads=(16, 32)), dict(loads=(16, 16, 16)), dict(bulk=False), dict(columns=0)])
def test_what_was_not_measured_has_one_plan(change):
    shape = RowShape(**{**norm("layernorm", 4096).__dict__, **change, "vector": 4})
    assert [p for _, p in limits(shape, 132)] == [plan(shape)]


def test_a_kernel_is_made_when_its_number_of_rows_comes(monkeypatch):
    made, calls = [], []

    def launcher(spec, device, p):
        made.append(p.warps)
        return lambda loads, *others: calls.append((p.warps, loads[0].shape[0], others))

    monkeypatch.setattr(backward_launch.launch, "launcher", launcher)
    monkeypatch.setattr(arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(arch, "require_hopper", lambda device: None)
    run = backward_launch.launcher(catalog.spec("layernorm", 4096), "cuda")
    assert isinstance(run, ByRows) and not made
    for m in (8449, 1, 1024, 8448, 3, 1 << 20):
        run((torch.empty(m, 0),), "others")
    assert made == [4, 8], "each once"
    assert [warps for warps, *_ in calls] == [4, 8, 8, 8, 8, 4] and calls[0] == (4, 8449, ("others",))
    backward_launch.launcher(catalog.spec("rmsnorm", 8192), "cuda")
    assert made == [4, 8, 8], "one plan needs no choice"


def test_a_rehearsal_takes_the_kernels_of_all_rows(monkeypatch):
    made = []
    monkeypatch.setattr(backward_launch.launch, "launcher",
                        lambda spec, device, p: made.append(p.warps) or (lambda *call: None))
    monkeypatch.setattr(arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(arch, "require_hopper", lambda device: None)
    monkeypatch.setattr(dry_run, "under_way", lambda: True)
    run = backward_launch.launcher(catalog.spec("layernorm", 4096), "cuda")
    run((torch.empty(9, 0),))
    assert made == [8, 4], "each once"


def test_a_call_of_another_number_of_rows_is_looked_up(monkeypatch):
    """No second spec, no second check."""
    asked, ran = [], []
    monkeypatch.setattr(ops, "_calls", {})
    monkeypatch.setattr(backward_launch, "launcher", lambda spec, device: asked.append(spec) or
                        (lambda loads, *others: ran.append(loads[0].shape[0])))
    weight = torch.ones(64)
    for m in (5, 70, 3):
        x = torch.zeros(m, 64)
        ops._launch("rmsnorm", x, x, weight, torch.ones(m), None, None, 0.0, (True, True, False), None, None,
                             None)
    assert len(asked) == 1 and ran == [5, 70, 3]


def test_shipped_kernels_are_those_of_all_rows():
    recipes = {k.recipe for k in catalog.shipped()}
    for kind, N in (("rmsnorm", 1024), ("layernorm", 2048), ("rmsnorm", 4096), ("layernorm", 4096)):
        found = steps(norm(kind, N))
        s = catalog.spec(kind, N, weight="bf16" if kind == "rmsnorm" else "fp32")
        assert len(found) > 1 and {recipe_of(s, p) for _, p in found} <= recipes
