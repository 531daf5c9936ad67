"""How PyTorch sees a tkq function: as a custom op, and past the dispatcher where nothing would be lost."""
import functools
import importlib
import re

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from ..compile import ffi  # noqa: F401  what calls the kernels, with the op's import and not in its first call
from . import check

_PLAIN = frozenset((Tensor, Parameter))
_PLAIN_OR_NONE = _PLAIN | {type(None)}
_LIBRARY = torch.library.Library("tkq", "FRAGMENT")
# Names that torch keeps for itself, here and in `_gradients` and `untraced`: torch 2.9 to 2.15 have them.
_BELOW = torch._C._after_ADInplaceOrView_keyset  # dispatch keys that come after autograd's
# torch's own, under names of their own: they are asked at every call
# Does torch.compile trace this? Other tracers have a dispatch mode.
traced, _grad_mode = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_modes, _functorch = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_jit = torch._C._is_tracing  # of torch.jit.trace


class LaunchCache(dict):
    """What calls look like, sizes too -> what they take. A look at tensors that came before is all that a call then
    needs. It forgets all when it is full: sizes that change all the time must not fill the memory."""

    MOST = 4096

    def add(self, key, value) -> None:
        if len(self) >= self.MOST:
            self.clear()
        self[key] = value


def torch_op(name: str, *, cuda, cpu, fake, setup=None, backward=None, of: str = "", mutates: tuple = ()):
    """Register ``tkq::name`` and return the op to call.

    cuda, cpu: the functions behind it; the schema is read from ``cuda``'s annotations. fake: the outputs' shapes and
    dtypes for tracing. setup(ctx, inputs, output), backward(ctx, *grads): the gradient formula, as autograd.Function
    has it; the same two serve ``eager_function``, and both differentiate ``once``. Without one the host function
    refuses gradients.

    of: the public functions whose op it is, where they have other names. torch.func.grad and torch.func.vmap are
    refused with them: torch's own fallback for vmap calls an op once for each slice, and warns.
    mutates: names of tensors that the op writes to; without gradients. Their versions are counted by ``cuda`` and
    ``cpu``, which compiled code calls straight.

    As torch.library.custom_op makes one, but for what a call costs: a model that was compiled by torch calls its ops in
    this way, hundreds in a step (see ``_gradients``). A result must be a new tensor, no input and no other result: that
    is not asked at each call, but by opcheck in the tests.
    """
    qualified = f"tkq::{name}"
    _LIBRARY.define(name + _schema(cuda, mutates), tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.tkq, name).default
    _LIBRARY.impl(name, untraced(cuda), "CUDA")
    _LIBRARY.impl(name, untraced(cpu), "CPU")
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    torch.library.register_vmap(qualified, lambda *_: _refuse_vmap(of or name), lib=_LIBRARY)
    _LIBRARY.impl(name, _gradients(op, cuda, cpu, setup, backward, of or name), "Autograd", with_keyset=True)
    return op


def _schema(function, mutates) -> str:
    """What the dispatcher takes. It would ask tracers for the value of a float: a number that follows from a size, as
    1 / x.shape[0] does, would be that of the traced size, and the program good for no other. A Scalar stays as it is;
    one with a default is not, as the dispatcher compares with that."""
    return re.sub(r"\bfloat\b", "Scalar", torch.library.infer_schema(function, mutates_args=mutates))


def _gradients(op, cuda, cpu, setup, backward, of):
    """The op's kernel for tensors that may require a gradient, which the dispatcher calls first. With grad mode off, as
    in compiled code, it calls the last one itself, if nothing is between them (a mode, a subclass, several devices): a
    fifth of the time that torch's own kernels take (docs/attempts.md)."""
    keys = torch._C.DispatchKey
    last = {torch._C.DispatchKeySet(key).raw_repr(): kernel for key, kernel in ((keys.CUDA, cuda), (keys.CPU, cpu))}

    @functools.cache
    def recorded():  # made when it is needed: to make it takes a third of an op's time at the import
        return make_autograd_impl(op, Info(backward and once(of, backward), setup))

    def kernel(keyset, *args):
        run = None if _grad_mode() else last.get((keyset & _BELOW).raw_repr())
        if run is not None:
            return run(*args)
        try:
            return recorded()(keyset, *args)
        except RuntimeError as error:
            refuse_functorch(of, error)
            raise

    return untraced(kernel)


