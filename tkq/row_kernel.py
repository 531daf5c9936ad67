"""``RowKernel``, by its public place."""
from .rows.persistent.kernel import RowKernel

__all__ = ["RowKernel"]
