"""Long convolutions of more tokens than a block of threads has room for."""