def refuse_functorch(name: str, error: RuntimeError) -> None:
    """NotImplementedError where an error is that of an autograd.Function under a transform of torch.func: torch's words
    for it name what a user has not written."""
    if "setup_context" in str(error) and _functorch():
        raise NotImplementedError(f"{name}: torch.func.grad, vjp and jacrev are not supported; take "
                                  "torch.autograd.grad") from None


def untraced(kernel):
    """The kernel, into which torch.compile does not look where it is called by what runs as Python between two graphs:
    torch.compiler.disable without its wrapper, which costs as much as a launch."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(kernel.__code__, frames._FrameExecStrategy(skip, skip))
    return kernel


def _refuse_vmap(name):
    raise NotImplementedError(f"{name}: torch.func.vmap is not supported; what it would map over may be one of the "
                              "dimensions that there are: rows, a batch, heads")


def once(of: str, backward):
    """A backward for autograd.Function whose gradients are not differentiated again: trying raises a
    NotImplementedError. of: the public functions whose gradient it is.

    torch's once_differentiable refuses only what comes through the gradients that go in: what a gradient owes to the
    op's inputs it would drop, and give a wrong number. So save_for_backward must have each tensor that a gradient
    depends on and that may require one itself: an input, an output, or some output in place of all inputs."""
    def first(ctx, *grads):
        if not traced():
            if any(g is not None and _is_batched(g) for g in grads):
                raise NotImplementedError(f"{of}: gradients of a batch at a time (is_grads_batched, and jacobian and "
                                          "hessian with vectorize) are not supported: call backward for each")
            # zeros without memory, which the dispatcher would give one element: no kernel takes such strides
            grads = [g.clone() if g is not None and g._is_zerotensor() else g for g in grads]
        if not _grad_mode():
            return backward(ctx, *grads)
        with torch.no_grad():
            if traced():  # torch.compile itself refuses second derivatives
                return backward(ctx, *grads)
            ctx = _Unpacked(ctx)
            found = backward(ctx, *grads)
        return _refusing(of, found if isinstance(found, tuple) else (found,), (*grads, *ctx.saved_tensors))

    return first


def _is_batched(g):
    """Of torch.autograd.grad's own batches, which kernels cannot read."""
    return torch._C._functorch.is_legacy_batchedtensor(g)


class _Unpacked:
    """What a backward is given in ctx's place where saved tensors are looked at twice: hooks for them, such as those of
    torch.utils.checkpoint, may be called once only."""

    def __init__(self, ctx):
        self.__dict__.update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    def __setattr__(self, name, value):
        setattr(self._ctx, name, value)


def _refusing(of, gradients, sources):
    """The gradients, lists of them too, as results of a node that leads to all that they may depend on, and that cannot
    be differentiated."""
    sources = [t for t in sources if t is not None and t.requires_grad]
    given = [t for some in gradients for t in (some if isinstance(some, list) else [some]) if t is not None]
    if not (sources and given):
        return gradients
    tied = iter(_Refusing.apply(of, len(given), *given, *sources))
    again = lambda t: [again(x) for x in t] if isinstance(t, list) else None if t is None else next(tied)
    return tuple(again(t) for t in gradients)


class _Refusing(Function):
    @staticmethod
    def forward(ctx, of, count, *tensors):
        ctx.of = of
        return tuple(t.detach() for t in tensors[:count])  # an input as a result would be a view, refused in place

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"{ctx.of}: second derivatives are not supported: a gradient that was taken with "
                                  "create_graph=True is differentiated again; detach() it, if it is to be a constant")


