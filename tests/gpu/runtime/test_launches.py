"""Launches per call of every op: as many as docs/launches.md says."""
from tests.helpers.ops import launch_table


def test_launches_per_call():
    found, known = launch_table.count(), launch_table.numbers()
    differ = {name: (found.get(name), known.get(name, "no line")) for name in found | known
              if found.get(name) != known.get(name, "no line")}
    assert not differ, f"counted, expected: {differ}"
