"""The gated delta rule's training under pressure: cases of `pressed`."""
from tests.helpers.sanitizer.repeated import same_bits


def delta_neighbours():
    """Outputs of two heads each, which blocks of a cluster send each other: one a chunk, and two."""
    from tests.gpu.linear_attention import test_delta_launches as cases

    for second in ("pair", "query"):
        given = cases.neighbours(second, False)
        cases.check(given)
        same_bits(lambda given=given: [x for x in cases.launch(given, 0.3) if x is not None])


def delta_training():
    """The delta rule's forward and gradients by blocks."""
    from tests.gpu.linear_attention import test_blocks_on_gpu as cases

    for reverse in (False, True):
        given = cases.training("usual", reverse)
        cases.check_launch(given, 0.125)
        same_bits(lambda given=given: [x for x in cases.launch(given, 0.125) if x is not None])


CASES = delta_neighbours, delta_training
