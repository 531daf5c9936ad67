"""LayerNormMultiRow: which specs take it, and its machine code. What it computes:
tests/gpu/norms/test_norm_multi_row.py."""
import pytest

from tkq.norms import catalog
from tkq.norms.config import Config, waits_together
from tkq.norms.forward.kernel import PlainNorm, norm_of
from tkq.norms.forward.layernorm import LayerNorm
from tkq.norms.forward.layernorm_multi_row import LayerNormMultiRow
from tkq.norms.forward.rmsnorm import RMSNorm
from tkq.norms.launch import recipe
from tkq.norms.plan import plan
from tkq.norms.spec import NormSpec
from tkq.testing import sass


def spec(N, bias="fp32", kind="layernorm", **options):
    return NormSpec(kind, N, "bf16", "fp32", bias, **{"vector": 8, **options})


def test_rows_that_wait_together():
    assert waits_together(spec(65536), plan(spec(65536)))
    assert isinstance(PlainNorm(*recipe(spec(65536)).args).norm.norm, LayerNormMultiRow)
    several, held = (Config(256, 256, 8, load, False, 2) for load in ("shared", "registers"))
    for other, config in ((spec(65528), plan(spec(65528))), (spec(65536, kind="rmsnorm"), several),
                          (spec(65536, out="e4m3", scale="row"), held), (spec(4096), plan(spec(4096))),
                          (spec(65536), Config(256, 256, 8)), (spec(16384), Config(512, 512, 1, "shared", False, 2))):
        assert not waits_together(other, config)
        assert norm_of(other, config) in (LayerNorm, RMSNorm)


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.machine_code(recipe=lambda stats: recipe(spec(65536, stats=stats)))
def test_machine_code(stats, machine_code):
    s = spec(65536, stats=stats)
    config = plan(s)
    kernel, = sass.assert_sass(machine_code, catalog.expectation(s, config))
    assert kernel.count("STAS") == config.rows_per_thread == 3
