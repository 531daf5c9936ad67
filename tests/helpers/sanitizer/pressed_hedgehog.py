"""Hedgehog's kernels under pressure: cases of `pressed`."""
from tests.helpers.sanitizer.repeated import same_bits


def hedgehog():
    """More chunks than stages: features in the place of what they are made of, and beside it with one warpgroup of the
    state."""
    from tests.gpu.linear_attention import test_hedgehog as cases

    for D, F in ((128, 64), (64, 32), (64, 64)):
        given = cases.make(1, 460, 4, D, F)  # a head for each role that may be late alone
        same_bits(lambda: [cases.check(*given)])  # noqa: B023


def hedgehog_segments():
    """Launches of segments, of states and of outputs."""
    from tests.gpu.linear_attention import test_hedgehog as cases

    given = cases.make(1, 1100, 2, 128)
    same_bits(lambda: [cases.check(*given)])


def hedgehog_window():
    """Gradients of the window: chunks enough for all stages, beside float64."""
    from tests.gpu.linear_attention import test_hedgehog as cases

    for D in (128, 64):
        given = cases.of_window(460, D)
        same_bits(lambda: cases.check_window(given))  # noqa: B023


def hedgehog_features():
    """Gradients of what lies before the window: chunks enough for all stages, beside float64."""
    from tests.gpu.linear_attention import test_hedgehog as cases

    given = cases.make(1, 460, 4, 128)  # a head for each role that may be late alone
    same_bits(lambda: cases.check_gradients(*given))


CASES = hedgehog, hedgehog_segments, hedgehog_window, hedgehog_features
