"""The parts of RowKernel, the engine behind the backward passes: geometry, exchange, ring, column sums, launch."""
