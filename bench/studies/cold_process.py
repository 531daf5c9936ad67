"""A process that has done its imports and forks itself for each case of bench.studies.cold_start.

    python -m bench.studies.cold_process cache|bundle [DEVICE]

Reads names of cases, one a line, and writes what each copy saw, one line of JSON. Copies know of CUDA, of kernels and
of sources what a new process knows after its imports: nothing. So a case costs a second, not a process's imports.
"""
from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time

TORCH = "torch.sum, gradients"  # a case: what torch's own kernels and its first backward take, to compare with
OF_THE_DSL = {"Exchange", "Monoid", "ReductionBase", "RowKernel", "tune"}  # these names import it
_PATIENCE = 90  # seconds; a case that compiles takes some


def imported() -> dict:
    """Import all that the cases use. Seconds by what was imported."""
    begin = time.perf_counter()
    import torch

    torch_s, begin = time.perf_counter() - begin, time.perf_counter()
    import tkq

    tkq_s, begin = time.perf_counter() - begin, time.perf_counter()
    import tkq.runtime.compile.ffi

    ffi_s, begin = time.perf_counter() - begin, time.perf_counter()
    for name in tkq.__all__:
        if name not in OF_THE_DSL:
            getattr(tkq, name)
    functions_s = time.perf_counter() - begin
    import torch.fx.experimental.symbolic_shapes  # torch.autograd.grad does, and with it sympy: seconds

    import tests.helpers.ops.smoke  # noqa: F401

    assert not torch.cuda.is_initialized()  # else copies could not use it
    gc.collect()
    gc.freeze()  # to go through what was imported takes a fifth of a second: in no copy's call
    return {"torch": torch_s, "tkq": tkq_s, "tvm_ffi": ffi_s, "functions": functions_s}


def seen(op: str, device: str) -> dict:
    """What two calls of a case take, in a process that has made none. Seconds: first, second; of a case with gradients
    as pairs, of the forward pass and of the backward."""
    import torch

    from tests.helpers.ops import smoke

    g = smoke.inputs(device)
    (g.x + g.x).sum().item()
    if op == TORCH:
        steps = [recorded(torch.sum, [g.x], device, lambda y, leaves, dy: y.backward()) for _ in range(2)]
    else:
        leaf = g.w.detach().requires_grad_()
        torch.autograd.grad(leaf * 2, leaf, g.w)  # starts autograd's threads
        name, of_two, _ = op.rpartition(", gradients")
        if of_two:
            f, *given = smoke.recorded(g)[name]
            steps = [recorded(f, given, device) for _ in range(2)]
        else:
            call = smoke.cases(g)[op]
            steps = [timed(call, device)[0] for _ in range(2)]
    return {"first": steps[0], "second": steps[1], "dsl": "cutlass" in sys.modules}


def recorded(f, given, device, backward=None) -> tuple:
    """Seconds of a forward pass that autograd records, and of its backward pass: backward(y, leaves, dy), or torch's
    autograd.grad. What is made between them does not count."""
    import torch

    from tests.helpers.ops import smoke

    leaves = smoke.leaves_of(given)
    forward, y = timed(lambda: f(*leaves), device)
    dy, backward = smoke.gradient_for(y), backward or torch.autograd.grad
    return forward, timed(lambda: backward(y, leaves, dy), device)[0]


def timed(call, device):
    """(seconds, the result) of a call that has ended on the GPU too."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else int
    wait()
    begin = time.perf_counter()
    found = call()
    wait()
    return time.perf_counter() - begin, found


def copied(op: str, device: str) -> dict:
    """What a copy of this process saw, or its problem. The copy has ended, and left the GPU."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(_PATIENCE)
        try:
            try:
                found = seen(op, device)
            except BaseException as problem:  # SystemExit too: the copy must not read what the next cases are
                found = {"problem": f"{type(problem).__name__}: {problem}"[-400:]}
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        sent = pipe.read()
    _, status = os.waitpid(process, 0)
    if sent:
        return json.loads(sent)
    return {"problem": f"its process ended by signal {status & 127}, status {status >> 8}"}


def write(found: dict) -> None:
    print(json.dumps(found), flush=True)


def main(source: str, device: str = "cuda") -> None:
    if source == "bundle":
        import tests.helpers.process.without_dsl  # noqa: F401
    write(imported())
    for line in sys.stdin:
        write(copied(line.strip(), device))


if __name__ == "__main__":
    main(*sys.argv[1:])
