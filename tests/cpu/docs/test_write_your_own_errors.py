"""The DSL's words for mistakes, as docs/write_your_own/index.md lists them, are what it says."""
import re
import sys
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tests.helpers.process.markdown import ROOT
from tkq import runtime

sys.path.append(str(ROOT / "examples"))

import write_a_gemm
from write_a_gemm import Gemm
from write_a_reduction import Softmax
from write_a_row_kernel import SiluNormBackward, inputs

PAGE = (ROOT / "docs" / "write_your_own" / "index.md").read_text()


class NoJit(Gemm):
    def load(self, g, t, i, x, sem):
        if i == 0:
            super().load(g, t, i, x, sem)


class LoopWithoutJit(Gemm):
    def load(self, g, t, i, x, sem):
        for _ in range(g.rows):
            super().load(g, t, i, x, sem)


class RunTimeColumns(Gemm):
    @cute.jit
    def finish(self, g, t, acc, s, wg):
        for p in cutlass.range(4):
            tk.store(s["c"][wg], tk.columns(acc, p * 64, 64))


class BeyondTheStage(Gemm):
    def compute(self, g, t, i, x, acc, wg):
        tk.mma_ABt(acc, x["a"][1], x["b"][0], a_part=wg)


class BeyondTheRing(Gemm):
    @cute.jit
    def finish(self, g, t, acc, s, wg):
        tk.store(s["c"][9], tk.columns(acc, 0, 64))


class WithoutPart(Gemm):
    def compute(self, g, t, i, x, acc, wg):
        tk.mma_ABt(acc, x["a"][0], x["b"][0])


class Rebound(Gemm):
    @cute.jit
    def finish(self, g, t, acc, s, wg):
        panel = tk.rt_fl(64)
        if wg == 0:
            panel = tk.columns(acc, 0, 64)
        tk.store(s["c"][wg], panel)


@dataclass(frozen=True)
class Named:
    a: tk.gl
    name: str = "a string"


class WithAString:
    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, blocks: Int32, stream: cuda.CUstream):
        self.kernel(Named(tk.gl.load(a, Gemm.a))).launch(grid=[blocks, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, g: Named):
        al = tk.SharedAllocator()
        sem = al.semaphores()
        tk.init(sem, 1)
        tk.load_async(al.tile(Gemm.a)[0], g.a, (0, 0), sem)


class NoGradient(SiluNormBackward):
    def write(self, e, r):
        return {}


class NoTuple(SiluNormBackward):
    def partial(self, e, r):
        return e.x


class BeforeItsTime(SiluNormBackward):
    def partial(self, e, r):
        return (e.x * r.slope,)


def build(name):
    return globals()[name](), write_a_gemm.build()[1]


def gemm(kind):
    return runtime.Recipe(f"{__name__}:build", (kind.__name__,))


def softmax(*numbers):
    x = torch.empty(1, 1024, dtype=torch.bfloat16)
    return Softmax.recipe(x, x, *numbers)


def gradient(kind):
    dy, x, weight, rstd = inputs(1, 1024, "cpu")
    return kind.recipe(dy=dy, x=x, weight=weight, rstd=rstd, dx=x, dweight=weight)


CASES = {
    "Cannot use a Runtime value": (gemm(NoJit), gemm(LoopWithoutJit)),
    "_extract_mlir_values() missing 1 required positional argument": (gemm(Rebound),),
    "failed to legalize operation .. make_exec_tma": (gemm(WithAString),),
}


@pytest.mark.parametrize("said", CASES)
def test_the_page_quotes_what_is_said(said):
    pattern = re.escape(said).replace(r"\ \.\.\ ", ".*")
    for recipe in CASES[said]:
        with pytest.raises(Exception) as caught:
            runtime.compile_recipe(recipe)
        words = " ".join(f"{caught.type.__name__}: {caught.value}".split())
        assert re.search(pattern, words), words
    assert f"`{said}`" in PAGE


REFUSED = {
    "ValueError: tile 1 of an input with 1 tiles": lambda: gemm(BeyondTheStage),
    "ValueError: stage is 9 of a ring": lambda: gemm(BeyondTheRing),
    "ValueError: mma_ABt: a_part is not given, and the operand has 2 parts": lambda: gemm(WithoutPart),
    "TypeError: columns: first is": lambda: gemm(RunTimeColumns),
    "TypeError: Softmax.launch: got 2 arguments, __call__ takes 3": softmax,
    "TypeError: Softmax.launch: got 4 arguments": lambda: softmax(1.0, 1.0),
    "ValueError: NoGradient: write returned nothing, and no dx": lambda: gradient(NoGradient),
    "ValueError: NoTuple: partial returned": lambda: gradient(NoTuple),
    "AttributeError: BeforeItsTime: partial: r has no slope, it has rstd": lambda: gradient(BeforeItsTime),
    "TypeError: Softmax: argument 2, scale: got None": lambda: softmax(None),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_tkq_says_itself(said):
    with pytest.raises(Exception) as caught:
        runtime.compile_recipe(REFUSED[said]())
    assert said in " ".join(f"{caught.type.__name__}: {caught.value}".split())
