"""Which configurations of a product that ``tkq.tune`` has stored its kernels take. Pure Python."""
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class StoredConfigs(NamedTuple):
    """op: the public function's name. classes: {name: class} of its configurations. fit_to_spec: (config, spec) -> the
    configuration as the spec allows it; ValueError where it does not. takes_rows: is (config, M) a configuration for M
    rows?"""

    op: str
    classes: dict
    fit_to_spec: Callable
    takes_rows: Callable = lambda config, M: True

    def fits(self, config, spec, M: int) -> bool:
        """Can a kernel take a configuration as it is, for M rows? It may be of any of the classes."""
        with suppress(ValueError, ArithmeticError):
            return self.fit_to_spec(config, spec) == config and self.takes_rows(config, M)
        return False
