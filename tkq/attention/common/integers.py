"""Least and largest of integers, on the host and in kernels."""


def least(a, b):
    """min, of Python ints or of run-time ints."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _dsl().min(a, b)


def most(a, b):
    """max, likewise."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _dsl().max(a, b)


def _dsl():
    import cutlass  # only a traced call needs it, and then it is there

    return cutlass


def ceil_div(a, b):
    return (a + b - 1) // b


def _chosen(condition, a, b):
    """a if condition else b, of Python's or of run-time ints."""
    if isinstance(condition, bool):
        return a if condition else b
    import cutlass

    return cutlass.select_(condition, a, b)
