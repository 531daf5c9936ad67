"""The baselines of gemm: cuBLAS through torch, QuACK untuned and tuned. Only this file and peers.py import them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.peers import deepgemm
from bench.peers.common import AUTOTUNED, _compiled

ADDMM = "torch._addmm_activation"  # cuBLASLt's epilogues: bias and relu, or gelu by tanh
# what QuACK's gemm_act calls them; of its two silus the one by tanh, which is the shorter
QUACK_NAMES = {"gelu_tanh": "gelu_tanh_approx", "relu": "relu", "silu": "silu-tanh", "gelu": "gelu_erf"}

TUNING_MS, FEWEST, MOST = 8.0, 3, 100  # of calls of each configuration, where QuACK chooses one
SLOW_MS = 40.0  # three times what the longest product here takes: one call of such a configuration is enough


def quack(tuned: bool) -> Callable:
    """QuACK's product: f(a, b), to bf16. tuned: with the fastest of its 44 configurations, by its own tuner, which
    compiles them side by side (QUACK_COMPILE_WORKERS processes) and here times each for `TUNING_MS`: by itself it
    calls each 250 times, five minutes for five large shapes."""
    from quack.gemm_interface import gemm, gemm_tuned

    if tuned:
        gemm_tuned._do_bench = _milliseconds  # its decorator's argument do_bench
    return lambda a, b: gemm(a, b, out_dtype=torch.bfloat16, tuned=tuned)


def _milliseconds(call, quantiles) -> list[float]:
    """Of a call, behind one another without the host's time: what QuACK's tuner asks of a clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(run):
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    call()  # raises here where it is still to be compiled
    first = timed(call)
    if first > SLOW_MS:  # most in float8, whose two sums do not fit in registers
        return [first] * len(quantiles)
    calls = int(min(max(TUNING_MS / first, FEWEST), MOST))
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # not torch.cuda.graph, which collects garbage for longer than the calls take
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            call()
        graph.capture_end()
    return [timed(graph.replay) / calls] * len(quantiles)


def _quack_linear(activation: str) -> Callable:
    from quack.gemm_interface import gemm, gemm_act

    if not activation:
        return lambda a, b, bias: gemm(a, b, bias=bias, tuned=False)
    name = QUACK_NAMES[activation]
    return lambda a, b, bias: gemm_act(a, b, bias=bias, activation=name, store_preact=False, tuned=False)[1]


ACTIVATIONS = {"": lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
               "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def _torch_linear(activation: str) -> Callable:
    act = ACTIVATIONS[activation]
    return lambda a, b, bias: act(torch.addmm(bias, a, b))


def _compiled_linear(mode: str | None) -> Callable:
    return lambda activation: _compiled(_torch_linear(activation), mode)


def _addmm_activation(activation: str) -> Callable:
    if activation not in ("relu", "gelu_tanh"):
        raise NotImplementedError(f"{ADDMM} knows relu and gelu_tanh alone, got {activation!r}")
    gelu = activation == "gelu_tanh"
    return lambda a, b, bias: torch._addmm_activation(bias, a, b, use_gelu=gelu)


def _plain(activation: str) -> Callable:
    """tkq's own product without an epilogue: what a fused one is to cost no more than."""
    import tkq

    return lambda a, b, bias: tkq.gemm(a, b)


PEERS = {
    "gemm": {
        "cuBLAS": lambda: torch.matmul,
        "QuACK": lambda: quack(False),
        "QuACK tuned": lambda: quack(True),
        deepgemm.NAME: deepgemm.bf16,
    },
    "gemm_linear": {
        "torch": _torch_linear,
        ADDMM: _addmm_activation,
        "torch.compile": _compiled_linear(None),
        "torch.compile autotuned": _compiled_linear(AUTOTUNED),
        "QuACK": _quack_linear,
        "plain": _plain,
    },
    "gemm_batched": {"cuBLAS": lambda: torch.bmm},
}
LINEAR = tuple(name for name in PEERS["gemm_linear"] if name != "plain")  # those that another library has
