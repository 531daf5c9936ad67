"""Linear attention in segments under pressure: a case of `tests.helpers.sanitizer.pressed`."""
import torch

from tests.helpers.sanitizer.repeated import same_bits


def split():
    """Segments of more chunks than stages: states alone, combined, and outputs; with transfers, which are matrices."""
    from tests.gpu.linear_attention import test_split as cases

    q, k, v, g = cases.make(1, 900, 1, 2, 64, 64, "token")
    for given in (cases.Given(q, k, v, g, initial=cases.state_of(v), final=torch.float32),
                  cases.Given(q, k, v, g, cases.beta_of(v), cases.state_of(v), torch.float32)):
        same_bits(lambda given=given: [x for x in cases.check(given, 2) if x is not None])
