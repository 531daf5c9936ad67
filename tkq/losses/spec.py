"""What a loss was asked for. Frozen, of plain values: its repr is the compile key."""
from dataclasses import dataclass
from typing import ClassVar, Optional

from ..rows.one_pass.plan import WIDTH, check_vector

MAX_V = 1 << 19  # columns of a forward: 16 blocks of 512 threads hold a row of them; a backward takes any number
MAX_ROWS = 1 << 28
TARGETS = ("int32", "int64")
REDUCTIONS = ("none", "mean", "sum")
KINDS = ("forward", "fused", "backward")


@dataclass(frozen=True)
class CrossEntropySpec:
    """kind: "forward" (losses), "fused" (losses, and the logits' gradient in the same pass; reduction none) or
    "backward". N: classes. x: element type of the logits and their gradient. target: int32 or int64.
    weight: type of the class weights, or None. smoothing, softcap: are there label smoothing, a softcap?

    part: the rows are some of many, so that what belongs to all of them lies apart: see `class_rows.Saved`. What a
    fused one multiplies its gradients by lies there, too; without a part it is 1.
    save: False: a forward of losses alone, or of their total at once, that leaves nothing for a backward.
    once: the total in the forward's own launch, for few rows: see `single_launch`.

    vector: elements of one access. shifted: rows begin anywhere in 16 bytes, logits and gradient alike; accesses are
    whole units of 16 bytes all the same. Where not, vector divides N and every row starts at a multiple of it.
    """

    kind: str
    N: int
    x: str
    target: str = "int64"
    weight: Optional[str] = None
    reduction: str = "none"
    smoothing: bool = False
    softcap: bool = False
    vector: int = 1
    shifted: bool = False
    part: bool = False
    save: bool = True
    once: bool = False

    def __post_init__(self):
        if self.once and (self.kind != "forward" or self.reduction == "none" or self.part):
            raise ValueError(f"once: got {self.kind}, reduction {self.reduction}, part {self.part}; allowed are "
                             "forward, mean or sum, no part")
        alone = self.reduction == "none" or self.once
        if not self.save and (self.kind != "forward" or not alone or self.part):
            raise ValueError(f"save: got False of {self.kind}, reduction {self.reduction}, part {self.part}; allowed "
                             "of forward, none (or once), no part")
        if self.part and self.kind == "forward" and self.reduction != "none":
            raise ValueError(f"reduction: got {self.reduction} of a part of the rows, allowed is none")
        allowed = {"kind": KINDS, "reduction": REDUCTIONS if self.kind != "fused" else ("none",)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, allowed are {', '.join(values)}")
        types = {"x": tuple(WIDTH), "target": TARGETS, "weight": (*WIDTH, None)}
        for name, values in types.items():
            if getattr(self, name) not in values:
                raise TypeError(f"{name}: got dtype {getattr(self, name)}, allowed are {', '.join(map(str, values))}")
        if self.N < 1 or (self.kind != "backward" and self.N > MAX_V):
            raise NotImplementedError(f"logits: got {self.N} classes, allowed are 1 to {MAX_V}")
        check_vector(self)

    @property
    def width(self) -> int:
        """Bits of a logit."""
        return WIDTH[self.x]

    @property
    def followed(self) -> bool:
        """Does a kernel that adds up the losses follow a forward's?"""
        return self.kind == "forward" and self.reduction != "none" and not self.once

    @property
    def exchanges(self) -> int:
        """How often the warps of a row exchange two numbers."""
        if self.kind == "backward":
            return 0
        return 2 if self.smoothing else 1


@dataclass(frozen=True)
class ReduceSpec:
    """The reduction over rows: their losses to one, the rows' weights to one over their sum.

    mean: divide by the sum of the weights of the targets (1 each, where weight is None); without it, nothing is asked
    of the targets. losses: False: only that inverse, before there are losses.
    """

    mean: bool
    losses: bool = True
    target: str = "int64"
    weight: Optional[str] = None

    def __post_init__(self):
        if not (self.mean or self.losses):
            raise ValueError("losses: got False without mean: nothing to compute")


@dataclass(frozen=True)
class ScaleSpec:
    """x (M, N) times one number, in place. vector: elements of an access, divides N and row strides."""

    N: int
    x: str
    vector: int

    shifted: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Bits of an element."""
        return WIDTH[self.x]
