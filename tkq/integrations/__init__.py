"""tkq under other libraries' signatures."""
from .scaled_mm import scaled_mm

__all__ = ["scaled_mm"]
