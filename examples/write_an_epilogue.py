"""User-defined epilogues for tkq.gemm: a function of one number, applied to each accumulator before it is stored.
Run it: with a Hopper GPU they are checked against PyTorch and timed with it; without one they are only compiled.
"""
import cutlass
import torch
from cutlass import Float32

import tkq
from tkq.gemm.dense.plan import recipe
from tkq.gemm.dense.spec import GemmSpec
from tkq.gemm.epilogue import Epilogue, name_of
from tkq.testing import sass, timing


def squared_relu(x):
    """max(x, 0)^2 of the float32 accumulator: a number in, a number out, for each element. It is traced when compiled:
    select with ``cutlass.select_``, compute with ``cutlass.cute.math``."""
    positive = Float32(cutlass.select_(x > Float32(0.0), x, Float32(0.0)))
    return positive * positive


def causal(x, row, column):
    """Two more arguments give the element's position: here, scores of later keys become 0."""
    return Float32(cutlass.select_(column <= row, x, Float32(0.0)))


def main():
    if not torch.cuda.is_available():
        for f, located in ((squared_relu, False), (causal, True)):
            spec = GemmSpec(b_major="k", epilogue=Epilogue(name_of(f), located=located))
            print(sass.shown(f.__name__, recipe(spec, 1024, 1024, 1024, 132)))
        print("No GPU here: compiled for sm_90a, nothing timed.")
        return
    a, w = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for f, meaning in ((squared_relu, lambda x: torch.relu(x).square()), (causal, torch.tril)):
        ours, theirs = tkq.gemm(a, w.t(), activation=f).float(), meaning(a @ w.t()).float()
        print(f"{f.__name__}: largest difference {(ours - theirs).abs().max() / theirs.abs().max():.1e} of the largest")
        timed = timing.compare({"tkq": lambda a, w, f=f: tkq.gemm(a, w.t(), activation=f),
                                "torch": lambda a, w, f=meaning: f(a @ w.t())}, lambda i: (a, w))
        for t in timed.timings:
            print(f"  {t.name:6s} {t.median_ms * 1e3:8.1f} us")


if __name__ == "__main__":
    main()
