"""Each public function's docstring ends with an example that runs, on the CPU here, and gives what it says."""
import ast
import inspect
import re
import textwrap

import pytest
import torch

import tkq
from docs.tools import api
from tkq import testing, viz
from tkq.runtime.compile import build

FUNCTIONS = sorted(api.operations())
# Take a GPU, or compile for minutes: their examples are read, and their calls must fit the signatures.
READ = {"check_plan", "prefetch", "tune"}  # or give nothing
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n|\n)+?)\Z", re.MULTILINE)
_RESULT = re.compile(r"^(\w+(?:, \w+)*) = [^#\n]+  # (\(.*)$")


def example(name, module=tkq):
    """The code of the docstring's last section."""
    found = _EXAMPLE.search(inspect.getdoc(getattr(module, name)) + "\n")
    assert found, f"{name}: no example at the docstring's end"
    return textwrap.dedent(found[1])


def said(value) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in READ])
def test_runs_and_gives_what_its_comments_say(name):
    torch.manual_seed(0)
    names, checked = dict(torch=torch, tkq=tkq), 0
    for node in ast.parse(code := example(name).replace('"cuda"', '"cpu"')).body:
        line = "\n".join(code.splitlines()[node.lineno - 1:node.end_lineno])
        exec(line, names)
        if result := _RESULT.match(line):
            targets, wanted = result[1].split(", "), result[2].split("; ")
            assert [said(names[target]) for target in targets] == wanted, line
            assert all(torch.isfinite(names[target].float()).all() for target in targets), line
            checked += f"tkq.{name}(" in line
    assert checked, "no call of the function with a comment on what it gives"


@pytest.mark.parametrize("name", sorted(READ))
def test_calls_fit_the_signature(name):
    calls = [node for node in ast.walk(ast.parse(example(name)))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == f"tkq.{name}"]
    assert calls
    for call in calls:
        inspect.signature(getattr(tkq, name)).bind(*call.args, **{k.arg: k.value for k in call.keywords})


@pytest.mark.parametrize("module, name", ((testing, "report"), (testing, "expect"), (testing, "assert_sass"),
                                          (viz, "fft_passes"), (viz, "pipeline"), (viz, "shared_tile"),
                                          (viz, "tv_layout")), ids=str)
def test_helpers_of_kernels_run(module, name, capsys, tmp_path):
    if module is testing and testing.sass.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    before, _ = build._cache, build.configure(tmp_path)
    try:
        exec(example(name, module), dict(tkq=tkq, testing=testing, viz=viz))
    finally:
        build._cache = before
    assert name == "assert_sass" or len(capsys.readouterr().out) > 5


def test_an_example_is_a_block_of_the_page():
    for name in FUNCTIONS:
        page = api.function_page(name, getattr(tkq, name))
        assert f"Example:\n\n```python\n{example(name).strip()}\n```" in page, name
