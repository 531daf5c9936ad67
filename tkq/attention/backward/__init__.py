"""Flash attention's gradients: specs, plans, kernels and what PyTorch sees of them."""
