"""Of which norms and rows the catalogs of the forward and of the backward have kernels."""
SIZES = (1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144)  # columns
KINDS = ("rmsnorm", "layernorm")
