"""`python -m tkq compile`: what its command line chooses, and what it answers to one that cannot be meant."""
import pytest

from tests.cpu.tools.test_doctor import own_cache  # noqa: F401  a fixture
from tkq import __main__ as command
from tkq.warmup import catalog, models, precompile


def listed(capsys, *words):
    assert command.main(["compile", *words, "--list"]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize("words", (
    ["--list", "--ops", "softmax", "n4096"], ["n4096", "--ops", "softmax"], ["--ops=softmax", "n4096", "--list"],
    ["--ops", "softmax", "--list", "n4096"]), ids=" ".join)
def test_a_name_stays_a_name_wherever_it_stands(words, capsys):
    found = listed(capsys, *words)
    assert found == [k.name for k in catalog.shipped() if k.name.startswith("softmax") and "n4096" in k.name]
    assert len(found) == 2


def test_several_are_joined_by_commas_or_given_one_by_one(capsys):
    both = listed(capsys, "--ops", "softmax,swiglu")
    assert both == listed(capsys, "--ops", "softmax", "--ops", "swiglu")
    assert {name.partition("-")[0].partition("_")[0] for name in both} == {"softmax", "swiglu"}
    given = precompile.parsed(["--models", "llama-8b,qwen3-8b", "--models", "gemma3-4b", "gemm", "-j", "2", "rope"])
    assert given.models == ["llama-8b", "qwen3-8b", "gemma3-4b"] and given.names == ["gemm", "rope"] and given.jobs == 2


@pytest.mark.parametrize("words, said", (
    ([], "say what to compile: part of a kernel's NAME (--list prints them), --ops, --models, or --all for the "),
    (["--report", "-j", "4"], "or --all for the 2"),
    (["--bundle", "b"], "say what to compile"),
    (["--all", "gemm"], "--all is every kernel: leave out NAME, --models and --ops, or leave out --all"),
    (["--all", "--ops", "gemm"], "--all is every kernel"),
    (["--ops", "softmax", "rmsnorm"], "'rmsnorm' stands where a NAME does; several of --ops are joined by commas: "
                                      "--ops softmax,rmsnorm\n"),
    (["softmx"], "no kernel's name contains 'softmx'; near it are softmax-"),
    (["--ops", "layer_norm"], "no kernel is for 'layer_norm'; functions are based, cascade_attention, "),
    (["gemm", "--jobs", "0"], "--jobs is 0, allowed are numbers from 1 on")))
def test_what_cannot_be_meant_is_said_before_anything_is_compiled(words, said, capsys, own_cache,  # noqa: F811
                                                                  monkeypatch):
    monkeypatch.setattr(precompile, "ensure", lambda recipe: pytest.fail("compiled"))
    assert command.main(["compile", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("tkq compile: ") and said in printed.err and printed.err.count("\n") == 1
    assert not printed.out


def test_models_behind_a_model(capsys, monkeypatch):
    one = catalog.shipped()[0]
    monkeypatch.setattr(models, "kernels", lambda of: [one])
    assert command.main(["compile", "--models", "llama-8b", "qwen3-8b", "--list"]) == 2
    assert capsys.readouterr().err.endswith("several of --models are joined by commas: --models llama-8b,qwen3-8b\n")
    assert listed(capsys, "--models", "llama-8b", one.name[:5]) == [one.name]


def test_every_kernel_is_some_function_s():
    kernels = catalog.shipped()
    known = {kernel.name for op in catalog.ops() for kernel in kernels if catalog._is_of(kernel, op)}
    assert [kernel.name for kernel in kernels if kernel.name not in known] == []


@pytest.mark.parametrize("arguments, words", [
    (["--all", "--output", ""], "--output: is empty"), (["--all", "--bundle", ""], "--bundle: is empty"),
    (["softmax", "--models", ""], "no model ''"), (["softmax", "--ops", ","], "'softmax' stands where"),
    *((["softmax", "--list", *option], f"--list prints names and makes nothing: leave it out, or leave out {option[0]}")
      for option in (["--bundle", "b"], ["--wheel", "w"], ["--output", "o"], ["--report"], ["--jobs", "2"])),
    (["softmax", "--report", "--bundle", "b"], "--report is of the cache's kernels"),
    (["softmax", "--output", "o", "--wheel", "w"], "--output is a cache, which --bundle and --wheel do not fill")])
def test_options_that_would_do_nothing_or_something_else(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = command.main(["compile", *arguments])
    except SystemExit as ended:  # argparse's
        status = ended.code
    assert status == 2 and words in capsys.readouterr().err and not list(tmp_path.iterdir())
