"""Flash attention: specs, plans and the functions that PyTorch sees. The kernels load when they are compiled."""
