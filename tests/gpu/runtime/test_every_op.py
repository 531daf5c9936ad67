"""Every op as a citizen of PyTorch (tests/helpers/ops/every_op.py) on a GPU: what
tests/cpu/runtime/test_every_op_cpu.py asks on the CPU's
path, and what only a GPU has: CUDA graphs, streams, threads that launch, a device that is not the current
one. How many launches a call is: test_launches.py."""
import pytest
import torch

from tests.helpers.ops import every_op_checks as checks
from tests.helpers.ops.every_op import (
    CASES,
    FUNCTIONS,
    VARIANTS,
    WITH_GRADIENTS,
    assert_same,
    incoming,
    of_all,
    results,
    run,
)

# torch 2.11 says of itself that it should not use torch.jit
pytestmark = pytest.mark.filterwarnings("error", "ignore:.torch.jit:DeprecationWarning")
every, differentiable = of_all(list(CASES.values())), of_all(WITH_GRADIENTS)


@pytest.fixture(autouse=True)
def quiet(capfd):
    """Nothing is said on the way, by torch's C++ and the DSL neither; but that a kernel is another test process's to
    compile, which of many processes at once may take long."""
    yield
    lines = capfd.readouterr().err.splitlines()
    assert not [line for line in lines if not line.startswith("tkq: waits for another process, which compiles")]


# Those that trace: few tests, as each process that has one imports torch's tracers, which takes seconds.
traced = pytest.mark.parametrize("cases", [
    pytest.param(FUNCTIONS[::2], id="every other"), pytest.param(FUNCTIONS[1::2], id="the others"),
    pytest.param(VARIANTS, id="variants", marks=pytest.mark.slow)])


@traced
def test_opcheck(cases):
    checks.holds_for_all(checks.passes_opcheck, cases, "cuda")


@traced
def test_compile(cases):
    checks.holds_for_all(checks.compiles_once, cases, "cuda")


@traced
def test_export(cases):
    checks.holds_for_all(checks.exports, cases, "cuda")


@every
def test_autocast(case):
    checks.keeps_its_types_under_autocast(case, "cuda")
    if case.cast:
        checks.autocasts(case, "cuda", (torch.bfloat16,))


@differentiable
def test_grad_scaler(case):
    checks.scales_gradients(case, "cuda")


@differentiable
@pytest.mark.parametrize("reentrant", (False, True), ids=("not reentrant", "reentrant"))
@pytest.mark.sampled(when=lambda case, reentrant: list(CASES).index(case.name) % 2 == reentrant)  # --slow: both
def test_checkpoint(case, reentrant):
    checks.checkpoints(case, "cuda", reentrant)


@differentiable
def test_second_derivatives(case):
    for way in checks.WAYS:
        checks.refuses_second_derivatives(case, "cuda", way)


@every
def test_threads_and_streams(case):
    """Several threads, each with a stream of its own."""
    def around(call):
        def work():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                found = call()
            stream.synchronize()
            return found

        return work

    checks.runs_in_threads(case, "cuda", around)


@every
def test_on_a_side_stream(case):
    """What comes late on the stream is waited for; the default stream has nothing to do with it."""
    wanted, stream = run(case, case.inputs("cuda", seed=1, grad=True)), torch.cuda.Stream()
    inputs, others = case.inputs("cuda", grad=True), case.inputs("cuda", seed=1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(2_000_000)  # about a millisecond
        for name, x in inputs.items():
            x.copy_(others[name])
    with torch.cuda.stream(stream):
        found = run(case, inputs)
    stream.synchronize()
    assert_same(found, wanted, case.exact, case.name)


@every
def test_in_a_cuda_graph(case):
    """Captured forward and backward, replayed with other numbers, lengths and classes."""
    fixed = case.inputs("cuda", grad=True)
    leaves = [fixed[name] for name in case.leaves]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # all that a first call makes
        recorded, gradients = incoming(case.call(*fixed.values()))
        if leaves:
            torch.autograd.grad(recorded, leaves, gradients)
        del recorded  # with it what autograd has noted of this stream
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(case.call(*fixed.values()))
        if leaves:
            found += torch.autograd.grad([t for t in found if t.requires_grad], leaves, gradients)
    for seed in (1, 2):
        others = case.inputs("cuda", seed=seed)
        with torch.no_grad():
            for name, x in fixed.items():
                x.copy_(others[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_same([t.detach() for t in found], run(case, case.inputs("cuda", seed=seed, grad=True)), case.exact,
                    f"{case.name}, replayed with {seed}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(other):
            wanted = {name: run(case, case.inputs("cuda", grad=True)) for name, case in CASES.items()}
        with torch.cuda.device(current):
            for name, case in CASES.items():
                for _ in range(2):  # a second call may be replayed
                    found = run(case, case.inputs(f"cuda:{other}", grad=True))
                    assert all(t.device.index == other for t in found), name
                    assert_same(found, wanted[name], case.exact, f"{name} on {other}, {current} being current")
