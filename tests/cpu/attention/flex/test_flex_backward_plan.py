"""How the backward of flex_attention is built, for each width of its tiles."""
from dataclasses import replace

import pytest

from tkq.attention.flex import catalog
from tkq.attention.flex.backward.kernel import FlexBackward
from tkq.attention.flex.backward.plan import capture_plan, plan
from tkq.attention.flex.backward.spec import FlexBackwardSpec
from tkq.attention.flex.functions.derivative import joint
from tkq.attention.flex.spec import WITH_GRADIENTS, backward_width, task_of

SLOPE, *_ = joint(catalog.softcap())


@pytest.mark.parametrize("width", WITH_GRADIENTS)
@pytest.mark.parametrize("slope", [None, SLOPE], ids=["", "slope"])
@pytest.mark.parametrize("dq", [False, True])
@pytest.mark.parametrize("block", [64, 128, 192])
def test_every_spec_has_a_plan(width, slope, dq, block):
    """Whose blocks of keys are the tasks of the lists, and tiles of queries parts of a listed block."""
    spec = FlexBackwardSpec(width=width, dq=dq, joint=slope)
    config = plan(spec, block)
    assert config.block == capture_plan(width).block == task_of(width) and block % config.tile == 0
    assert FlexBackward(spec, config).base.config == config


def test_widths():
    """Of tiles that hold both head dims."""
    for width in WITH_GRADIENTS:
        assert {backward_width(*dims) for dims in ((width, 8), (8, width), (width - 8, width))} == {width}
    assert backward_width(136, 64) == backward_width(192, 192) == 256


def test_what_goes_between_warpgroups():
    """Of wide heads P itself takes 2 bytes, P times a slope, which may be of any size, 4."""
    plain, sloped = FlexBackwardSpec(width=256), FlexBackwardSpec(width=256, joint=SLOPE)
    for spec, other in ((plain, sloped), (sloped, plain)):
        assert plan(spec).shared_bytes(256) <= plan(plain).shared_bytes(256)
        with pytest.raises(NotImplementedError, match="a score's slope takes 4"):
            FlexBackward(spec, replace(plan(other), registers=plan(spec).registers))
