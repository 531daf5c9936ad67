"""Kernels of a family's catalog, by name."""


def of_name(kernels, name):
    """The one of these that has the name."""
    kernel, = (kernel for kernel in kernels if kernel.name == name)
    return kernel
