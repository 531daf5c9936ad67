"""The builder of the losses of long rows: walks whose copies to shared memory go past L1, where `build.build`'s go
through it."""
from .build import build as through
from .once import CrossEntropyWalkOnce
from .walk import CrossEntropyWalk


def build(spec, config):
    """As `build.build`, for a WalkConfig."""
    _, given = through(spec, config)
    return (CrossEntropyWalkOncePast if spec.once else CrossEntropyWalkPast)(spec, config), given


class CrossEntropyWalkPast(CrossEntropyWalk):
    def _past_l1(self):
        return True


class CrossEntropyWalkOncePast(CrossEntropyWalkOnce):
    def _past_l1(self):
        return True
