"""RowKernel: persistent blocks that walk over rows."""
