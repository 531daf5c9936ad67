"""What attention's forward and backward kernels share: masks, orders of tiles, sequences."""
