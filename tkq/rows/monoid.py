"""What rows are reduced by, by its public place."""
from .persistent.monoid import Exchange, Monoid, add

__all__ = ["Exchange", "Monoid", "add"]
