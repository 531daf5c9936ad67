"""PersistentLayerNorm's plans, and its machine code. What it computes: tests/gpu/norms/test_norm_persistent.py."""
import pytest

from tkq.norms import persistent_plan
from tkq.norms.spec import NormSpec
from tkq.rows.persistent import plan as rows
from tkq.rows.persistent.plan import smem_bytes
from tkq.runtime.compile.expectation import Expectation
from tkq.testing import sass


def spec(N, bias="fp32", kind="layernorm", **options):
    return NormSpec(kind, N, "bf16", "fp32", bias, **{"vector": 8, **options})


@pytest.mark.parametrize("N", [65536, 100008, 131072, 262136, 262144])
@pytest.mark.parametrize("bias", [None, "fp32"])
def test_variants_cover_each_row_once_and_keep_the_vectors(N, bias):
    found = persistent_plan.variants(spec(N, bias))
    assert len(found) >= 2
    for p in found:
        rows.check(persistent_plan.shape(spec(N, bias)), p)
        assert p.vectors == "float" and p.threads_per_row * p.per_thread >= p.cols and p.cols * p.cluster >= N
        for units in (1, 7, 8, 16):
            assert sorted(row for u in range(units) for row in p.rows_of(u, units, 37)) == list(range(37))


@pytest.mark.parametrize("other", [
    spec(32768), spec(262144, kind="rmsnorm"), spec(262144, offset=True), spec(262140, vector=4)], ids=str)
def test_others_have_none(other):
    assert not persistent_plan.variants(other)


def longest(bias):
    """(recipe, spec, plan)"""
    s = spec(262144, bias)
    p = persistent_plan.variants(s)[0]
    return persistent_plan.recipe(s, p), s, p


@pytest.mark.parametrize("bias", [None, "fp32"])
@pytest.mark.machine_code(recipe=lambda bias: longest(bias)[0])
def test_machine_code(bias, machine_code):
    _, s, p = longest(bias)
    wanted = Expectation(instructions=("UBLKCP", "STG.E.128", "STAS", "LDS.128", "LDG.E.128"), registers=168,
                         smem=smem_bytes(persistent_plan.shape(s), p) + 2048)
    sass.assert_sass(machine_code, wanted)
