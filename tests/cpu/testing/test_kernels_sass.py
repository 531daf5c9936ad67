"""The machine code of every kernel that tkq ships: no spills, tensor cores not serialised, wide accesses, budgets.

By default the kernels that stand for the others; all of them with --all-kernels."""
import dataclasses
import os
import subprocess
import sys

import pytest

from tests.helpers.process.machine_code import linked
from tkq.runtime.compile import build
from tkq.testing import sass
from tkq.warmup import catalog

# Quick kernels that have the configuration of another, which has all their code and a mask besides.
HELD_BY = {"flash_attn_bf16_d128_short": "flash_attn_bf16_d128_causal_left_medium_lse",
           "flash_attn_backward_bf16_d128_medium": "flash_attn_backward_bf16_d128_causal_medium",
           "flash_attn_backward_bf16_d256_short": "flash_attn_backward_bf16_d256_causal_short"}


def pytest_generate_tests(metafunc):
    if "kernel" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-kernels")
        chosen = [kernel for kernel in catalog.shipped() if every or (kernel.quick and kernel.name not in HELD_BY)]
        metafunc.parametrize("kernel", chosen, ids=[kernel.name for kernel in chosen])


@pytest.mark.machine_code(recipe=lambda kernel: kernel.recipe)
def test_machine_code(kernel, machine_code):
    assert sass.expect_all(machine_code, kernel.expectation) == [], "\n" + sass.text(kernel.name, machine_code)


def test_the_quick_kernels_are_some_of_each_kind():
    kernels = catalog.shipped()
    for kind in ("flash_attn", "rmsnorm", "layernorm", "gemm"):
        of_kind = [kernel.quick for kernel in kernels if kernel.name.startswith(kind)]
        assert any(of_kind), kind
    compiled = [kernel for kernel in kernels if kernel.quick and kernel.name not in HELD_BY]
    builders = {kernel.recipe.builder for kernel in compiled}
    assert builders == {kernel.recipe.builder for kernel in compiled if kernel.recipe in linked()}, "linked as well"
    assert len(compiled) <= 61  # `make test` where nothing is cached: each takes a second, the longest four


def test_what_is_left_out_is_held_by_another():
    quick = {kernel.name: kernel.recipe.args for kernel in catalog.shipped() if kernel.quick}
    for name, other in HELD_BY.items():
        (spec, config), (more, same) = quick[name], quick[other]
        assert config == same and other not in HELD_BY
        for field in dataclasses.fields(spec):
            assert getattr(spec, field.name) in (False, None, getattr(more, field.name)), (name, field.name)


def test_every_expectation_asks_for_something():
    for kernel in catalog.shipped():
        wanted = kernel.expectation
        assert wanted.tensor or wanted.instructions, kernel.name
        # the plans say where, and why; of gates for each column most are in chunks by levels
        most = {"channels": 760, "linear_attention": 24, "attention.backward": 8, "attention.wide": 16,
                "flex.backward": 36, "fft.long": 4}
        allowed = next((n for word, n in most.items() if f".{word}." in kernel.recipe.builder), 0)
        allowed = 160 if ".fft.whole." in kernel.recipe.builder else allowed  # addresses that are kept, once a sequence
        allowed = 150 if kernel.name.startswith("fft_conv") and "-split-" in kernel.name else allowed
        # the window's warpgroup has what the state's leave it: places in shared memory are kept outside its products
        allowed = 56 if kernel.name.startswith("hedgehog_queries") else allowed
        assert wanted.local_memory <= allowed, kernel.name


def test_every_builder_has_a_tensor_that_says_on_which_gpu():
    """As `build` asks of what it compiles: of each builder one kernel that is shipped."""
    for recipe in {kernel.recipe.builder: kernel.recipe for kernel in catalog.shipped()}.values():
        build._made(recipe)


def test_every_process_has_them_in_the_same_order():
    """As pytest-xdist asks of its workers. A set's order depends on the process, whose seed is another than ours."""
    names = "from tkq.warmup import catalog; print(*(kernel.name for kernel in catalog.shipped()))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    seen = subprocess.run([sys.executable, "-c", names], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                          capture_output=True, text=True).stdout.split()
    assert seen == [kernel.name for kernel in catalog.shipped()]


def test_select():
    assert [k.name for k in catalog.select(["flash_attn_bf16"])] == [
        k.name for k in catalog.shipped() if "flash_attn_bf16" in k.name]
    assert len(catalog.select([])) == len(catalog.shipped())
    with pytest.raises(ValueError, match="no_such"):
        catalog.select(["gemm", "no_such"])
