"""From a subclass of RowKernel and torch tensors to a launch: plan, compile once, cache on disk, call."""
from __future__ import annotations

from typing import NamedTuple

import torch

from ... import runtime
from ...runtime.call import check, counters, dtypes
from ...runtime.device import arch, clusters
from . import tables
from .plan import plan
from .shape import RowPlan
from .spec import MAX_ROWS, WIDTH, RowSpec, Stream

_MATRICES, _VECTORS, _ROWS = ("loads", "stores"), ("vectors", "columns"), ("scalars", "results")
_TENSORS = _MATRICES + _VECTORS + _ROWS
_launchers: dict = {}  # (class, plan, what the arguments look like) -> Launcher


class Launcher(NamedTuple):
    """A compiled kernel, and what a call of it needs besides tensors. units: the most clusters that run at once;
    0 where the rows alone say how many there are."""

    run: object
    plan: RowPlan
    units: int
    index: int

    def __call__(self, loads, stores, vectors, scalars, results, columns, parameters=None):
        """Tuples of tensors in the spec's order; None for empty ones."""
        workspace = counter = None
        units = self.units
        if columns is not None:
            p = self.plan
            units = p.units(loads[0].shape[0], units)
            workspace = torch.empty(len(columns), units, p.pitch, dtype=torch.float32, device=loads[0].device)
            counter = counters.counter(self.index)
        self.run(loads[0], loads[1:] or None, stores, vectors, scalars, results, columns, workspace, counter,
                 parameters, units)


def launcher(spec: RowSpec, device, chosen: RowPlan | None = None) -> Launcher:
    """Compiled, or from the disk cache."""
    arch.require_hopper(device)
    p = chosen or plan(spec.shape)
    units = 0 if p.held else p.min_blocks_per_sm * clusters.resident(device, p.cluster, p.block)
    return Launcher(runtime.function(recipe_of(spec, p)), p, units, arch._index(device))


def recipe_of(spec: RowSpec, chosen: RowPlan | None = None) -> runtime.Recipe:
    """The recipe of a spec, with its plan or another one."""
    return runtime.Recipe("tkq.rows.persistent.build:build", (spec, chosen or plan(spec.shape)),
                          sources=(spec.module,))


# ---- by name, for kernels of one's own --------------------------------------------------------------


def launch(cls, arguments: dict, chosen: RowPlan | None = None) -> None:
    """Call the kernel of `cls` on torch's current stream.

    Args:
        arguments: by the names that the class gives: tensors, or None for those that are left out; floats for its
            parameters, all of them; constants for its options, of which None is one. (M, N) tensors have a contiguous
            last dimension and any row stride; rows of loads that are not whole multiples of 16 bytes, or not so
            aligned, take a slower path.
        chosen: another plan than `tkq.rows.persistent.plan.plan`'s, for tuning.

    With M = 0 nothing is launched, and column sums are set to 0.

    Raises:
        TypeError, ValueError: a class whose tables are not what RowKernel asks for, or made inside a function; an
            argument that the class does not name, a tensor of another type or shape, not on the GPU of the others, or
            not contiguous where it must be; a parameter that is missing, an option that cannot be hashed.
        NotImplementedError: more than 2^30 rows; an argument that requires a gradient, which autograd would lose:
            launch inside an autograd.Function, where gradients are off.
    """
    check.refuse_gradient(f"{cls.__name__}.launch", **arguments)
    try:
        key = cls, chosen, tuple((name, None if value is None else _looks(value)) for name, value in arguments.items()
                                 if name not in cls.parameters)
        found = _launchers.get(key)
    except TypeError:  # of what has no hash
        recipe(cls, arguments, chosen)
        raise
    if found is None:
        spec = spec_of(cls, arguments)
        _check_plan(cls, chosen, spec.N)
        parameters(cls, arguments)
        _check_devices(cls, arguments)
        found = _launchers[key] = launcher(spec, arguments[spec.loads[0].name].device, chosen)
    groups = [tuple([t for name in getattr(cls, kind) if (t := arguments.get(name)) is not None]) or None
              for kind in _TENSORS]
    loads, stores, vectors, columns, scalars, results = groups
    numbers = parameters(cls, arguments)
    if loads[0].shape[0] > MAX_ROWS:
        raise NotImplementedError(f"{cls.__name__}: got {loads[0].shape[0]} rows, allowed are {MAX_ROWS}")
    if loads[0].shape[0] == 0:
        for out in columns or ():
            out.zero_()
        return
    found(loads, stores, vectors, scalars, results, columns, numbers)


def parameters(cls, given):
    """The floats of a call, in the class's order."""
    return tuple(_number(f"{cls.__name__}: {name}", given.get(name)) for name in cls.parameters) or None


def _number(name, value):
    """A parameter, which may be infinite."""
    check.number(name, value)
    try:
        return value if type(value) is float else float(value)
    except OverflowError:
        raise ValueError(f"{name}: got an int beyond all floats") from None


def recipe(cls, arguments: dict, chosen: RowPlan | None = None) -> runtime.Recipe:
    """What `launch` has to compile; no GPU is needed, and the tensors may be on any device."""
    spec = spec_of(cls, arguments)
    _check_plan(cls, chosen, spec.N)
    return recipe_of(spec, chosen)


