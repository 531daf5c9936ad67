"""A first run with what `pip install -e '.[cu13]'` brings and no more, or with less: each command and public helper
says in one line what it leaves out, and fails only where it must."""
import os

import pytest

import tkq.testing
from tests.cpu.tools.test_doctor import own_cache, two_kernels  # noqa: F401  fixtures
from tests.helpers.process import fresh
from tests.helpers.process.kernels_for_tests import Scale
from tkq import __main__ as command
from tkq.cli import demo
from tkq.norms.ops import recipe as norm_recipe
from tkq.norms.spec import NormSpec
from tkq.runtime import Recipe
from tkq.testing import Expectation, sass

NOTE = "nvdisasm is missing, so that instructions and spills are not shown and not judged: pip install " \
       "nvidia-cuda-nvdisasm"
SCALE = Recipe("tests.helpers.process.kernels_for_tests:build_gpu_scale", (Scale(),))
# As the optional packages that are not in the extra cu13 were not installed, for torch's import as well; and as the
# tools of a CUDA toolkit were not.
HIDDEN = """
import importlib.abc, warnings

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("numpy", "pytest", "matplotlib", "hypothesis", "pandas", "IPython"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
"""
BARE = """
import sys
from tkq.testing import sass
sass.nvdisasm = lambda: None
"""
# That PyTorch and the DSL are for one CUDA version, which is not so in each environment of the tests, is test_doctor's.
MATCHED = "import torch\ntorch.version.cuda = None\n"


def environment(tmp_path):
    """Without a GPU, and without a compiler."""
    return dict(os.environ, TKQ_CACHE_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="", PATH="")


def bare(program, tmp_path, *words):
    """(exit status, stdout, stderr) of a program without the optional packages."""
    done = fresh.run(BARE + program, *words, before=HIDDEN, env=environment(tmp_path), timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def no_nvdisasm(monkeypatch):
    monkeypatch.setattr(sass, "nvdisasm", lambda: None)


def test_the_demo_leaves_instructions_out_and_says_so_once(no_nvdisasm, own_cache, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(demo, "_hopper", lambda: (False, "PyTorch finds no GPU"))
    rmsnorm = norm_recipe(NormSpec("rmsnorm", 4096, "bf16", "bf16", vector=8))
    monkeypatch.setattr(demo, "kernels", lambda: {"rmsnorm": rmsnorm})
    monkeypatch.setattr(demo, "examples", lambda large: [])
    assert demo.main([]) == 0
    out = capsys.readouterr().out
    assert out.count("nvdisasm is missing") == 1 and f"\nnote: {NOTE}\n" in out and "PROBLEM" not in out
    row = next(line.split() for line in out.splitlines() if line.startswith("rmsnorm "))
    assert row[1] == "ok" and int(row[2]) > 16 and int(row[3]) > 0 and row[4:] == ["n/a"] * 4


def test_registers_are_judged_without_instructions(no_nvdisasm, own_cache):  # noqa: F811
    found, = sass.report(SCALE, instructions=False)
    assert found.opcodes is None and found.registers > 4 and found.threads == 32
    assert sass.expect(found, Expectation(tensor=8, instructions=("HGMMA",))) == []
    assert sass.expect(found, Expectation(registers=4)) == [f"{found.registers} registers, at most 4 expected"]
    with pytest.raises(RuntimeError, match="were not read: nvdisasm was not found: pip install nvidia-cuda-nvdisasm"):
        found.count("LDG")


def test_what_reads_instructions_says_what_to_install(no_nvdisasm, own_cache):  # noqa: F811
    """`assert_sass` raises: a test of machine code that looked at none would pass for ever."""
    for call in (lambda: tkq.testing.report(SCALE), lambda: tkq.testing.assert_sass(SCALE),
                 lambda: sass.by_address(SCALE)):
        with pytest.raises(RuntimeError, match="^nvdisasm was not found: pip install nvidia-cuda-nvdisasm$"):
            call()
    first, note = sass.shown("scale", SCALE).splitlines()
    assert first.startswith("scale: ") and "registers" in first and note.strip() == NOTE


def test_compile_reports_what_can_be_read(no_nvdisasm, two_kernels, capsys):  # noqa: F811
    assert command.main(["compile", "--all", "--report"]) == 0  # that one is without tensor cores is not seen
    out = capsys.readouterr().out
    assert out.count(f"note: {NOTE}\n") == 1 and out.count("registers") == 2 and "WRONG" not in out


@pytest.mark.parametrize("words, status, said", (
    (["doctor"], 0, "nvdisasm      none"),
    (["compile", "swiglu-bf16", "--list"], 0, "swiglu-bf16"),
    (["bench"], 2, "tkq bench times kernels: it needs a GPU, and PyTorch finds none here."),
    (["bench", "--help"], 0, "usage: python -m tkq bench")), ids=str)
def test_commands_of_a_bare_installation(words, status, said, tmp_path):
    found, out, error = bare(MATCHED + "from tkq.__main__ import main\nsys.exit(main(sys.argv[1:]))", tmp_path, *words)
    assert found == status, error
    assert said in out and "Traceback" not in error and "PROBLEM" not in out


HELPERS = """
import torch, tkq, tkq.nn, tkq.reference, tkq.warmup.models
from tkq import testing, viz
from tkq.viz import Picture
for module in (tkq, tkq.nn, testing, viz, tkq.runtime, testing.timing, testing.sass, testing.rule, testing.console):
    for name in getattr(module, "__all__", dir(module)):
        getattr(module, name)
x = torch.randn(64, 64)
testing.assert_2x(x.bfloat16(), x.double(), x.bfloat16())
y = tkq.softmax(x)
from tkq.attention.forward.plan import plan
from tkq.attention.forward.spec import AttentionSpec
tile = viz.shared_tile(tkq.tile.st(64, 64))
print(str(tile)[:20])
tile.save(sys.argv[1] + "/a.svg"), tile.save(sys.argv[1] + "/a.txt")
try:
    tile.save(sys.argv[1] + "/a.png")
except ImportError as error:
    print("png:", error)
"""


def test_helpers_of_a_bare_installation(tmp_path):
    status, out, error = bare(HELPERS, tmp_path, str(tmp_path))
    assert status == 0, error
    assert "png: save: a .png is drawn by matplotlib, which is not installed (pip install matplotlib); .svg and .txt " \
           "need nothing" in out
    assert (tmp_path / "a.svg").stat().st_size > 1000 and (tmp_path / "a.txt").stat().st_size > 100


@pytest.mark.parametrize("words, status", ((["compile", "swiglu-bf16"], 2), (["demo"], 1), (["doctor"], 1)), ids=str)
def test_without_the_dsl_one_line_says_so(words, status, tmp_path):
    program = "import sys\nfrom tkq.cli import demo\ndemo.examples = lambda large: []\n" \
              "from tkq.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    done = fresh.run(program, *words, before="import tests.helpers.process.without_dsl", env=environment(tmp_path),
                     timeout=300)
    assert done.returncode == status, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "nvidia-cutlass-dsl is missing" in line]
    assert len(said) == 1 and "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.0,<4.9'" in said[0]
    assert "Traceback" not in done.stderr and "No module named" not in done.stdout + done.stderr