def eager_function(name: str, *, forward, backward, of: str, setup=None):
    """The autograd.Function of an op for plain eager mode (see ``recording``), where the dispatcher's way costs several
    times as much. It differentiates ``once``.

    forward: takes the op's inputs, runs without recording. setup, backward, of: as in ``torch_op``. Without setup,
    forward takes ctx before its inputs, and keeps there what backward needs."""
    members = dict(forward=forward, backward=once(of, backward))
    if setup is not None:
        members["setup_context"] = setup
    made = type(name, (Function,), {key: staticmethod(value) for key, value in members.items()})
    # Function.apply first asks for functorch, whose absence `recording` knows, and with a setup_context binds arguments
    # to forward's signature anew: 30 of 35 us on a GPU-less machine. Below it is the same apply in C.
    made.apply = super(Function, made).apply
    return made


def route(*tensors) -> str:
    """Which way a call with these tensors (or None) takes:

    "direct": the launcher, past the dispatcher. Only in plain eager mode (no compiler traces, no dispatch mode such as
        FakeTensorMode or FlopCounterMode watches, no functorch transform is under way, no forward-mode level is open),
        where every tensor is a plain one and autograd has nothing to record.
    "record": the op's ``eager_function``: the same, but one of the tensors requires a gradient.
    "op": the custom op, through the dispatcher. It makes of a view with a pending negation or conjugation what the view
        says (and memory of zeros that have none), which a launcher would read as it lies."""
    if traced():
        return "op"
    found = short.route(*tensors)
    return _route(tensors) if found is None else found


class Short:
    """`route` in plain eager mode, in C: "direct", "record", or None. replay.py sets it when it has its library."""

    @staticmethod
    def route(*tensors):
        return None


short = Short()


def _route(tensors) -> str:
    """What `route` says, past `traced`."""
    if _modes() or _functorch() or forward_ad._current_level >= 0 or _jit():
        return "op"
    if tensors and tensors[0] is None:  # the one that a call must have: the op's way has the words for it
        return "op"
    if not _grad_mode():  # then requires_grad does not matter
        for x in tensors:
            if type(x) not in _PLAIN_OR_NONE:
                return _other(type(x))
            if x is not None and (x.is_neg() or x._is_zerotensor()):
                return "op"
        return "direct"
    needs = False
    for x in tensors:
        if x is not None:
            if type(x) not in _PLAIN:
                return _other(type(x))
            if x.is_neg() or x._is_zerotensor():
                return "op"
            if x.requires_grad:
                needs = True
    return "record" if needs else "direct"


def _other(kind) -> str:
    """A subclass of Tensor, or something else."""
    if kind.__name__ == "DTensor":
        importlib.import_module("tkq.integrations.dtensor")  # how it is sharded through the ops
    return "op"


def traced_by_jit() -> bool:
    """Does torch.jit.trace record this call? Whether a tensor requires a gradient says nothing then: others may come
    when the program runs, and torch's own check of a trace traces again, without gradients."""
    return not traced() and _jit()


def may_record(*tensors) -> bool:
    """Of a call on the op's way: is a gradient recorded? May one be, where torch.jit.trace records the call?"""
    if traced_by_jit():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def recorded_op(op: str, **tensors) -> bool:
    """What a call asks before it takes the op's way: `check.refuse_tangent`, and `may_record`, which it returns."""
    check.refuse_tangent(op, **tensors)
    return may_record(*tensors.values())


def direct(*tensors) -> bool:
    """May the launcher be called past the dispatcher? See ``route``."""
    return route(*tensors) == "direct"


def recording(*tensors) -> bool:
    """Where ``direct`` said no: may the op's ``eager_function`` be applied past the dispatcher?"""
    return route(*tensors) != "op"
