"""Every op once, forward and backward, on tiny tensors: what a machine without the DSL has to be able to do.

    python -m tests.helpers.ops.smoke bundle DIR     # compile what the cases take and link it; needs no GPU
    python -m tests.helpers.ops.smoke bundle DIR --each 10    # of every tenth case
    python -m tests.helpers.ops.smoke run            # on the GPU, beside the CPU's reference

`tests/gpu/runtime/test_smoke.py` runs the cases one by one.
"""
import argparse
import pathlib
import sys
import types

import torch

import tkq
from tests.helpers.ops import call_cases

_ULP = {torch.float8_e4m3fn: 0.125, torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-7}
_WEIGHTS = {"flash_attn_fp8": 2**-4, "flash_attn_fp8_varlen": 2**-4,
            "flash_attn_fp8_varlen of pages": 2**-4}  # in e4m3, rounded beside another maximum


def inputs(device):
    return types.SimpleNamespace(**call_cases.inputs(device))


def cases(g) -> dict:
    """{name: call} of a device's inputs; a call returns a tensor or some."""
    return {**call_cases.cases(g), **_with_gradients(g)}


def _with_gradients(g):
    """The same ops, and what autograd makes of them."""
    return {f"{name}, gradients": lambda f=f, leaves=leaves: _differentiated(f, leaves)
            for name, (f, *leaves) in recorded(g).items()}


def recorded(g) -> dict:
    """{name: (function, the tensors that it takes, of which gradients are wanted)}."""
    return {name: found for name, *found in (
        ("rmsnorm", lambda x, w: tkq.rmsnorm(x, w), g.x, g.w),
        ("rmsnorm with a residual", lambda x, w, r: tkq.rmsnorm(x, w, residual=r), g.x, g.w, g.x),
        ("rmsnorm of heads", lambda x, w: tkq.rmsnorm(x, w), g.qkv[:, :, 1], g.heads),
        ("layernorm", lambda x, w, b: tkq.layernorm(x, w, b), g.x, g.w, g.w),
        ("softmax", tkq.softmax, g.x),
        ("cross_entropy", lambda x: tkq.cross_entropy(x, g.classes), g.x),
        ("linear_cross_entropy", lambda x, w: tkq.linear_cross_entropy(x, w, g.classes), g.x, g.a),
        ("swiglu", tkq.swiglu, g.x, g.x),
        ("rope", lambda x: tkq.rope(x, g.cos, g.cos), g.qkv[:, :, 0]),
        ("flash_attn", lambda q, k, v: tkq.flash_attn(q, k, v, causal=True), g.q, g.k, g.v),
        ("flash_attn_varlen", lambda q, k, v: tkq.flash_attn_varlen(q, k, v, g.cu, g.cu, 40, 50, causal=True),
         g.q[0], g.k[0], g.v[0]),
        ("linear_attn", lambda q, gates: tkq.linear_attn(q / 8, q / 8, q, gates), g.q, g.gates),
        ("gated_delta_rule", lambda q, k, gates, betas: tkq.gated_delta_rule(k, k, q, gates, betas),
         g.q, g.keys, g.gates, g.betas),
        ("linear_attn with gates of columns", lambda q, gates: tkq.linear_attn(q / 8, q / 8, q, gates),
         g.q, g.columns),
        ("mamba2_ssd", lambda x, dt, A, k, D: tkq.mamba2_ssd(x, dt, A, k, k, D, dt_bias=A, dt_softplus=True),
         g.q, g.steps, g.decays, g.keys, g.decays),
        # factors' gradients are sums of differences, of which roundings leave more than is allowed here
        ("hedgehog", lambda q, weight: tkq.hedgehog(q, q / 8, q, weight, weight, g.factors, g.factors), g.q, g.map),
        ("based", lambda q, k, v: tkq.based(q[..., :16], k[..., :16], v), g.q, g.keys, g.q),
        ("causal_conv1d", lambda x, w, b: tkq.causal_conv1d(x, w.mT, b, "silu"), g.q[:, :, 0], g.heads, g.w),
        ("scan", lambda a, b: tkq.scan(a.tanh(), b), g.q[:, :, 0], g.keys[:, :, 0]),
        ("fft_conv", lambda u, k: tkq.fft_conv(u, k), g.q[:, :, 0], g.columns[0, :, 0]),
        ("gemm", lambda a, b: tkq.gemm(a, b), g.a, g.b),
        ("gemm with an activation", lambda a, b: tkq.gemm(a, b, activation="silu"), g.a, g.b),
    )}


def leaves_of(given) -> list:
    return [t.detach().clone().requires_grad_() for t in given]


def gradient_for(y):
    """One for a result: of some values and signs."""
    dy = torch.arange(y.numel()).view(y.shape) % 3 - 1 if y.dim() else torch.ones(())
    return dy.to(device=y.device, dtype=y.dtype)


def _differentiated(f, given):
    leaves = leaves_of(given)
    y = f(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, gradient_for(y)))


def check(name: str) -> None:
    """Run a case on the GPU and by the reference. AssertionError where they differ by more than roundings."""
    found, expected = (_tensors(cases(inputs(device))[name]()) for device in ("cuda", "cpu"))
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected)):
        a, scale = a.cpu(), max(_ULP.get(b.dtype, 0.0), _WEIGHTS.get(name, 0.0))
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name}: result {i}"
        a, b = a.double(), b.double()
        finite = b.isfinite()
        assert torch.equal(a[~finite], b[~finite]), f"{name}: result {i}"
        error = (a - b)[finite].abs().max().item() if finite.any() else 0.0
        allowed = 1e-6 + scale * (b[finite].abs().max().item() if finite.any() else 0.0)
        assert error <= allowed, f"{name}: result {i} is off by {error:.3g}, allowed are {allowed:.3g}"


def _tensors(found):
    return [t for t in (found if isinstance(found, (tuple, list)) else (found,)) if t is not None]


def names(each: int = 1) -> list:
    """Of every n-th case."""
    return list(cases(inputs("cpu")))[::each]


def recipes(only=None) -> list:
    """What the cases take, or those named. For a process of its own: see ``tkq.runtime.compile.dry_run``."""
    from tkq.runtime.compile import dry_run

    dry_run.begin()
    calls = cases(inputs("meta"))
    for name in only or calls:
        calls[name]()
    return dry_run.taken()


def main(words=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.ops.smoke", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("bundle", "run"))
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--each", type=int, default=1, help="bundle every n-th case")
    chosen = parser.parse_args(words)
    if chosen.action == "bundle":
        from tkq.runtime.compile import bundling
        from tkq.warmup import precompile

        made = dict(precompile.mapped(bundling.compiled, recipes(names(chosen.each)), chosen.jobs))
        path = bundling.write(chosen.folder, {recipe: found[:2] for recipe, found in made.items()})
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
        return 0
    failed = 0
    for name in names():
        try:
            check(name)
        except Exception as error:  # the others go on
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{failed} of {len(names())} cases failed; the DSL was "
          f"{'' if 'cutlass' in sys.modules else 'not '}imported")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
