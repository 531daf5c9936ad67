"""What must hold for every op (tests/helpers/ops/every_op.py), on whatever device: as functions of a case."""
import functools
import threading
import warnings

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.helpers.ops.every_op import BF16, F8, F32, Case, assert_same, backward, incoming, results, run
from tests.helpers.sanitizer.nan_fill import poisoned

WITHOUT_NUMBERS = ("test_autograd_registration", "test_faketensor")
QUICK = (*WITHOUT_NUMBERS, "test_schema")
ALL = (*QUICK, "test_aot_dispatch_dynamic")
MAY_BE_NONE = {"weight", "bias", "residual", "sinks", "up", "cu_seqlens", "g", "initial_state", "state_indices",
               "num_accepted_tokens", "D", "d", "z", "dt_bias", "initial_states", "cache_indices", "block_table",
               "q_descale", "k_descale", "v_descale"}
# forms whose way through PyTorch looks at numbers, which tensors on "meta" have none of
NOT_ON_META = {f"{op}, {form}" for op in ("linear_attn", "gated_delta_rule") for form in (
    "of packed sequences", "with packed gates of columns")} | {
        "mamba2_ssd, of packed sequences", "mamba2_ssd, with a pool", "causal_conv1d, of packed sequences",
        "causal_conv1d, by seq_idx and with normed heads", "kv_append, rotated"}
ROWS = (24, 40, 17)  # the first is that of `Case.inputs`


def holds_for_all(check, cases, device):
    """In one process, where tracers take longer to import than most cases take."""
    problems = {}
    for case in cases:
        try:
            check(case, device)
        except Exception as problem:
            problems[case.name] = problem
    assert not problems, "\n".join(f"{name}: {type(problem).__name__}: {problem}" for name, problem in problems.items())


class Noted(TorchDispatchMode):
    """Notes the calls of tkq's custom ops: (op, arguments)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tkq":
            recorded = torch._C._current_graph_task_id() < 0  # a call that a backward makes is not differentiated again
            self.calls.append((func, [_noted(x, recorded) for x in args]))
        return func(*args, **(kwargs or {}))


def _noted(x, recorded):
    """An argument, or a list of them; tensors require a gradient where the call is recorded."""
    if isinstance(x, (list, tuple)):
        return [_noted(y, recorded) for y in x]
    return x.detach().requires_grad_(x.requires_grad and recorded) if isinstance(x, torch.Tensor) else x


def op_calls(case: Case, device) -> list:
    """The custom ops that a call and its backward make, each with its arguments: samples for opcheck."""
    with Noted() as noted:
        run(case, case.inputs(device, grad=True))
    return noted.calls


def passes_opcheck(case, device, tests=ALL):
    calls = op_calls(case, device)
    assert calls, f"{case.name} makes no custom op"
    for op, args in calls:
        eighths = any(isinstance(t, torch.Tensor) and t.dtype == F8 for t in args)  # which torch cannot compare
        with poisoned(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sums in any order
            for i, found in enumerate(results(op(*args))):
                assert not found.dtype.is_floating_point or not found.float().isnan().any(), f"{op}: result {i}: NaN"
        torch.library.opcheck(op, args, test_utils=WITHOUT_NUMBERS if eighths else tests)
        if eighths:  # of what test_schema asks: every result is a new tensor
            new = [t.untyped_storage().data_ptr() for t in results(op(*args)) if t.numel()]
            given = [t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)]
            assert len({*new, *given}) == len(new) + len({*given}), f"{op}: a result shares its memory"


def compiles_once(case, device, backend="aot_eager", sizes=ROWS):
    """For all sizes: with its gradients, in one graph."""
    torch._dynamo.reset()
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True, backend=backend)
    for rows in sizes:
        found = run(case, case.inputs(device, rows, grad=True), compiled)
        assert_same(found, run(case, case.inputs(device, rows, grad=True)), case.exact, f"{case.name}, {rows} rows")
    count = len(_debug_get_cache_entry_list(case.call.__code__))
    assert count <= case.graphs, f"{case.name}: {count} graphs for {len(sizes)} sizes, expected {case.graphs}"


class _Module(torch.nn.Module):
    """Its forward has the call's named arguments: of one with ``*inputs`` torch 2.9 exports no guard of two sizes."""

    def __init__(self, call):
        super().__init__()
        self.forward = call


