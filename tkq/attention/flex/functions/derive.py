"""The derivative of a traced score function, with what its graph takes."""
from __future__ import annotations

from typing import NamedTuple

from tkq.attention.flex.functions.capture_derivatives import Derivatives, capture_derivatives
from tkq.attention.flex.functions.derivative import Joint, derivative, joint
from tkq.attention.flex.functions.graph import Graph, Node
from tkq.attention.flex.functions.trace import Traced


class Slope(NamedTuple):
    """A derivative: constant, where it is the same number everywhere, or a function."""

    constant: float | None
    traced: Traced | None

    def as_function(self) -> Traced:
        if self.traced is not None:
            return self.traced
        return Traced(Graph((Node("const", "f32", (self.constant,)),)), (), ())


def slope_of(score: Traced) -> Slope:
    """d score_mod(score) / d score."""
    graph, tensors, numbers = derivative(score.graph)
    if isinstance(graph, float):
        return Slope(graph, None)
    return Slope(None, Traced(graph, tuple(score.tensors[i] for i in tensors),
                              tuple(score.numbers[i] for i in numbers)))


class ScoreAndSlope(NamedTuple):
    """traced: of ``joint.graph``."""

    joint: Joint
    traced: Traced


def score_and_slope_of(score: Traced) -> ScoreAndSlope | None:
    """None where the slope is 1 everywhere."""
    if derivative(score.graph)[0] == 1.0:
        return None
    found, tensors, numbers = joint(score.graph)
    return ScoreAndSlope(found, Traced(found.graph, tuple(score.tensors[i] for i in tensors),
                                       tuple(score.numbers[i] for i in numbers)))


class CaptureSlopes(NamedTuple):
    """d score_mod / d elements of captured tensors. traced: of ``derivatives.graph``."""

    derivatives: Derivatives
    traced: Traced


def capture_slopes_of(score: Traced, slots: tuple) -> CaptureSlopes:
    """By the captured tensors in these slots."""
    found = capture_derivatives(score.graph, slots)
    return CaptureSlopes(found, Traced(found.graph, tuple(score.tensors[i] for i in found.tensors),
                                       tuple(score.numbers[i] for i in found.numbers)))
