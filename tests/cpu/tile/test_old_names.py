"""Names that have changed: the old ones lead to the new, and warn, for one minor version."""
import pytest

import tkq.tile as tk
from tkq.runtime import arch
from tkq.runtime.call import counters


def test_an_old_name_of_the_tile_layer_warns():
    with pytest.warns(DeprecationWarning, match="tkq.tile.Turns is now tkq.tile.PingPong"):
        assert tk.Turns is tk.PingPong
    assert "Turns" not in tk.__all__ and "PingPong" in tk.__all__


def test_the_number_of_sms_by_its_old_name_warns(monkeypatch):
    monkeypatch.setattr(arch, "num_sms", lambda device: 132)
    with pytest.warns(DeprecationWarning, match="arch.processors is now arch.num_sms"):
        assert arch.processors("cuda") == 132


@pytest.mark.parametrize("old, new", (("kept", "workspace"), ("room", "with_scratch")))
def test_old_names_of_counters_warn(old, new):
    with pytest.warns(DeprecationWarning, match=f"counters.{old} is now counters.{new}"):
        assert getattr(counters, old) is getattr(counters, new)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Circles'"):
        tk.Circles  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'circles'"):
        counters.circles  # noqa: B018