def exports(case, device):
    """With a size that stays free, and what is exported runs with another one."""
    auto = torch.export.Dim.AUTO
    inputs = tuple(case.inputs(device).values())
    free = [{i: auto for i, n in enumerate(x.shape) if n == ROWS[0]} for x in inputs]
    program = torch.export.export(_Module(case.call), inputs, dynamic_shapes=tuple(free)).module()
    for rows in ROWS[:2]:
        x = tuple(case.inputs(device, rows).values())
        with torch.no_grad():
            assert_same(results(program(*x)), results(case.call(*x)), what=f"{case.name}, exported, {rows} rows")


def autocasts(case, device, dtypes=(torch.bfloat16, torch.float16)):
    """Float32 inputs of a product get autocast's type, and so does the result; gradients have their inputs' types."""
    for dtype in dtypes:
        narrow = case.inputs(device, dtype=F32)
        narrow |= {name: narrow[name].to(dtype) for name in case.cast}
        inputs = case.inputs(device, dtype=F32, grad=True)
        for name in case.leaves:
            narrow[name].requires_grad_()
        with torch.autocast(device, dtype):
            found = results(case.call(*inputs.values()))
        backward(found)
        gradients = [inputs[name].grad for name in case.leaves]
        assert all(gradient.dtype == inputs[name].dtype for name, gradient in zip(case.leaves, gradients))
        wanted = run(case, narrow)
        wanted[len(found):] = [t.to(gradient.dtype) for t, gradient in zip(wanted[len(found):], gradients)]
        assert_same([*found, *gradients], wanted, case.exact, f"{case.name}, autocast {dtype}")


def keeps_its_types_under_autocast(case, device, dtype=BF16):
    """What has autocast's type already, and what is cast for no op: the same, forward and backward, as without."""
    wanted = run(case, case.inputs(device, grad=True, dtype=dtype))
    with torch.autocast(device, BF16):
        found = run(case, case.inputs(device, grad=True, dtype=dtype))
    assert_same(found, wanted, case.exact, f"{case.name} under autocast")


def scales_gradients(case, device):
    """torch.amp.GradScaler, of float32 parameters that the call takes in 16 bits: the same gradients as without, and no
    step where one is not finite."""
    plain = case.inputs(device, grad=True)
    backward(case.call(*plain.values()))
    inputs = case.inputs(device)
    weights = {name: inputs[name].float().requires_grad_() for name in case.leaves}
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=1)
    optimizer = torch.optim.SGD(weights.values(), lr=0.5)

    def step(factor):
        given = inputs | {name: x.to(inputs[name].dtype) for name, x in weights.items()}
        optimizer.zero_grad()
        backward([scaler.scale(t * factor) for t in results(case.call(*given.values())) if t.requires_grad])
        before = [x.detach().clone() for x in weights.values()]
        scaler.unscale_(optimizer)
        gradients = [x.grad.clone() for x in weights.values()]
        scaler.step(optimizer)
        scaler.update()
        return gradients, [torch.equal(x, old) for x, old in zip(weights.values(), before)]

    found, same = step(1.0)
    assert_same(found, [plain[name].grad.float() for name in case.leaves], False, f"{case.name}, unscaled")
    assert scaler.get_scale() == 512.0 and not any(same)
    _, same = step(float("inf"))
    assert scaler.get_scale() == 256.0 and all(same)


def checkpoints(case, device, reentrant):
    wanted = run(case, case.inputs(device, grad=True))
    found = run(case, case.inputs(device, grad=True), lambda *x: checkpoint(case.call, *x, use_reentrant=reentrant))
    assert_same(found, wanted, case.exact, f"{case.name}, checkpointed")


def _dispatched(call, *inputs):
    with Noted():
        return call(*inputs)


WAYS = {"eager": lambda call, *inputs: call(*inputs), "dispatched": _dispatched,
        "checkpointed": functools.partial(checkpoint, use_reentrant=False)}


