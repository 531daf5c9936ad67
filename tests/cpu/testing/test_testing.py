"""tkq.testing as a user has it: the rule of numerics says yes and no where it should, and so does assert_sass."""
import math

import pytest
import torch

import tkq.testing
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe
from tkq.runtime.compile import build
from tkq.testing import Expectation, assert_2x, assert_sass, errors, sass
from tkq.testing.rule import Blocks


def case(seed=0, n=4096):
    """(truth, PyTorch's bf16 result)"""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x.bfloat16()


def test_torchs_own_result_passes_and_one_three_times_as_wrong_does_not():
    truth, peer = case()
    assert_2x(peer, truth, peer)
    with pytest.raises(AssertionError, match=r"mine \[\d+:\d+\]: error .* allowed .* \(PyTorch "):
        assert_2x((truth + 4 * (peer.double() - truth)).float(), truth, peer, what="mine")


def test_a_bias_is_found_although_each_error_is_allowed():
    truth, peer = case()
    shifted = truth.float() + 2e-3
    found = errors(shifted, truth, peer)
    assert found.worst < found.allowed and found.bias == pytest.approx(2e-3, rel=0.01) and found.count == truth.numel()
    with pytest.raises(AssertionError, match="mean signed error 2"):
        assert_2x(shifted, truth, peer)


def test_ulps_cover_what_torch_has_exactly():
    truth = torch.ones(64, dtype=torch.float64)
    ours = (truth * (1 + torch.finfo(torch.bfloat16).eps)).bfloat16()
    with pytest.raises(AssertionError):
        assert_2x(ours, truth, truth, ulps=0.5, bias_ulps=1)
    with pytest.raises(AssertionError, match="signed"):
        assert_2x(ours, truth, truth)
    assert_2x(ours, truth, truth, bias_ulps=1)
    assert_2x(ours.float(), truth, truth, ulps=0, cancelled=1e5, bias_ulps=1e6)


