"""Public names: `dir` has them and no others, star imports bring them, and a name that is not there suggests one."""
import importlib
import inspect
import subprocess
import sys

import pytest

import tkq
import tkq.nn
import tkq.testing
from tests.helpers.process import fresh
from tkq import names

LAZY = ("tkq", "tkq.integrations", "tkq.nn", "tkq.reference", "tkq.runtime", "tkq.testing")


@pytest.mark.parametrize("module", LAZY)
def test_dir_has_what_is_public_and_no_more(module):
    module = importlib.import_module(module)
    shown = [name for name in dir(module) if not name.startswith("_")]
    assert set(getattr(module, "__all__", ())) - {"__version__"} <= set(shown) and "__file__" in dir(module)
    values = {name: getattr(module, name) for name in shown if name != "transformers"}  # brings a package of its own
    assert all(inspect.getmodule(value).__name__.startswith("tkq") for value in values.values())


def test_all_is_what_a_module_defines():
    classes = {name for name, value in vars(tkq.nn).items() if inspect.isclass(value) and not name.startswith("_")
               and value.__module__ == "tkq.nn"}
    later = {"BasedAttention", "Fp8Linear", "GatedDeltaNet", "HedgehogAttention", "HyenaFilterConv",
             "KimiDeltaAttention", "Mamba2", "RotaryEmbedding", "ShortConvolution"}
    assert set(tkq.nn.__all__) == classes | later == set(names._CLASSES)
    for module in LAZY:
        there = importlib.import_module(module)
        assert all(hasattr(there, name) for name in getattr(there, "__all__", ()))


def test_a_star_import_brings_the_functions():
    done = fresh.run("from tkq.nn import *\nfrom tkq.testing import *\nfrom tkq import *\n"
                     "print(Fp8Linear.__name__, assert_2x.__name__, softmax.__name__)")
    assert done.stdout.split() == ["Fp8Linear", "assert_2x", "softmax"], done.stderr


def test_modules_come_by_their_name_alone():
    """As `import tkq` leaves a program: nothing but the attribute is asked for."""
    program = ("import tkq; print(tkq.testing.timing.__name__, tkq.runtime.fake.__name__, tkq.testing.sass.__name__, "
               "tkq.integrations.sdpa.__name__, tkq.reference.fp8_gemm.__name__)")
    done = fresh.run(program)
    assert done.stdout.split() == ["tkq.testing.timing", "tkq.runtime.compile.fake", "tkq.testing.sass",
                                   "tkq.integrations.sdpa", "fp8_gemm"], done.stderr


MEANT = {
    "layer_norm": "layernorm", "rms_norm": "rmsnorm", "flash_attention": "flash_attn", "softmx": "softmax",
    "scaled_dot_product_attention": "flash_attn", "flash_attn_varlen_func": "flash_attn_varlen", "matmul": "gemm",
    "quantise": "quantize_fp8", "quantize": "quantize_fp8", "RMSNorm": "nn.RMSNorm", "Fp8Linear": "nn.Fp8Linear",
    "fused_linear_cross_entropy": "linear_cross_entropy", "_scaled_mm": "integrations.scaled_mm",
    "LigerFusedLinearCrossEntropyFunction": "linear_cross_entropy", "apply_rotary_pos_emb": "rope_qk",
    "_grouped_mm": "grouped_gemm", "silu_and_mul": "swiglu", "logsoftmax": "log_softmax", "linear": "gemm",
    "cross_entropy_loss": "cross_entropy", "layernorm_fwd": "layernorm", "LigerRMSNormFunction": "rmsnorm",
}


@pytest.mark.parametrize("name", MEANT)
def test_a_name_of_another_library_suggests_ours(name):
    assert names.meaning("tkq", name, (*tkq._PUBLIC, *tkq._MODULES)) == f"tkq.{MEANT[name]}"


def test_each_suggestion_is_there():
    for name in set(names._KNOWN.values()):
        found = tkq
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found), name
    assert not set(names._KNOWN) & {name.replace("_", "") for name in tkq.__all__}, "not found without the table"


@pytest.mark.parametrize("module, name, words", (
    ("tkq", "layer_norm", "did you mean tkq.layernorm?"), ("tkq", "RMSNorm", "did you mean tkq.nn.RMSNorm?"),
    ("tkq.nn", "rms_norm", "did you mean tkq.nn.RMSNorm?"), ("tkq.nn", "matmul", None),
    ("tkq.testing", "assert2x", "did you mean tkq.testing.assert_2x?"), ("tkq", "nothing_like_it", None),
    ("tkq.runtime", "fakes", "did you mean tkq.runtime.fake?"), ("tkq", "__wrapped__", None),
    ("tkq.reference", "layer_norm", "did you mean tkq.reference.layernorm?"),
    ("tkq.integrations", "spda", "did you mean tkq.integrations.sdpa?")))
def test_names_of_modules(module, name, words):
    with pytest.raises(AttributeError) as caught:
        getattr(importlib.import_module(module), name)
    said = f"module {module!r} has no attribute {name!r}"
    assert str(caught.value) == (f"{said}; {words}" if words else said)


def test_pythons_traceback_suggests_no_second_time():
    done = subprocess.run([sys.executable, "-c", "import tkq; tkq.layer_norm"], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("'layer_norm'; did you mean tkq.layernorm?")
