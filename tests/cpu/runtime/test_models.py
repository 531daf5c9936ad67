"""Which kernels a model takes, found out by its calls; and how they are compiled ahead."""
import io
import json
import os
import re
import subprocess
import sys
import types
from collections import Counter

import pytest

from tkq import prefetch as prefetch_
from tkq.norms import launch
from tkq.norms.spec import NormSpec
from tkq.runtime.compile.recipe import Recipe, Shipped
from tkq.warmup import catalog, models, precompile


@pytest.fixture(scope="module")
def llama():
    return models.kernels(["llama-8b"])


def test_all_ops_of_a_decoder_are_there_each_kernel_once(llama):
    ops = Counter(re.fullmatch(r"llama-8b/(\w+)-\d+", kernel.name)[1] for kernel in llama)
    assert set(ops) == {"rmsnorm", "rope", "flash_attn", "flash_attn_varlen", "gemm", "swiglu", "cross_entropy",
                        "linear_cross_entropy"}
    assert len({kernel.recipe for kernel in llama}) == len({kernel.name for kernel in llama}) == len(llama) > 30


def test_they_are_those_that_the_host_functions_plan(llama):
    recipes = {kernel.recipe for kernel in llama}
    norm = dict(kind="rmsnorm", N=4096, x="bf16", weight="bf16", vector=8)
    for options in ({}, dict(stats=True), dict(residual="bf16", total="bf16"),
                    dict(residual="bf16", total="bf16", stats=True)):
        assert launch.recipe(NormSpec(**norm, **options)) in recipes
    builders = {recipe.builder for recipe in recipes}
    assert {"tkq.attention.forward.kernel:AttentionForward", "tkq.attention.backward.kernel:BackwardKernel",
            "tkq.gemm.dense.kernel:DenseGemm", "tkq.gemm.dense.small_m_kernel:SmallMGemm",
            "tkq.losses.reduce:Total", "tkq.pointwise.rope:Rope"} <= builders


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_of_the_table(name):
    assert len(models.kernels([name])) > 30


def test_a_rehearsal_is_of_a_process_of_its_own(llama):
    from tkq.runtime.compile import dry_run

    assert not dry_run.under_way()


CONFIG = dict(hidden_size=64, num_attention_heads=4, intermediate_size=96, vocab_size=1000)


@pytest.mark.parametrize("given, expected", (
    ("llama-8b", models.MODELS["llama-8b"]),
    (models.MODELS["gemma2-9b"], models.MODELS["gemma2-9b"]),
    (types.SimpleNamespace(**CONFIG, model_type="llama"), models.Model(64, 4, 4, 16, 96, 1000)),
    (types.SimpleNamespace(text_config=types.SimpleNamespace(**CONFIG, num_key_value_heads=2, head_dim=32,
                                                             model_type="gemma3_text", sliding_window=512)),
     models.Model(64, 4, 2, 32, 96, 1000, head_norm=True, offset=1.0, activation="geglu", window=512)),
    (types.SimpleNamespace(**CONFIG, model_type="qwen2"), models.Model(64, 4, 4, 16, 96, 1000, bias=True)),
))
def test_models_by_name_and_by_configuration(given, expected):
    assert models.found(given) == expected


def test_names_may_come_from_an_iterator(monkeypatch):
    class Recorded(io.StringIO):
        def close(self):
            sent.append(json.loads(self.getvalue()))

    sent = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: types.SimpleNamespace(
        stdin=Recorded(), poll=lambda: 0, communicate=lambda: ("", ""), returncode=0))
    prefetch_("llama-1b", ops=(name for name in ("gemm", "rmsnorm")))
    assert sent[0][1:] == [["gemm", "rmsnorm"], 1]


