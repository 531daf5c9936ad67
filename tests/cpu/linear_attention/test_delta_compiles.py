"""The delta rule's forward, which no public function calls yet, compiles for sm_90a without spills: no GPU needed."""
import pytest

from tkq.linear_attention.catalog import expectation
from tkq.linear_attention.launch import recipe
from tkq.linear_attention.spec import LinearSpec
from tkq.testing import sass


@pytest.mark.parametrize("gate, beta, states", [("token", "fp32", "fp32"), ("none", "bf16", None)])
def test_machine_code(gate, beta, states):
    if sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    spec = LinearSpec("bf16", 128, 128, gate, states, states, delta=beta)
    sass.assert_sass(recipe(spec), expectation(spec))


@pytest.mark.parametrize("given, words", [
    (dict(delta="fp32", reverse=True), "delta and reverse"), (dict(dot=True), "dot"),
    (dict(dot=True, gate="token", delta="bf16"), "dot"), (dict(head_dim=144), "head_dim is 144"),
    (dict(value_dim=40), "value_dim is 40"), (dict(gate="channel"), "gate is 'channel'")])
def test_what_a_spec_refuses(given, words):
    with pytest.raises(ValueError, match=f"LinearSpec: {words}"):
        LinearSpec(**dict(dtype="bf16", head_dim=64, value_dim=64) | given)
