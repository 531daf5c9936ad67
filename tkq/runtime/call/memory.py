"""Tensors that share memory, where one of them is written to."""
from __future__ import annotations

from torch import Tensor

TRIES = 1000


def refuse_shared(op_name: str, written: dict, read: dict) -> None:
    """ValueError where a tensor that is to be written to shares memory with another one, of `written` or `read`. Their
    order in a launch is not said, and so not what is read. None among them is passed over."""
    names = [name for name, x in written.items() if x is not None]
    for i, name in enumerate(names):
        for other, y in (*((n, written[n]) for n in names[i + 1:]), *read.items()):
            if y is not None and shared(written[name], y):
                raise ValueError(f"{op_name}: {name} shares memory with {other}, and is written to; expected a tensor "
                                 "apart from it")


def same_place(x: Tensor, y: Tensor) -> bool:
    """Are the elements of two tensors of one shape the same?"""
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


def shared(x: Tensor, y: Tensor) -> bool:
    """Is memory of a tensor also another's? By addresses, whosever storage they are in. Exact, but for tensors whose
    strides go so badly together that `TRIES` places do not tell, which this takes to be apart."""
    if not (x.numel() and y.numel() and x.data_ptr() and y.data_ptr()):  # 0: without memory, as on "meta"
        return False
    apart, of_x, of_y = x.data_ptr() - y.data_ptr(), span(x), span(y)
    if apart >= of_y or -apart >= of_x:
        return False
    if of_x == x.numel() * x.itemsize and of_y == y.numel() * y.itemsize:  # neither has gaps
        return True
    return _meet(apart, _steps(x, y), (x.itemsize, y.itemsize))


def span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))) * x.itemsize


def _steps(x, y) -> list:
    """(step in bytes, how many of y's at most, how many of x's), the largest step first."""
    found = {}
    for side, tensor in ((2, x), (1, y)):
        for n, step in zip(tensor.shape, tensor.stride()):
            if n > 1 and step:
                found.setdefault(step * tensor.itemsize, [step * tensor.itemsize, 0, 0])[side] += n - 1
    return [found[step] for step in sorted(found, reverse=True)]


def _meet(apart, steps, sizes) -> bool:
    """Can steps of x forwards and of y backwards bring an element of x, ``apart`` behind y's, onto one of y's?"""
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