def test_what_is_no_model():
    with pytest.raises(ValueError, match="no model 'llama-9b'; known are llama-1b"):
        prefetch_("llama-9b")
    with pytest.raises(ValueError, match="SimpleNamespace is no configuration.*hidden_size"):
        prefetch_(types.SimpleNamespace(num_attention_heads=4))
    with pytest.raises(ValueError, match="jobs: got 0"):
        prefetch_("llama-8b", jobs=0)
    with pytest.raises(TypeError, match="jobs: got float, expected an int"):
        prefetch_("llama-8b", jobs=1.5)
    with pytest.raises(ValueError, match="ops: got 'rms_norm', allowed are functions of tkq"):
        prefetch_("llama-8b", ops=("gemm", "rms_norm"))


def test_what_these_models_do_not_call_is_named_in_the_last_words(llama, monkeypatch):
    """Of the process that ``prefetch`` starts, here in this one."""
    from tkq.warmup import prefetch

    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([[models.MODELS["llama-8b"]], ["grouped_gemm"], 1])))
    monkeypatch.setattr(models, "kernels", lambda known: llama if known == [models.MODELS["llama-8b"]] else [])
    monkeypatch.setattr(os, "nice", lambda more: 0)
    with pytest.raises(SystemExit, match="^no kernel is for 'grouped_gemm'; functions are"):
        prefetch.main()


def test_prefetch_that_is_stopped_ends():
    started = prefetch_("llama-70b")
    started.stop()
    assert started.done
    with pytest.raises(RuntimeError, match="prefetch: it was ended"):
        started.wait()


# ---- the command ----------------------------------------------------------------------------------------------


def named(*names):
    return [Shipped(name, Recipe("a:b", (name,))) for name in names]


def test_kernels_of_ops():
    kernels = named("rmsnorm-bf16", "rmsnorm_backward-x", "gemm_bf16", "fp8_gemm_x", "x/flash_attn-1", "total-mean",
                    "cross_entropy_forward-x")
    names = lambda *ops: [kernel.name for kernel in catalog.of_ops(kernels, ops)]
    assert names() == [kernel.name for kernel in kernels]
    assert names("rmsnorm") == names("rmsnorm_quant") == ["rmsnorm-bf16", "rmsnorm_backward-x"]
    assert names("gemm") == ["gemm_bf16"] and names("fp8_gemm") == ["fp8_gemm_x"]
    assert names("flash_attn_varlen") == ["x/flash_attn-1"]
    assert names("cross_entropy", "gemm") == ["gemm_bf16", "total-mean", "cross_entropy_forward-x"]
    with pytest.raises(ValueError, match="softmax"):
        names("softmax")


def test_every_function_of_tkq_has_kernels():
    import tkq

    kernels = catalog.shipped()
    for op in catalog.ops():
        assert catalog.of_ops(kernels, [op]), op
    assert set(catalog.ops()) == set(tkq.__all__) - {"Exchange", "Monoid", "ReductionBase", "RowKernel", "__version__",
                                                     "check_plan", "prefetch", "tune", "rope_cos_sin"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    for out in (io.StringIO(), Terminal()):
        progress = precompile.Progress(3, out)
        progress.show("one", (True,), None, False)
        progress.show("two", (False,), None, False)
        progress.show("three", None, "ValueError: no", True)
        assert re.match(r"3 kernels, 1 of them compiled now, 1 wrong, in \d", progress.ended())
        text = out.getvalue()
        assert "[3/3] three: FAILED: ValueError: no\n" in text
        if out.isatty():
            assert "[" + "#" * 10 + " " * 20 + "] [1/3] one: compiled" in text and text.count("\n") == 2
        else:
            assert text.startswith("[1/3] one: compiled\n[2/3] two: in the cache\n")


def test_the_command_refuses_what_it_cannot_do():
    def printed(*words):
        done = subprocess.run([sys.executable, "-m", "tkq", "compile", *words], capture_output=True, text=True)
        assert done.returncode == 2
        return done.stderr

    assert "invalid choice: 'sm_100a'" in printed("--arch", "sm_100a")
    assert "no model 'llama-9b'" in printed("--models", "llama-9b")
