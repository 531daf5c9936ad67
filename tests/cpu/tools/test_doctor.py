"""python -m tkq: what doctor says of environments, good and broken, and what the other commands answer."""
import dataclasses
import subprocess
import sys

import pytest

from tkq import __main__ as command
from tkq.cli import doctor
from tkq.cli.doctor import Facts, diagnose
from tkq.runtime import Recipe, Shipped
from tkq.runtime.compile import build, bundle
from tkq.runtime.compile.cache import Cache
from tkq.runtime.compile.expectation import Expectation
from tkq.warmup import catalog

GOOD = Facts(python=(3, 12, 1), torch="2.13.0+cu130", torch_cuda=(13, 0), dsl="4.8.1", flavours=("cu13", "cu12"),
             flavour="cu13", tvm_ffi="0.1.15.post2", driver=(13, 0), gpu=("NVIDIA H100 80GB HBM3", (9, 0)), linker=None,
             nvdisasm="/usr/bin/nvdisasm", cuda_python="13.4.4", cudart="libcudart.so.13")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_functions", {})
    monkeypatch.setattr(build, "_cache", None)
    monkeypatch.setenv("TKQ_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("change", (
    dict(),
    dict(torch="2.13.0+cpu", torch_cuda=None, driver=None, gpu=None),
    dict(torch="2.13.0+cpu", torch_cuda=None, driver=None, gpu=None, cudart=None),
    dict(dsl="4.8.0", tvm_ffi="0.1.11"),  # the lowest
    dict(torch="2.9.0+cu128", torch_cuda=(12, 8), driver=(12, 9), flavour="cu12"),
))
def test_nothing_is_wrong(change):
    assert diagnose(dataclasses.replace(GOOD, **change)) == []


# what differs from GOOD, words of what is said of it, is tkq broken then; docs/install.md explains each
WRONG = (
    (dict(python=(3, 9, 2)), ("3.9.2", "3.10"), True),
    (dict(torch=None, torch_cuda=None, gpu=None), ("pip install torch",), True),
    (dict(dsl=None, flavours=(), flavour=None), ("nvidia-cutlass-dsl is missing", "pip install"), True),
    (dict(dsl=None, flavours=(), flavour=None, cuda_python=None, bundle="tkq-kernels.so: 43 kernels"),
     ("that the bundle lacks",), False),
    (dict(dsl="4.9.0"), ("4.9.0", "4.8.0", "pip install"), True),
    (dict(dsl="4.7.9"), ("4.7.9", "4.8.0"), True),
    (dict(flavours=(), flavour=None), ("libraries are missing", "[cu13]"), True),
    (dict(tvm_ffi=None), ("apache-tvm-ffi", "pip install"), True),
    (dict(flavours=("cu12",), flavour="cu12"), ("CUDA 13", "cu12", "[cu13]"), True),
    (dict(torch_cuda=(12, 8)), ("CUDA 12", "cu13", "uninstall nvidia-cutlass-dsl-libs-cu13"), True),
    (dict(torch_cuda=(12, 8), flavours=("cu13",)), ("those for CUDA 12 are missing", "'nvidia-cutlass-dsl>="), True),
    (dict(driver=(12, 4), flavour="cu12"), ("12.4", "13.0", "update the driver", "580"), True),
    (dict(driver=(12, 4), flavours=("cu13",), flavour=None), ("12.4", "cu13", "update the driver"), True),
    (dict(gpu=("NVIDIA A100", (8, 0))), ("A100", "8.0", "older", "9.0"), True),
    (dict(gpu=("NVIDIA B200", (10, 0))), ("B200", "10.0", "newer"), True),
    (dict(torch="2.8.0+cu130"), ("2.8.0", "2.9", "pip install 'torch>="), True),
    (dict(tvm_ffi="0.1.10"), ("0.1.10", "0.1.11", "pip install 'apache-tvm-ffi>=0.1.11,<0.2'"), True),
    (dict(tvm_ffi="0.2.0"), ("0.2.0", "not including, 0.2"), True),
    (dict(cuda_python=None), ("cuda-python is missing", "pip install"), True),
    (dict(cuda_python="12.2.0"), ("cuda-python is 12.2.0", "12.8", "pip install"), True),
    (dict(cudart=None), ("libcudart.so.13", "PyTorch for CUDA 13", "pip install nvidia-cuda-runtime."), True),
    (dict(cudart=None, torch="2.9.0+cu128", torch_cuda=(12, 8), flavour="cu12"),
     ("libcudart.so.12", "pip install nvidia-cuda-runtime-cu12"), True),
    (dict(gpu=None), ("sees no device", "nvidia-smi", "CUDA_VISIBLE_DEVICES", "--gpus all"), False),
    (dict(driver=None, gpu=None), ("no NVIDIA driver",), False),
    (dict(torch_cuda=None, gpu=None), ("built without CUDA",), False),
    (dict(linker="no C compiler"), ("no C compiler", "0.5 s"), False),
    (dict(nvdisasm=None), ("pip install nvidia-cuda-nvdisasm",), False),
)