def refuses_second_derivatives(case, device, way):
    """Gradients are the same with create_graph=True; and where one changes with a leaf, its own gradient there is
    refused, also in a sum with something that has one, in which it could be lost."""
    def gradients(changed=None, **options):
        inputs = case.inputs(device, grad=True)
        if changed is not None:
            inputs[changed].data.mul_(0.5)
        leaves = {name: inputs[name] for name in case.leaves}
        recorded, given = incoming(WAYS[way](case.call, *inputs.values()))
        return leaves, torch.autograd.grad(recorded, list(leaves.values()), given, **options)

    (leaves, found), wanted = gradients(create_graph=True), gradients()[1]
    assert_same([t.detach() for t in found], wanted, case.exact, f"{case.name}, create_graph")
    for name, leaf in leaves.items():
        for gradient, before, after in zip(found, wanted, gradients(name)[1]):
            if not torch.equal(before, after):
                with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
                    torch.autograd.grad(gradient.float().sum() + leaf.float().sum(), leaf, retain_graph=True)


def refuses_vmap(case, device):
    inputs = list(case.inputs(device).values())
    with pytest.raises(NotImplementedError, match=rf"\b{case.function}\b.*vmap"):
        torch.func.vmap(case.call, in_dims=(0, *[None] * (len(inputs) - 1)))(torch.stack([inputs[0]] * 2), *inputs[1:])


def makes_tensors_on_its_inputs_device(case):
    """Of CPU tensors while another device is the default; and of tensors on "meta", whose results and gradients have
    the shapes, strides and types that others have."""
    def run_on(device):
        inputs = {name: x.to(device) for name, x in made.items()}
        given, leaves = results(case.call(**inputs)), [inputs[name] for name in case.leaves]
        recorded = [t for t in given if t.requires_grad]
        gradients = torch.autograd.grad(recorded, leaves, [torch.ones_like(t) for t in recorded]) if leaves else ()
        return [t.detach() for t in (*given, *gradients)]

    made = case.inputs(grad=True)
    found = run_on("cpu")
    with torch.device("meta"):
        assert_same(run_on("cpu"), found, case.exact, f"{case.name}, another default device")
    for x, y in zip(run_on("meta"), found, strict=True) if case.name not in NOT_ON_META else ():
        assert x.is_meta and (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def goes_back_through_no_rows(case, device):
    """From a sum, whose gradient has strides of 0."""
    inputs = case.inputs(device, rows=0, grad=True)
    sum(t.sum() for t in results(case.call(**inputs)) if t.requires_grad).backward()
    assert all(inputs[name].grad.shape == inputs[name].shape for name in case.leaves)


def names_what_is_no_tensor(case, device):
    """In the place of each argument in turn. Of forms that give arguments as they come."""
    not_given = {"fp8_gemm": {"b"}, "flex_attention": {"slopes"}}  # transposed by the case, captured
    for name in case.inputs(device).keys() - not_given.get(case.name, set()):
        said = "gate" if case.name == "geglu" else name
        for nothing in ([1.0], 3, "a", *([] if name in MAY_BE_NONE else [None])):
            with pytest.raises(TypeError, match=rf"\b{said}: got {type(nothing).__name__}, expected a torch.Tensor"):
                case.call(**{**case.inputs(device), name: nothing})


def refuses_forward_mode(case, device):
    """A tangent of any tensor that has a gradient is refused by name, and not lost."""
    for name in case.leaves:
        inputs = case.inputs(device)
        with forward_ad.dual_level():
            inputs[name] = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            with pytest.raises(NotImplementedError, match="carries a tangent"):
                case.call(**inputs)


def refuses_functional_gradients(case, device):
    inputs = list(case.inputs(device).values())
    with pytest.raises(NotImplementedError, match=rf"\b{case.function}\b.*torch.func.grad"):
        torch.func.grad(lambda x: sum(t.float().sum() for t in results(case.call(x, *inputs[1:]))))(inputs[0])


def runs_in_threads(case, device, around=lambda call: call, threads=4):
    """At a time, each with its own numbers. around(call): what a thread does beside it."""
    seeds = range(threads)
    wanted = [run(case, case.inputs(device, seed=seed, grad=True)) for seed in seeds]
    found, barrier, problems = {}, threading.Barrier(threads), []

    def work(seed):
        try:
            barrier.wait()
            for _ in range(3):
                found[seed] = around(lambda: run(case, case.inputs(device, seed=seed, grad=True)))()
        except BaseException as problem:  # for the thread that waits
            problems.append(problem)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not problems, problems
    for seed in seeds:
        assert_same(found[seed], wanted[seed], case.exact, f"{case.name}, thread {seed}")


def registered() -> set:
    """The names of tkq's custom ops; without those of tests."""
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {op.partition(".")[0] for space, _, op in names if space == "tkq" and not op.startswith("test_")}
