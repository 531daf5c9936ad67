"""Roles of a block: what they may have of its registers."""
import pytest


def roles(*of):
    import tkq.tile as tk

    return [tk.Role(lambda _: None, registers, groups) for registers, groups in of]


@pytest.mark.parametrize("of, at_launch", (
    (((24, 1), (72, 1), (208, 2)), 128), (((24, 1), (240, 2)), 168), (((56, 1), (256, 1)), 255)))
def test_roles_that_fit(of, at_launch):
    import tkq.tile as tk

    assert tk.roles_fit(roles(*of)) == at_launch


@pytest.mark.parametrize("of, words", (
    (((24, 1), (72, 1), (216, 2)), "1 x 24 \\+ 1 x 72 \\+ 2 x 216 are more than the 4 x 128"),
    (((20, 1), (240, 2)), "1 x 20, 2 x 240, allowed are multiples of 8"),
    (((24, 1), (264, 1)), "1 x 24, 1 x 264, allowed"),
))
def test_roles_that_would_hang_are_refused(of, words):
    import tkq.tile as tk

    with pytest.raises(ValueError, match=words):
        tk.roles_fit(roles(*of))