def _check_plan(cls, chosen, N):
    if chosen is not None and not isinstance(chosen, RowPlan):
        raise TypeError(f"{cls.__name__}: plan: got {type(chosen).__name__}, allowed are RowPlan and None")
    if chosen is not None and chosen.N != N:
        raise ValueError(f"{cls.__name__}: plan: is for N = {chosen.N}, the call has N = {N}")


def spec_of(cls, arguments: dict) -> RowSpec:
    """What a call asks for; None in the place of a tensor leaves it out. Raises what `launch` promises."""
    check.importable(cls)
    tables.check(cls)
    names = {name for kind in _TENSORS for name in getattr(cls, kind)}
    allowed = names | {*cls.parameters, *cls.options}
    for name in arguments:
        if name not in allowed:
            raise TypeError(f"{cls.__name__}: got an argument {name}, allowed are {', '.join(sorted(allowed))}")
    given = {name: value for name, value in arguments.items() if value is not None or name not in names}
    first = next((name for name in cls.loads if name in given), None)
    if first is None:
        what = f"none of its loads is given: {', '.join(cls.loads)}" if cls.loads else (
            "it has no loads, expected the names of tensors that it reads, one at least")
        raise ValueError(f"{cls.__name__}: {what}")
    check.settled(f"{cls.__name__}: {first}", given[first])
    check.rank(f"{cls.__name__}: {first}", given[first], 2)
    M, N = given[first].shape
    if N == 0:
        raise ValueError(f"{cls.__name__}: {first}: shape is ({M}, 0), allowed are rows of one element and more")
    for name in cls.options:
        tables.check_option(cls, name, given.get(name))
    for name in cls.parameters:
        if name in given:
            _number(f"{cls.__name__}: {name}", given[name])
    streams = {}
    for kind in _TENSORS:
        names = [name for name in getattr(cls, kind) if name in given]
        for name in names:
            _check_tensor(f"{cls.__name__}: {name}", given[name], kind, M, N)
        streams[kind] = tuple(names)
    loads = [given[name] for name in streams["loads"]]
    stores = [given[name] for name in streams["stores"]]
    spec = RowSpec(
        cls.__module__, cls.__qualname__, N, *(tuple(map(stream, streams[kind], tensors)) for kind, tensors in (
            ("loads", loads), ("stores", stores), ("vectors", [given[name] for name in streams["vectors"]]))),
        streams["scalars"], streams["results"],
        tuple(stream(name, given[name]) for name in streams["columns"]), vector(N, loads + stores), bulk(N, loads), (),
        tuple(sorted((name, value) for name, value in given.items() if name in cls.options)))
    sums = tuple(x.monoid.sums for x in cls.exchanges_of(spec))
    return RowSpec(**{**spec.__dict__, "sums": sums})


def stream(name: str, t: torch.Tensor) -> Stream:
    return Stream(name, dtypes.name_of(t.dtype), 16 if t.dim() > 1 else _alignment(t.data_ptr()))


def _alignment(address: int) -> int:
    """The largest power of two up to 16 that divides an address."""
    return min(16, address & -address) if address else 16


def vector(N: int, tensors, element_bytes: int = 1) -> int:
    """Elements of one access: as many as 16 bytes of the widest type, N, every row stride and every base allow.

    element_bytes: of the widest of those tensors that are yet to be made, which begin and go on as they should."""
    found = 16 // max(element_bytes, *(t.element_size() for t in tensors))
    while found > 1 and not (N % found == 0 and all(_multiple(t, found * t.element_size()) for t in tensors)):
        found //= 2
    return found


def bulk(N: int, loads) -> bool:
    """Are all rows whole multiples of 16 bytes, as long and as far apart, and so aligned?"""
    return all(N * t.element_size() % 16 == 0 and _multiple(t, 16) for t in loads)


def _multiple(t, bytes_) -> bool:
    """Does every row begin at a multiple of ``bytes_`` bytes?"""
    apart = t.stride(0) * t.element_size() if t.shape[0] > 1 else 0
    return t.data_ptr() % bytes_ == 0 and apart % bytes_ == 0


def _looks(value):
    """What the spec and the checks depend on."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return (value.dtype, value.shape, value.stride(), value.data_ptr() & 15, value.device,
            value.is_neg() or value._is_zerotensor())


def _check_tensor(name, t, kind, M, N):
    check.settled(name, t)
    if kind in _ROWS:
        check.dtype(name, t, ("fp32",))
        check.shape(name, t, (M,))
        check.last_dim_contiguous(name, t)
        return
    check.dtype(name, t, tuple(WIDTH))
    check.shape(name, t, (M, N) if kind in _MATRICES else (N,))
    check.last_dim_contiguous(name, t)
    if kind == "columns" and t.data_ptr() % 16:
        raise ValueError(f"{name}: begins at an address that is not a multiple of 16 bytes: call .clone()")
    if kind == "stores" and M > 1 and abs(t.stride(0)) < N:
        raise ValueError(f"{name}: rows are {t.stride(0)} elements apart and {N} long: they would overwrite each other")


def _check_devices(cls, given):
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    check.same_device(**tensors)
    name, first = next(iter(tensors.items()))
    if not first.is_cuda:
        raise ValueError(f"{cls.__name__}.launch: {name}: is on {first.device}, allowed are CUDA tensors")
