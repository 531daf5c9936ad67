"""Device functions as they are written."""
import types


def as_written(f):
    """The function that cute.jit decorates, as it is in the file: one that has been compiled in this process has other
    code, the DSL's, which looks where names like range_constexpr are from, and finds the test's."""
    f = f.__wrapped__
    return types.FunctionType(getattr(f, "_original_code", f.__code__), f.__globals__, f.__name__, f.__defaults__,
                              f.__closure__)
