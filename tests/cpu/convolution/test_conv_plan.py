"""Plans of convolutions: every spec has one, and runs cover all tokens. The machine code of some kernels."""
import itertools

import pytest

from tests.helpers.shipped import of_name
from tkq.convolution.catalog import expectation, shipped
from tkq.convolution.config import WARP
from tkq.convolution.plan import plan, run_tokens, warps, widest
from tkq.convolution.spec import ConvSpec, StepSpec, vectors
from tkq.testing import sass


@pytest.mark.parametrize("layout, gradients", list(itertools.product(("channels", "time"), (None, "both"))))
def test_runs_are_of_whole_groups_and_cover_all_tokens(layout, gradients):
    for vector, tokens, channels, batch in itertools.product((1, 4, 8), (1, 7, 64, 2048, 1 << 24), (1, 64, 8192),
                                                             (1, 300)):
        spec = ConvSpec("bf16", "bf16", 4, None, True, vector, layout, gradients=gradients)
        run = run_tokens(spec, batch, tokens, channels, 132)
        step = plan(spec).rows if layout == "channels" else WARP * vector
        runs = -(-tokens // run)
        assert run >= 1 and run % step == 0 and (runs - 1) * run < tokens <= runs * run and runs <= 65535


@pytest.mark.parametrize("more", [dict(), dict(packed="int32"), dict(packed="int32", numbers=True), dict(head=128)])
def test_a_backward_along_channels_is_one_wave_of_warps_that_fit(more):
    """Blocks of several warps that each have a run were up to a third more than fit at once: the last ones alone took
    as long as the others."""
    spec = ConvSpec("bf16", "bf16", 4, "bf16", True, 4, gradients="both", **more)
    assert warps(spec) * WARP * -(-expectation(spec).registers // 8) * 8 <= 65536
    for batch, channels, tokens in itertools.product((1, 2, 3, 8), (128, 2048, 5376, 8192), (2048, 32768)):
        columns, runs = batch * channels // 128, -(-tokens // run_tokens(spec, batch, tokens, channels, 132))
        blocks = columns * -(-runs // plan(spec).warps)
        assert blocks * plan(spec).warps <= 132 * warps(spec)
        assert runs == -(-tokens // 32) or 2 * columns * runs > 132 * warps(spec)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_vectors(dtype):
    for layout, vector in itertools.product(("channels", "time"), vectors(dtype)):
        taken = widest(vector, dtype, layout)
        assert 1 <= taken <= vector and ConvSpec(dtype, dtype, 4, vector=taken, layout=layout)


@pytest.mark.parametrize("words, make", [
    ("width is 9", lambda: ConvSpec("bf16", "bf16", 9)), ("vector is 3", lambda: ConvSpec("bf16", "bf16", 4, vector=3)),
    ("layout is 'time'", lambda: ConvSpec("bf16", "bf16", 4, layout="time", packed="int32")),
    ("dtype is 'fp64'", lambda: ConvSpec("fp64", "bf16", 4)), ("columns is 2", lambda: StepSpec(
        "bf16", "bf16", 4, columns=2))])
def test_specs_refuse_by_name(words, make):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        make()


@pytest.mark.parametrize("name", [
    "causal_conv1d-bf16-w4-channels-backward-bias", "causal_conv1d-bf16-w4-channels-forward-bias-state-packed",
    "causal_conv1d-bf16-w4-time-backward-bias", "causal_conv1d_step-w4-l4-int32-bias"])
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)


@pytest.mark.parametrize("width, bias, blocks", [(4, None, 16), (4, "bf16", 0), (8, None, 0), (2, None, 16)])
def test_registers_are_asked_for_where_there_are_enough(width, bias, blocks):
    """Wider ones have more numbers than 128 registers."""
    assert plan(ConvSpec("bf16", "bf16", width, bias, True, 4, gradients="both")).blocks == blocks
    assert not plan(ConvSpec("bf16", "bf16", width, bias, True, 4)).blocks
