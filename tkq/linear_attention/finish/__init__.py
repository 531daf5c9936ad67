"""What follows the engine's launches in a backward: sums over heads that share one of q and k, dot products of rows."""
