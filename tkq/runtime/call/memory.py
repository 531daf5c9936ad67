"""Tensors that share memory, where one of them is written to."""
from __future__ import annotations

import functools

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

TRIES = 1000


def refuse_shared(op_name: str, written: dict, read: dict) -> None:
    """ValueError where a tensor that is to be written to shares memory with another one, of `written` or `read`. Their
    order in a launch is not said, and so not what is read. None among them is passed over."""
    first, others = _placed(written), _placed(read)
    for i, (name, x, begin, end) in enumerate(first):
        for other, y, at, behind in first[i + 1:] + others:
            if begin < behind and at < end and _meet(begin - at, _layout(x), _layout(y)):
                raise ValueError(f"{op_name}: {name} shares memory with {other}, and is written to; expected a tensor "
                                 "apart from it")


def address(x: Tensor) -> int:
    """Of its first element; 0 where it has no memory: on "meta", of fakes, of what wraps other tensors."""
    if isinstance(x, FakeTensor):  # of which torch warns that it has none
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:  # of torch.func's and of torch.export's
        return 0


def _placed(tensors) -> list:
    """(name, tensor, its first address, the end of its last element) of those that have memory."""
    found = []
    for name, x in tensors.items():
        at = 0 if x is None else address(x)
        if at and x.numel():
            found.append((name, x, at, at + span(x)))
    return found


def same_place(x: Tensor, y: Tensor) -> bool:
    """Are the elements of two tensors of one shape the same?"""
    return address(x) == address(y) and x.stride() == y.stride()


def shared(x: Tensor, y: Tensor) -> bool:
    """Is memory of a tensor also another's? By addresses, whosever storage they are in. Exact, but for tensors whose
    strides go so badly together that `TRIES` places do not tell, which this takes to be apart."""
    at_x, at_y = address(x), address(y)
    if not (x.numel() and y.numel() and at_x and at_y):
        return False
    apart = at_x - at_y
    return -span(x) < apart < span(y) and _meet(apart, _layout(x), _layout(y))


def span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if x.is_contiguous():
        return x.nbytes
    return (1 + sum([(n - 1) * s for n, s in zip(x.shape, x.stride())])) * x.itemsize


def _layout(x):
    return x.shape, x.stride(), x.itemsize


@functools.lru_cache(1024)
def _meet(apart: int, x: tuple, y: tuple) -> bool:
    """Have a tensor of layout x, ``apart`` bytes behind another of layout y, and this one an element in common? By
    steps of x forwards and of y backwards, the largest ones first."""
    steps, sizes = _steps(x, y), (x[2], y[2])
    below, above, reach = 0, 0, []  # how far the steps behind each take it down and up
    for step, of_y, of_x in reversed(steps):
        reach.append((below, above))
        below, above = below + step * of_y, above + step * of_x
    reach.reverse()
    waiting, tries = [(0, apart)], 0
    while waiting and tries < TRIES:
        at, place = waiting.pop()
        tries += 1
        if at == len(steps):
            return True  # each step was one that leads there
        (step, of_y, of_x), (below, above) = steps[at], reach[at]
        least = max(-of_y, -((place + above + sizes[0] - 1) // step))
        most = min(of_x, (sizes[1] - 1 + below - place) // step)
        waiting.extend((at + 1, place + step * n) for n in range(least, most + 1)[:TRIES])
    return False


def _steps(x, y) -> list:
    """(step in bytes, how many of y's at most, how many of x's), the largest step first."""
    found = {}
    for side, (shape, strides, size) in ((2, x), (1, y)):
        for n, step in zip(shape, strides):
            if n > 1 and step:
                found.setdefault(step * size, [step * size, 0, 0])[side] += n - 1
    return [found[step] for step in sorted(found, reverse=True)]
