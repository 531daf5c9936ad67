"""Plans of scans, what specs refuse, and the machine code of some kernels."""
import dataclasses
import itertools

import pytest

from tests.helpers.shipped import of_name
from tkq.recurrence.catalog import shipped
from tkq.recurrence.config import WARP, ScanConfig
from tkq.recurrence.plan import BLOCKS, plan, widest
from tkq.recurrence.spec import LAYOUTS, ScanSpec, vectors
from tkq.testing import sass


@pytest.mark.parametrize("dtype, layout", list(itertools.product(("bf16", "fp16", "fp32"), LAYOUTS)))
def test_every_spec_has_a_plan(dtype, layout):
    for vector, gradients, columns in itertools.product(vectors(dtype), (None, "both"), (1, 100, 132 * WARP, 1 << 20)):
        spec = ScanSpec(dtype, vector, layout, gradients=gradients)
        taken = vector if layout == "time" else widest(vector, spec, columns)
        assert taken <= vector and vector % taken == 0
        config = plan(dataclasses.replace(spec, vector=taken), columns, 2048, 132)
        assert config.tokens_per_thread % (taken if layout == "time" else 1) == 0
        for tokens in (1, 3, 31, 32, 33, 129, 1000, 1 << 20) if layout == "time" else ():
            config = plan(spec, columns, tokens * vector, 132)
            runs = -(-tokens * vector // (config.tokens_per_thread * config.lanes))
            assert config.tokens_per_thread % vector == 0 and config.warps <= runs * config.line_groups
            assert config.lanes == WARP or runs == 1
        if layout == "channels" and taken > 1:
            assert columns >= BLOCKS * WARP * taken


@pytest.mark.parametrize("words, make", [
    ("vector is 3", lambda: ScanSpec("bf16", 3)), ("layout is 'tokens'", lambda: ScanSpec("bf16", layout="tokens")),
    ("reverse is True", lambda: ScanSpec("bf16", reverse=True)), ("of_state is True", lambda: ScanSpec(
        "bf16", of_state=True)), ("warps is 16", lambda: ScanConfig(16, 16)),
    ("lanes is 3", lambda: ScanConfig(16, 8, lanes=3)), ("line_groups is 0", lambda: ScanConfig(16, 8, line_groups=0))])
def test_refused_by_name(words, make):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("name", ["scan-bf16-channels-backward"])
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)