@pytest.mark.parametrize("change, words, broken", WRONG)
def test_what_is_wrong_is_said(change, words, broken):
    findings = diagnose(dataclasses.replace(GOOD, **change))
    matching = [f for f in findings if all(word in f.text for word in words)]
    assert matching, findings
    assert matching[0].broken is broken
    assert any(f.broken for f in findings) is broken


def test_doctor_here(capsys, monkeypatch, tmp_path):
    status = command.main(["doctor"])
    out = capsys.readouterr().out
    for label in ("python", "torch", "DSL", "tvm-ffi", "driver", "GPU", "cache", "C compiler", "nvdisasm", "sm_90a"):
        assert label in out
    assert str(tmp_path / "cache") in out
    assert status == int("PROBLEM" in out)
    monkeypatch.setattr(doctor, "examine", lambda: dataclasses.replace(GOOD, tvm_ffi=None))
    assert command.main(["doctor"]) == 1
    assert "Something is broken" in capsys.readouterr().out


def test_doctor_without_a_gpu_is_no_failure(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: dataclasses.replace(
        GOOD, torch="2.13.0+cpu", torch_cuda=None, driver=None, gpu=None))
    assert command.main(["doctor"]) == 0
    assert "not run" in capsys.readouterr().out


def test_doctor_names_a_cache_that_cannot_be_used(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "examine", lambda: GOOD)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert command.main(["doctor"]) == 1
    assert "TKQ_CACHE_DIR" in capsys.readouterr().out


def test_doctor_names_a_folder_that_is_passed_over(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "examine", lambda: GOOD)
    monkeypatch.setenv("TKQ_CACHE_DIR", f"{tmp_path / 'fleet'}:{tmp_path / 'cache'}")
    (tmp_path / "fleet").mkdir(mode=0o700)
    assert command.main(["doctor"]) == 0 and "passed over" not in capsys.readouterr().out
    (tmp_path / "fleet").chmod(0o777)
    assert command.main(["doctor"]) == 0
    assert "note: A folder of TKQ_CACHE_DIR is passed over: the folder" in capsys.readouterr().out


SCALE = Recipe("tests.helpers.process.kernels_for_tests:build_gpu_scale", ())


def test_doctor_survives_a_cache_that_cannot_be_read(capsys, monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "examine", lambda: GOOD)
    monkeypatch.setattr(Cache, "_entries", refused)
    assert doctor.main() == 0  # what is compiled can be stored all the same: the folder was made just now
    assert "cannot be read (Permission denied)" in capsys.readouterr().out


@pytest.fixture
def two_kernels(monkeypatch):
    """A catalog of two small kernels, the second of which is not as expected."""
    from tests.helpers.process.kernels_for_tests import Scale

    recipe = dataclasses.replace(SCALE, args=(Scale(),))
    kernels = [Shipped("scale_good", recipe, Expectation(instructions=("LDG.E.128",)), quick=True),
               Shipped("scale_bad", dataclasses.replace(recipe, args=(Scale(factor=3.0),)), Expectation(tensor=1))]
    monkeypatch.setattr(catalog, "shipped", lambda: kernels)