def of_causal(rows, heads=2, dim=16):
    """(truth, PyTorch's bf16 result): like dv under a causal mask, where late keys are seen by few queries."""
    truth = torch.randn(1, rows, heads, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    truth *= torch.linspace(1, 0.005, rows, dtype=torch.float64)[None, :, None, None]
    return truth, truth.bfloat16()


def test_a_late_row_is_judged_against_late_rows():
    rows = 4097
    truth, peer = of_causal(rows)
    assert_2x(peer, truth, peer)
    wrong = peer.double()
    wrong[:, rows // 2:] *= 1.3
    with pytest.raises(AssertionError, match=r"dv \[0, \d+:\d+, [01]\]: error .* allowed"):
        assert_2x(wrong.bfloat16(), truth, peer, what="dv", bias_ulps=1)
    late = truth.clone()
    late[:, -1, 1] *= 1.3  # one row of one head
    with pytest.raises(AssertionError, match=r"\[0, 40\d\d:4097, 1\]"):
        assert_2x(late.float(), truth, peer)


def test_a_small_column_of_a_reduced_gradient_is_judged_beside_its_neighbours():
    truth = torch.randn(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    truth[500:] *= 1e-4
    peer = truth.bfloat16()
    assert_2x(peer, truth, peer)
    wrong = peer.clone()
    wrong[700] *= 1.3
    with pytest.raises(AssertionError, match=r"\[6\d\d:7\d\d\]"):
        assert_2x(wrong, truth, peer)
    assert_2x(wrong, truth, peer, block=None)  # what hid it


@pytest.mark.parametrize("shape", [(), (1,), (63,), (130,), (1, 5), (200, 3), (3, 200, 2), (200, 1, 2, 4),
                                   (2, 2, 129, 8)])
def test_each_element_is_in_one_block(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    blocks = Blocks.of(shape, 64)
    assert blocks.count == max(1, (max(shape[:-1] or shape) if shape else 1) // 64)
    largest = blocks.largest(x)
    assert largest.shape[-1] == blocks.count
    for place in torch.arange(x.numel()).tolist()[::max(1, x.numel() // 50)]:
        one = torch.zeros_like(x)
        one.view(-1)[place] = 1
        found = blocks.largest(one)
        assert found.sum() == 1  # the others see nothing of it
        words = blocks.named(divmod(int(found.argmax()), blocks.count))
        assert not words or eval(f"one{words}").sum() == 1  # where the block is said to be


def test_blocks_have_at_least_their_rows_and_some_are_refused():
    blocks = Blocks.of((1000, 8), 64)
    sizes = blocks.largest(torch.arange(1000.0)[:, None].expand(1000, 8)).flatten().long().diff()
    assert blocks.count == 15 and sizes.min() >= 64
    for block in (0, -1):
        with pytest.raises(ValueError, match=f"block is {block}, allowed"):
            assert_2x(torch.ones(2), torch.ones(2), torch.ones(2), block=block)


@pytest.mark.parametrize("place, value, words", [(3, float("nan"), "NaN in 2 places, expected 1"),
                                                  (0, 1.0, "NaN in 0 places, expected 1"),
                                                  (1, -float("inf"), "infinities differ")])
def test_what_is_not_finite_is_where_it_should_be(place, value, words):
    truth = torch.tensor([float("nan"), float("inf"), 1.0, 2.0], dtype=torch.float64)
    ours = truth.float()
    assert_2x(ours, truth, truth.float())
    ours[place] = value
    with pytest.raises(AssertionError, match=words):
        assert_2x(ours, truth, truth.float())


@pytest.mark.parametrize("error, words, tensors", [
    (TypeError, "ours: got list", ([1], [1], [1])),
    (TypeError, "truth: got float", (torch.ones(1), 1.0, torch.ones(1))),
    (TypeError, "same_precision: got NoneType", (torch.ones(1), torch.ones(1), None)),
    (ValueError, "truth: is on meta, but ours is on cpu", (torch.ones(1), *[torch.ones(1, device="meta")] * 2)),
    (ValueError, "ours: is on meta, where it has no values", [torch.ones(1, device="meta")] * 3)])
def test_what_cannot_be_compared_is_named(error, words, tensors):
    with pytest.raises(error, match=words):
        assert_2x(*tensors)


def test_shapes_and_nothing_at_all():
    for theirs in (torch.zeros(1), torch.zeros(3, 1), torch.zeros(())):  # what would be broadcast, silently
        with pytest.raises(AssertionError, match="x: shape of same_precision .* expected \\(3,\\)"):
            assert_2x(torch.zeros(3), torch.zeros(3), theirs, what="x")
    with pytest.raises(AssertionError, match="shape"):
        assert_2x(torch.zeros(2), torch.zeros(3), torch.zeros(3))
    assert_2x(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    assert errors(torch.zeros(0), torch.zeros(0), torch.zeros(0)) is None
    everywhere = torch.full((2,), float("nan"))
    assert_2x(everywhere, everywhere, everywhere)


@pytest.mark.skipif(sass.nvdisasm() is None, reason="nvdisasm is not installed")
def test_assert_sass_gives_the_report_or_says_what_is_wrong(tmp_path):
    old, _ = build._cache, build.configure(tmp_path)
    try:
        kernel, = assert_sass(Recipe("tests.helpers.process.kernels_for_tests:build_gpu_scale", (Scale(),)),
                              Expectation(instructions=("LDG.E.128",), registers=40))
        assert kernel.wide("STG") == 1
        with pytest.raises(AssertionError, match=r"local loads(.|\n)*a stack of(.|\n)*build_local_memory"):
            assert_sass(Recipe("tests.helpers.process.kernels_for_tests:build_local_memory"))
    finally:
        build._cache = old


def test_the_public_names_are_there_and_others_are_not():
    assert all(getattr(tkq.testing, name) for name in tkq.testing.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        tkq.testing.no_such  # noqa: B018


@pytest.mark.parametrize("given, error, words", [
    (dict(ours=torch.ones(2) + 1j), TypeError, "ours: dtype is torch.complex64"),
    (dict(truth=torch.ones(2, dtype=torch.int32)), TypeError, "truth: dtype is torch.int32"),
    (dict(ulps=float("nan")), ValueError, "ulps: got nan"),
    (dict(cancelled=float("inf")), ValueError, "cancelled: got"),
    (dict(bias_ulps=-1.0), ValueError, "bias_ulps: got -1.0"), (dict(ulps="no"), TypeError, "ulps: got 'no'"),
    (dict(ulps=True), ValueError, "ulps: got True"), (dict(block=True), TypeError, "block: got True"),
    (dict(block=2.5), TypeError, "block: got 2.5")])
def test_a_rule_that_could_not_fail_is_refused(given, error, words):
    ones = dict.fromkeys(("ours", "truth", "same_precision"), torch.ones(2))
    with pytest.raises(error, match=words):
        assert_2x(**ones | given)


def test_prefixes_that_are_no_tuple_are_refused():
    with pytest.raises(TypeError, match="absent: got 'LDG', expected a tuple"):
        Expectation(absent="LDG")


@pytest.mark.parametrize("lost", (math.inf, -math.inf, math.nan))
def test_a_peer_that_overflows_allows_no_more(lost):
    truth = torch.linspace(1, 2, 4096, dtype=torch.float64).view(64, 64)
    peer = truth.half()
    peer[5, 5] = lost
    assert_2x(truth.half(), truth, peer)
    with pytest.raises(AssertionError, match="error"):
        assert_2x((truth + 0.5).half(), truth, peer)


def test_units_that_a_bias_may_have():
    truth = torch.full((64, 64), 1.0, dtype=torch.float64)
    ours = truth.float() + 2**-23
    assert_2x(ours, truth, truth.float(), ulps=4.0, bias_ulps=1.0)
    with pytest.raises(AssertionError, match="mean signed error"):
        assert_2x(ours + 2**-23, truth, truth.float(), ulps=4.0, bias_ulps=1.0)
