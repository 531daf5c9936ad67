"""Machine code of Based's launches, without a GPU: no spills, tensor cores not serialised."""
import pytest

from tests.helpers.shipped import of_name
from tkq.linear_attention.based.catalog import expectation, gradient_expectation, shipped
from tkq.linear_attention.based.gradients import recipe as gradient_recipe
from tkq.linear_attention.based.launch import recipe
from tkq.linear_attention.based.spec import BasedSpec, GradientSpec
from tkq.testing import sass

# users would see the DSL's warning at a first call: a loop within a loop avoids it
pytestmark = pytest.mark.filterwarnings("error:This static loop has")


@pytest.mark.parametrize("name", ["based-bf16-v64", "based-bf16-v64-states", "based_dk-bf16-v64",
                                  "based_prepare-bf16-v64"])
@pytest.mark.machine_code(recipe=lambda name: of_name(shipped(), name).recipe)
def test_shipped(name, machine_code):
    sass.assert_sass(machine_code, of_name(shipped(), name).expectation)


@pytest.mark.machine_code(recipe=lambda: recipe(BasedSpec("fp16", 80, part="outputs")))
def test_float16_in_segments(machine_code):
    sass.assert_sass(machine_code, expectation(BasedSpec("fp16", 80, part="outputs")))


@pytest.mark.machine_code(recipe=lambda: gradient_recipe(GradientSpec("fp16", 128)))
def test_gradients_of_float16(machine_code):
    sass.assert_sass(machine_code, gradient_expectation(GradientSpec("fp16", 128)))


@pytest.mark.parametrize("given, words", [
    (dict(dtype="fp32"), "dtype is 'fp32'"), (dict(value_dim=40), "value_dim is 40"),
    (dict(value_dim=144), "value_dim is 144"), (dict(part="first"), "part is 'first'"),
    (dict(reverse=True), "norm and reverse")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"BasedSpec: {words}"):
        BasedSpec(**dict(dtype="bf16", value_dim=64) | given)


def test_what_a_gradients_spec_refuses():
    with pytest.raises(ValueError, match="GradientSpec: value_dim is 256"):
        GradientSpec("bf16", 256)
