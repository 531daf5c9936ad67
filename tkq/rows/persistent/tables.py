"""What a subclass of RowKernel says of its tensors, parameters, options and exchanges: checked before a call is read.
On the host alone."""

KINDS = ("loads", "stores", "vectors", "scalars", "results", "columns", "parameters")
_OF_LAUNCH = ("cls", "plan")  # its own arguments
# what an instance has besides its class's attributes
_OF_INSTANCES = ("spec", "plan", "cluster_n", "active", "given", "dtype", "N", "stage", "reduction_dtype")


def check(cls) -> None:
    """Raises TypeError or ValueError where a table of the class is not what RowKernel's docstring says."""
    owners: dict = {}
    for kind in KINDS:
        _check_names(cls, kind, getattr(cls, kind), owners)
    if not isinstance(cls.options, dict):
        raise TypeError(f"{cls.__name__}.options: got {cls.options!r}, allowed is a dict of names and defaults")
    _check_names(cls, "options", tuple(cls.options), owners)
    for name, value in cls.options.items():
        if name in _OF_INSTANCES or hasattr(cls, name):
            raise ValueError(f"{cls.__name__}.options: got {name}, an attribute of the class or of its instances; "
                             "allowed are other names")
        check_option(cls, name, value)
    _check_exchanges(cls)
    if cls.down is not None and not callable(cls.down):
        raise TypeError(f"{cls.__name__}.down: got {type(cls.down).__name__}, allowed are a method and None")


def check_option(cls, name, value) -> None:
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{cls.__name__}: {name}: got {type(value).__name__}, allowed are values that can be hashed"
                        ) from None


def _check_names(cls, kind, names, owners):
    where = f"{cls.__name__}.{kind}"
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        like = f": ({names!r},)" if isinstance(names, str) else ""
        raise TypeError(f"{where}: got {names!r}, allowed is a tuple of names{like}")
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"{where}: got {name!r}, allowed are names that Python has")
        if name in _OF_LAUNCH:
            raise ValueError(f"{where}: got {name}, which is an argument of launch; allowed are other names")
        if name in owners and {kind, owners[name]} != {"loads", "stores"}:  # a tensor that is written in place has both
            raise ValueError(f"{where}: got {name}, which is in {owners[name]} already; a name has one place")
        owners[name] = kind


def _check_exchanges(cls):
    where = f"{cls.__name__}.exchanges"
    if not isinstance(cls.exchanges, (tuple, list)):
        raise TypeError(f"{where}: got {type(cls.exchanges).__name__}, allowed is a tuple of Exchange")
    for i, exchange in enumerate(cls.exchanges):
        if not all(hasattr(exchange, part) for part in ("monoid", "partial", "row")):
            raise TypeError(f"{where}: got {type(exchange).__name__} as number {i}, allowed is Exchange")
        for part in ("partial", "row"):
            name = getattr(exchange, part)
            if not callable(getattr(cls, name, None)):
                raise ValueError(f"{where}: {part} of number {i}: got {name!r}, allowed are names of the class's "
                                 "methods")