def test_compile_says_that_the_cache_cannot_be_used(capsys, two_kernels, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert command.main(["compile", "scale_good"]) == 2
    assert "the cache cannot be used: the folder" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="written by everybody"):
        assert command.main(["compile", "scale_good", "--report"]) == 0
    assert "cannot be used: the folder" in capsys.readouterr().out
    assert command.main(["compile", "scale_good", "--output", str(tmp_path / "cache")]) == 2
    assert "--output: the folder" in capsys.readouterr().err and not list((tmp_path / "cache").iterdir())


def test_an_empty_name_is_no_name(capsys, two_kernels):
    assert command.main(["compile", ""]) == 2 and "a NAME is empty" in capsys.readouterr().err


def test_output_that_nobody_reads_on():
    """A pipe that closes early, as head's does."""
    listed = subprocess.Popen([sys.executable, "-m", "tkq", "compile", "--list"], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
    listed.stdout.readline()
    listed.stdout.close()
    assert listed.stderr.read() == b"" and listed.wait() in (0, 1)


def test_a_bundle_that_cannot_be_used_is_a_finding(monkeypatch, tmp_path):
    monkeypatch.setenv("TKQ_BUNDLE", str(tmp_path / "none"))
    facts = doctor.examine()
    bundle.current.cache_clear()
    assert facts.bundle is None and "cannot be used (No such file" in facts.bundle_problem
    assert any(finding.broken and "The bundle" in finding.text for finding in doctor.diagnose(facts))


def test_compile_fills_the_cache(capsys, two_kernels):
    assert command.main(["compile", "good"]) == 0
    assert "[1/1] scale_good: compiled" in capsys.readouterr().out
    assert command.main(["compile", "--all"]) == 0
    out = capsys.readouterr().out
    assert "scale_good: in the cache" in out and "scale_bad: compiled" in out and "2 kernels, 1 of them" in out


def test_compile_reports_and_judges(capsys, two_kernels):
    assert command.main(["compile", "good", "--report"]) == 0
    assert "LDG.128 1" in capsys.readouterr().out
    assert command.main(["compile", "--all", "--report"]) == 1
    assert "WRONG: 0 tensor-core instructions" in capsys.readouterr().out


def test_compile_in_processes(capsys, two_kernels, tmp_path):
    """One of which compiles, while the other finds what this one has compiled."""
    assert command.main(["compile", "good"]) == 0 == command.main(["compile", "--all", "--jobs", "2"])
    out = capsys.readouterr().out
    assert "scale_good: in the cache" in out and "scale_bad: compiled" in out and "2 kernels, 1 of them" in out
    assert len(list((tmp_path / "cache").glob("kernels_for_tests-*.*o"))) == 2


def test_a_kernel_that_fails_does_not_stop_the_others(capsys, monkeypatch, two_kernels):
    kernels = [Shipped("none", Recipe("tests.helpers.process.kernels_for_tests:build_nothing")), *catalog.shipped()]
    monkeypatch.setattr(catalog, "shipped", lambda: kernels)
    assert command.main(["compile", "--all"]) == 1
    out = capsys.readouterr().out
    assert "none: FAILED: TypeError" in out and "scale_bad: compiled" in out


def test_compile_lists_and_refuses(capsys, two_kernels, tmp_path):
    assert command.main(["compile", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["scale_good", "scale_bad"]
    assert not (tmp_path / "cache").exists()
    assert command.main(["compile", "no_such"]) == 2
    assert "no_such" in capsys.readouterr().err
    assert command.main(["compile", "--all", "--jobs", "0"]) == 2
    with pytest.raises(SystemExit):
        command.main(["no_such_command"])


def test_bench_needs_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "tkq" / "__main__.py"))
    assert command.main(["bench", "anything"]) == 2
    assert "source checkout" in capsys.readouterr().err
