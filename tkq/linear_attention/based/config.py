"""How the kernels of Based go about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class BasedConfig:
    """stages: chunks of q, k and v that are loaded ahead. ahead: chunks whose features and scores are. registers: of a
    thread of the producer, of the features' warpgroup and of the state's."""

    stages: int = 4
    ahead: int = 3
    registers: tuple = (24, 232, 240)


@dataclass(frozen=True)
class GradientConfig:
    """As `BasedConfig`. states: chunks whose states are ahead. registers: of a thread of the producer, and of the
    features', the state's and the gradients' warpgroup."""

    stages: int = 3
    ahead: int = 2
    states: int = 2
    registers: tuple = (24, 104, 152, 232)
