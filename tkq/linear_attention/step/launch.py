"""From torch tensors to a launch."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.step.plan import ACCESS, most_few, plan, warps_of
from tkq.linear_attention.step.spec import SsdSpec, StepSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernels -> `Kernels`; as many as kinds of call


def recipe(spec: StepSpec, many: bool = False) -> Recipe:
    """The kernel's. many: as `plan` has it."""
    return Recipe("tkq.linear_attention.step.kernel:LinearStep", (spec, plan(spec, many)))


class Given(NamedTuple):
    """What a launch takes, as `kernel.Operands` has it."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor
    indices: Tensor | None = None
    accepted: Tensor | None = None
    skip: Tensor | None = None
    z: Tensor | None = None
    bias: Tensor | None = None


class Options(NamedTuple):
    """v_first, l2norm: as `StepSpec` has them. softplus: of a state space, whether dt passes it; None otherwise."""

    v_first: bool = False
    l2norm: bool = False
    softplus: bool | None = None


def layout_of(state: Tensor, v_first: bool) -> str:
    """`StepSpec.layout` of a pool: along K or V where the matrices are dense and 16 bytes begin at multiples of 16."""
    rows, head, row, col = state.stride()
    unit = ACCESS // state.itemsize
    if rows % unit or head % unit or state.data_ptr() % ACCESS:
        return "any"
    if col == 1 and row == state.shape[3]:
        return "k" if v_first else "v"
    if row == 1 and col == state.shape[2]:
        return "v" if v_first else "k"
    return "any"


def spec_of(given: Given, options: Options) -> StepSpec:
    """Of a launch."""
    def name(x):
        return None if x is None else dtypes.name_of(x.dtype)

    state, v_first = given.state, options.v_first
    ssd = None
    if options.softplus is not None:
        rank = given.v.dim()
        expanded = [word for word, x, n in (("A", given.g, 1), ("dt", given.beta, rank - 1), ("D", given.skip, 1),
                                            ("dt_bias", given.bias, 1)) if x is not None and x.dim() > n]
        ssd = SsdSpec(name(given.beta), name(given.g), name(given.skip), name(given.bias), given.z is not None,
                      options.softplus, rank == 4, tuple(expanded))
    gate = "none" if ssd or given.g is None else {1: "head", 3: "token", 4: "channel"}[given.g.dim()]
    return StepSpec(name(given.q), given.q.shape[-1], given.v.shape[-1], gate, name(state), layout_of(state, v_first),
                    v_first, name(given.indices), name(given.accepted), None if ssd else name(given.beta),
                    options.l2norm, ssd, given.v.dim() == 4 and given.v.shape[1] > 1)


def start(given: Given, options: Options, scale: float) -> tuple | None:
    """One launch. (The function that was launched, its arguments), None where there are no tokens."""
    v = given.v
    if not v.numel():
        return None
    run, warps = _launcher(given, options)
    call = run, (given[0], tuple(given[1:]), scale, warps)
    run(*call[1])
    return call


class Kernels:
    """Of one spec: that of few states and that of many, each from its first use on."""

    def __init__(self, spec: StepSpec):
        self.spec, self.known, self.most_few = spec, {}, most_few(spec)

    def of(self, states: int):
        """(Its function, the warps of a block, as it takes them.) states: heads times sequences."""
        many = states > self.most_few
        if many not in self.known:
            config = plan(self.spec, many)
            self.known[many] = function(recipe(self.spec, many)), config, self.spec.value_dim // config.columns
        run, config, slices = self.known[many]
        return run, warps_of(config, slices, states)


def _launcher(given, options):
    """As `Kernels.of` has it."""
    v = given.v
    kinds = [x is not None and (x.dtype, x.dim()) for x in given]
    key = (v.get_device(), given.q.shape[-1], v.shape[-1], layout_of(given.state, options.v_first),
           v.dim() == 4 and v.shape[1] > 1, *options, *kinds)
    found = _launchers.get(key)
    if found is None:
        arch.require_hopper(v.device)
        found = _launchers[key] = Kernels(spec_of(given, options))
    return found.of(v.shape[0] * v.shape[-2])


def results(v: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a launch writes its outputs to."""
    return torch.empty(v.shape, device=v.device, dtype=dtype) if out is None else out
