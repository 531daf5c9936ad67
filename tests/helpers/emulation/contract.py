"""Whether a tensor is what a kernel was compiled for."""
import torch

from tkq.runtime.compile import build


def misfit(fake, given, sizes):
    """What is wrong with a tensor; None. sizes: {a fake's symbol: the size that it stands for}, which is added to."""
    what = f"{tuple(given.shape)}, strides {given.stride()}, address {given.data_ptr() % 16} of 16"
    if given.element_size() * 8 != fake.element_type.width or given.dim() != len(fake.shape):
        return f"another type or rank: {what}"
    if given.data_ptr() % fake._assumed_align:
        return f"its address is no multiple of {fake._assumed_align}: {what}"
    for asked, stride, size, step in zip(fake.shape, fake.stride, given.shape, given.stride()):
        if isinstance(asked, int):
            fits = asked == size
        else:
            fits = size % asked.divisibility == 0 and sizes.setdefault(id(asked), size) == size
        if not fits or (size != 1 and (step != stride if isinstance(stride, int) else step % stride.divisibility)):
            return f"{fake.shape}, {fake.stride} was asked for: {what}"
    return None


def misfits(launched) -> list:
    """Of [(recipe, arguments)], what is wrong with tensors in any of these; [] where kernels take them all."""
    found = []
    for recipe, args in launched:
        sizes = {}
        for fake, given in zip(_flat(build._made(recipe)[1]), _flat(args), strict=True):
            if (fake is None) != (given is None):
                found.append(f"{recipe}: {fake} was asked for, got {given}")
            elif isinstance(given, torch.Tensor) and (wrong := misfit(fake, given, sizes)):
                found.append(f"{recipe}: {wrong}")
    return found


def _flat(arguments):
    return [x for a in arguments for x in (_flat(a) if isinstance(a, tuple) else [a])]
