"""How attention's backward is built where nobody makes zeroes for dQ: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward_grouped_config import GroupedConfig
from tkq.attention.backward_spec import BackwardSpec


@dataclass(frozen=True)
class FirstConfig(GroupedConfig):
    """Of ``tkq.attention.backward_first``. Its background is empty: no zeroes before, but a kernel behind."""

    registers: tuple = (24, 72, 208)

    def workspace_floats(self, spec: BackwardSpec, rows: int) -> int:
        """With counters, four of each tile."""
        return super().workspace_floats(spec, rows) + 4 * -(-rows // self.tile)
