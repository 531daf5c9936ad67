"""A bundle as a wheel: what pip reads of it, and that tkq finds what it installed."""
import base64
import csv
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import types
import zipfile

import pytest

from tests.helpers.process import fresh
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe
from tkq.runtime.compile import build, bundle, keys, link
from tkq.runtime.compile.cache import Cache
from tkq.version import __version__
from tkq.warmup import precompile, wheel

CHECKOUT = pathlib.Path(__file__).resolve().parents[4]
KERNEL = types.SimpleNamespace(name="scale", recipe=Recipe("tests.helpers.process.kernels_for_tests:build_scale",
                                                           (Scale(factor=2.0),)))


def of_library(tmp_path, data=b"\0GLIBC_2.2.5\0GLIBC_2.14\0", cuda="13"):
    (tmp_path / bundle.NAME).write_bytes(data)
    return wheel.write(tmp_path / "dist", tmp_path / bundle.NAME, cuda)


def test_what_pip_reads(tmp_path):
    path = of_library(tmp_path)
    assert path.name == f"tkq_kernels_cu13-{__version__}-py3-none-manylinux_2_17_{keys.machine()}.whl"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o100644}  # others cannot write it
    info = f"tkq_kernels_cu13-{__version__}.dist-info"
    rows = list(csv.reader(io.StringIO(files[f"{info}/RECORD"].decode())))
    assert [name for name, _, _ in rows] == list(files) and rows[-1][1:] == ["", ""]
    for name, digest, size in rows[:-1]:
        found = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={found}", len(files[name])), name
    assert f"Requires-Dist: tkq=={__version__}\n" in files[f"{info}/METADATA"].decode()
    assert files[f"{info}/WHEEL"].decode().endswith(f"Tag: py3-none-manylinux_2_17_{keys.machine()}\n")


def test_the_same_bytes_again(tmp_path):
    first = of_library(tmp_path).read_bytes()
    assert of_library(tmp_path).read_bytes() == first


def test_a_library_that_needs_a_newer_glibc(tmp_path):
    assert "manylinux_2_34_" in of_library(tmp_path, b"\0GLIBC_2.17\0\0GLIBC_2.34\0GLIBC_PRIVATE\0", "12").name


def test_one_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "MOST", 1000)
    with pytest.raises(ValueError, match=r"the wheel has 0.0 MB, allowed are 0: choose fewer kernels, by --ops"):
        of_library(tmp_path, os.urandom(2000))
    assert not (tmp_path / "dist").exists()


PROCESS = """
import json, sys, warnings
warnings.simplefilter("error")
from tkq.runtime.compile import bundle
held = bundle.current()
print(json.dumps([str(held.path), len(held.note["kernels"]), held.library is not None, "cutlass" in sys.modules]))
"""


@pytest.mark.skipif(link.why_not() is not None or link.runtime_kind() != "static",
                    reason="no C compiler, or no static runtime of the DSL")
def test_what_is_installed_is_found(tmp_path, monkeypatch, capsys):
    """A bundle that is named comes first."""
    monkeypatch.setattr(build, "_cache", Cache(tmp_path / "cache"))
    assert precompile.into_bundle([KERNEL], 1, wheels=tmp_path / "dist") == 0
    (path,) = (tmp_path / "dist").iterdir()
    assert f"{path}: 1 kernels, {path.stat().st_size / 1e6:.2f} MB; pip installs it" in capsys.readouterr().out
    place = tmp_path / "site"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(place)
    package = f"tkq_kernels_{keys.flavour()}"
    env = {**os.environ, "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{place}", "TKQ_CACHE_DIR": str(tmp_path / "none")}
    env.pop("TKQ_BUNDLE", None)
    done = fresh.run(PROCESS, env=env)
    assert json.loads(done.stdout) == [str(place / package / bundle.NAME), 1, True, False], done.stderr
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("TKQ_BUNDLE", str(tmp_path / "named"))
    bundle.current.cache_clear()
    with pytest.warns(UserWarning, match="named"):
        assert bundle.current() is None
    bundle.current.cache_clear()


def test_without_a_compiler_nothing_is_compiled_for_a_bundle(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(link, "compiler", lambda: None)
    assert precompile.into_bundle([KERNEL], 1, tmp_path / "bundle") == 2 and not (tmp_path / "bundle").exists()
    said = capsys.readouterr()
    assert "a bundle cannot be linked: no C compiler" in said.err and not said.out


def test_of_two_the_one_for_the_cuda_that_is_here(tmp_path, monkeypatch):
    for cuda in ("12", "13"):
        (tmp_path / f"tkq_kernels_cu{cuda}").mkdir()
        (tmp_path / f"tkq_kernels_cu{cuda}" / "__init__.py").touch()
        (tmp_path / f"tkq_kernels_cu{cuda}" / bundle.NAME).touch()
    monkeypatch.syspath_prepend(tmp_path)
    for flavour, torchs, want in (("cu12", None, "12"), ("cu13", "12.6", "13"), (None, "12.6", "12"),
                                  (None, None, "13")):
        monkeypatch.setattr(keys, "flavour", lambda flavour=flavour: flavour)
        monkeypatch.setattr("torch.version.cuda", torchs)
        assert bundle._installed() == tmp_path / f"tkq_kernels_cu{want}"
    (tmp_path / "tkq_kernels_cu13" / bundle.NAME).unlink()  # an empty folder of the name hides no other
    assert bundle._installed() == tmp_path / "tkq_kernels_cu12"


@pytest.mark.slow  # two minutes: PyTorch is installed anew
def test_the_wheels_in_an_environment_of_their_own(tmp_path):
    """pip install of what `make wheel` and `--wheel` make, by constraints.txt, then the demo."""
    def run(*words, **options):
        done = subprocess.run(words, text=True, capture_output=True, timeout=900, **options)
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    dist, python = tmp_path / "dist", str(tmp_path / "venv" / "bin" / "python")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), str(CHECKOUT))
    run(sys.executable, "-m", "tkq", "compile", "softmax-bf16-n4096-v8", "--wheel", str(dist), cwd=CHECKOUT)
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    (own,) = dist.glob("tkq-*.whl")
    (kernels,) = dist.glob("tkq_kernels*.whl")
    constraints = str(CHECKOUT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{own}[cu13]", str(kernels))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TKQ_BUNDLE")}
    assert str(tmp_path / "venv") in run(python, "-m", "tkq", "doctor", cwd=tmp_path, env=env)
    assert "kernel" in run(python, "-m", "tkq", "demo", cwd=tmp_path, env=env)
