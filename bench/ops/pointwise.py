"""rope, swiglu and geglu, forward and backward, against QuACK, Liger, torch.compile and copies as rooflines.

    python -m bench.ops.pointwise [--sections rope,gated,calls] [--seconds 200] [--quick] [--out bench/results/h100]
    python -m bench.ops.pointwise --sections variants      # the configurations that a plan may choose

Results go to OUT/pointwise.json after every case; a table of all of them is printed last. Exit status 0 if every bound
that could be decided holds and every result is accurate, 1 if not or if something did not run, 2 without a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

import tkq
from bench.core import harness
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound
from bench.ops.foundation import BF16, generator
from bench.peers import common, pointwise
from tkq.pointwise import gated_ops, plan
from tkq.pointwise.rope_check import Rotation
from tkq.pointwise.rope_launch import launch
from tkq.pointwise.spec import GatedSpec, RopeSpec
from tkq.reference import pointwise as reference
from tkq.testing.timing import relative_error

ROPE_SHAPES = ((4, 4096, 32, 128), (4, 4096, 8, 128), (4, 4096, 32, 64))
QK_SHAPE = (4, 4096, 32, 8, 128)  # B, S, heads of q, heads of k, D
GATED_SHAPES = ((16384, 14336), (8192, 8192), (4096, 11008))
KINDS = ("swiglu", "geglu", "geglu_tanh")
BOUND = 0.95
CALL_US, AUTOGRAD_CALL_US = 9.0, 20.0
SAMPLE_ROWS = 256

common.PEERS.update(pointwise.PEERS)


def _randn(i: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16, generator=generator(i))


def _inverse(x, cos, sin):
    """The backward of rope, as autograd calls it."""
    out = torch.empty_like(x)
    launch(Rotation(cos, sin, 0, None, None, None, False, True), x, out)
    return out


def afresh(op: str, name: str, inputs: Callable[[int], tuple]) -> tuple[tuple, object]:
    """Inputs, and what a peer makes of them that writes over what it is given: its calls so far have spoilt theirs."""
    return inputs(0), pointwise.PEERS[op][name]()(*inputs(0))


# ---- the cases ---------------------------------------------------------------------------------------------------


def rope_jobs() -> Iterator[Job]:
    for shape in ROPE_SHAPES:
        yield _rope_job("rope", tkq.rope, shape)
    yield _rope_job("rope backward", _inverse, ROPE_SHAPES[0])
    yield _rope_qk_job()


def _rope_job(op: str, ours: Callable, shape: tuple[int, int, int, int]) -> Job:
    b, s, h, d = shape
    cos, sin = tkq.rope_cos_sin(s, d, 500000.0)

    def error(name, inputs, output):
        if name == "copy":
            return None
        wanted = reference.rope(inputs[0][:1].float(), cos, sin, inverse=op == "rope backward")
        return relative_error(output[:1], wanted)

    question = harness.Question("rope", op, f"B{b} S{s} H{h} D{d}", "GB/s", 2 * b * s * h * d * 2,
                                roof=Bound(("copy",), BOUND))
    return Job(question, ours, op, tuple(pointwise.PEERS[op]), lambda i: (_randn(i, *shape), cos, sin), error)


def _rope_qk_job() -> Job:
    b, s, h, hk, d = QK_SHAPE
    cos, sin = tkq.rope_cos_sin(s, d, 500000.0)

    def inputs(i):
        return _randn(2 * i, b, s, h, d), _randn(2 * i + 1, b, s, hk, d), cos, sin

    def error(name, given, output):
        if name == "copy":
            return None
        if name.startswith("Liger"):
            given, output = afresh("rope_qk", name, inputs)
        return max(relative_error(y[:1], reference.rope(x[:1].float(), cos, sin)) for x, y in zip(given, output))

    question = harness.Question("rope", "rope_qk", f"B{b} S{s} H{h}+{hk} D{d}", "GB/s", 2 * b * s * (h + hk) * d * 2,
                                roof=Bound(("copy",), BOUND))
    return Job(question, tkq.rope_qk, "rope_qk", tuple(pointwise.PEERS["rope_qk"]), inputs, error)


def gated_jobs(shapes=()) -> Iterator[Job]:
    """Of all shapes that are named; unless any is, of geglu at one."""
    named = shapes and shapes != GATED_SHAPES
    for kind in KINDS:
        for m, n in shapes if named else GATED_SHAPES if kind == "swiglu" else GATED_SHAPES[1:2]:
            yield _gated_job(kind, m, n)
            yield _gated_backward_job(kind, m, n)


def _ours(kind: str) -> Callable:
    if kind == "swiglu":
        return tkq.swiglu
    return lambda gate, up: tkq.geglu(gate, up, approximate="tanh" if kind == "geglu_tanh" else "none")


def _gated_job(kind: str, m: int, n: int) -> Job:
    def error(name, inputs, output):
        rows = slice(m - SAMPLE_ROWS, m)
        return None if name == "add" else relative_error(
            output[rows], reference.gated(kind, *(t[rows].float() for t in inputs)))

    question = harness.Question("gated", kind, f"M{m} N{n}", "GB/s", 3 * m * n * 2, roof=Bound(("add",), BOUND))
    return Job(question, _ours(kind), kind, tuple(pointwise.PEERS[kind]),
               lambda i: (_randn(2 * i, m, n), _randn(2 * i + 1, m, n)), error)


def _gated_backward_job(kind: str, m: int, n: int) -> Job:
    op = f"{kind} backward"

    def ours(dy, gate, up):
        return gated_ops.gated_backward(dy, gate, up, kind, "apart")

    def inputs(i):
        return tuple(_randn(3 * i + j, m, n) for j in range(3))

    def error(name, given, output):
        if name == "copy + add":
            return None
        if name == "Liger":
            given, output = afresh(op, name, inputs)
        rows = slice(m - SAMPLE_ROWS, m)
        wanted = reference.gated_backward(kind, *(t[rows].float() for t in given))
        return max(relative_error(o[rows], w) for o, w in zip(output, wanted))

    question = harness.Question("gated", op, f"M{m} N{n}", "GB/s", 5 * m * n * 2, roof=Bound(("copy + add",), BOUND))
    # Liger last among the peers: what it leaves in the inputs is another's input in the next round
    return Job(question, ours, op, tuple(pointwise.PEERS[op]), inputs, error)


def variant_jobs() -> Iterator[Job]:
    """Configurations in place of peers: a ratio below 1 says that one is faster than the planned."""
    m, n = GATED_SHAPES[0]
    for gradients in (None, "both"):
        spec = GatedSpec("swiglu", "bf16", "apart", 8, gradients)
        op = "swiglu variants" if gradients is None else "swiglu backward variants"
        configs = {f"{c.threads}x{c.vectors}": c for c in plan.gated_variants(spec)}
        job = _gated_backward_job("swiglu", m, n) if gradients else _gated_job("swiglu", m, n)
        yield _with_configs(job, op, configs, _gated_backward_with if gradients else _gated_with)
    for interleaved in (False, True):
        spec = RopeSpec("bf16", "fp32", 128, 0, interleaved, 8)
        configs = {_rope_name(c): c for c in plan.rope_variants(spec, ROPE_SHAPES[0][2])}
        op = "rope interleaved variants" if interleaved else "rope variants"
        yield _with_configs(_rope_job("rope", tkq.rope, ROPE_SHAPES[0]), op, configs,
                            lambda c, interleaved=interleaved: _rope_with(c, interleaved))


def _with_configs(job: Job, op: str, configs: dict, make: Callable) -> Job:
    common.PEERS[op] = {name: lambda c=c: make(c) for name, c in configs.items()}
    question = harness.Question("variants", op, job.question.shape, "GB/s", job.question.work)
    planned = make(next(iter(configs.values())))
    return Job(question, planned, op, tuple(configs), job.make_inputs, lambda *_: None)


def _gated_with(config):
    return lambda gate, up: gated_ops._value(gate, up, "swiglu", "apart", None, config)


def _gated_backward_with(config):
    return lambda dy, gate, up: gated_ops._gradients_on_gpu(dy, gate, up, "swiglu", "apart", True, True, None, config)


def _rope_name(config) -> str:
    return f"{config.threads}x{config.heads_each}" + f", {config.blocks} blocks" * bool(config.blocks)


def _rope_with(config, interleaved):
    def rotation(x, cos, sin):
        out = torch.empty_like(x)
        launch(Rotation(cos, sin, 0, None, None, None, interleaved, False), x, out, config=config)
        return out

    return rotation


# ---- the cost of a call ------------------------------------------------------------------------------------------


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    gate, up = (torch.randn(8, 256, device="cuda", dtype=BF16) for _ in range(2))
    gate_3d, up_3d = gate.view(2, 4, 256), up.view(2, 4, 256)
    x, k = torch.randn(1, 8, 4, 128, device="cuda", dtype=BF16), torch.randn(1, 8, 1, 128, device="cuda", dtype=BF16)
    cos, sin = tkq.rope_cos_sin(8, 128)
    both = torch.cat((gate, up), 1)
    gate_r, up_r, x_r = (t.clone().requires_grad_() for t in (gate, up, x))
    found = {
        "x + x": Call(lambda: gate + gate),
        "swiglu tkq": Call(lambda: tkq.swiglu(gate, up), at_most=CALL_US),
        "swiglu tkq, three dimensions": Call(lambda: tkq.swiglu(gate_3d, up_3d), at_most=CALL_US),
        "swiglu tkq, one tensor": Call(lambda: tkq.swiglu(both), at_most=CALL_US),
        "geglu tkq": Call(lambda: tkq.geglu(gate, up), at_most=CALL_US),
        "rope tkq": Call(lambda: tkq.rope(x, cos, sin), at_most=CALL_US),
        "rope tkq, in place": Call(lambda: tkq.rope(x, cos, sin, inplace=True), at_most=CALL_US),
        "rope_qk tkq": Call(lambda: tkq.rope_qk(x, k, cos, sin), at_most=CALL_US),
        "swiglu tkq, recorded": Call(lambda: tkq.swiglu(gate_r, up_r), True, AUTOGRAD_CALL_US),
        "rope tkq, recorded": Call(lambda: tkq.rope(x_r, cos, sin), True, AUTOGRAD_CALL_US),
        "rope_qk tkq, recorded": Call(lambda: tkq.rope_qk(x_r, k, cos, sin), True, AUTOGRAD_CALL_US),
    }
    for op, name, arguments in (("rope", "QuACK", (x, cos, sin)), ("swiglu", "Liger", (gate, up)),
                                ("swiglu", "torch", (gate, up))):
        for peer, call in common.find(op, (name,))[0].items():
            found[f"{op} {peer}"] = Call(lambda call=call, arguments=arguments: call(*arguments))
    return found


BENCH = Bench(
    "pointwise", __doc__,
    {"rope": lambda _: rope_jobs(), "gated": gated_jobs, "variants": lambda _: variant_jobs()},
    shapes={"gated": GATED_SHAPES},
    calls=calls,
    default=("calls", "rope", "gated"),
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
