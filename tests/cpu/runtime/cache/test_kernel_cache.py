"""Compiled kernels in a file: what is packed on one machine serves on another."""
import io
import lzma
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

from tests.helpers.process import kernel_cache
from tkq.runtime import cache, configure
from tkq.runtime.compile import build

CHECKOUT = pathlib.Path(__file__).resolve().parents[4]
NOTE = {"symbol": "tkq_x"}


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A function that goes to another machine's cache."""
    monkeypatch.setattr(build, "_cache", None)
    go_to = lambda name: configure(tmp_path / name)
    go_to("one")
    return go_to


def fill(*names, size=1000):
    for age, name in enumerate(reversed(names)):
        path = cache().put(name, name.encode() * size, NOTE).path
        os.utime(path, (1_700_000_000 - age,) * 2)


def test_what_is_packed_comes_back_whole_and_as_old(machine, tmp_path):
    fill("a.so", "b.o", "c.so")
    before = {path.name: (path.read_bytes(), path.stat().st_mtime) for path in cache().entries()}
    assert kernel_cache.pack(tmp_path / "file", {}) == 3
    machine("two")
    assert kernel_cache.unpack(tmp_path / "file") == (3, {}, None)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime) for path in cache().entries()} == before
    assert cache().find("b.o").note == NOTE
    assert kernel_cache.unpack(tmp_path / "file") == (0, {}, None)


def test_the_entries_used_last_are_packed_up_to_a_size(machine, tmp_path):
    fill("a.so", "b.so", "c.so")
    one = cache().bytes() // 3
    assert kernel_cache.pack(tmp_path / "file", {}, 2 * one) == 2
    assert cache().find("a.so")  # used: now the newest
    assert kernel_cache.pack(tmp_path / "other", {}, 2 * one) == 2
    for file, names in (("file", {"b.so", "c.so"}), ("other", {"a.so", "c.so"})):
        machine(f"for {file}")
        kernel_cache.unpack(tmp_path / file)
        assert {path.name for path in cache().entries()} == names


def test_what_the_cache_has_stays(machine, tmp_path):
    fill("a.so", "b.so")
    kernel_cache.pack(tmp_path / "file", {})
    machine("two")
    mine = cache().put("a.so", b"mine", NOTE).path.read_bytes()
    assert kernel_cache.unpack(tmp_path / "file") == (1, {}, None)
    assert (cache().folder / "a.so").read_bytes() == mine


@pytest.mark.parametrize("keep", (0, 10, 100, -100))
def test_a_file_cut_short_gives_what_it_has(machine, tmp_path, keep):
    fill(*(f"{n}.so" for n in range(5)))
    kernel_cache.pack(tmp_path / "file", {})
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:keep])
    machine("two")
    count, _, damaged = kernel_cache.unpack(tmp_path / "file")
    assert damaged and count == len(cache().entries()) <= 5
    assert all(cache().find(path.name) for path in cache().entries())


@pytest.mark.parametrize("name", ("../a.so", "/a.so", "b/a.so", ".lock-1"))
def test_a_file_writes_nowhere_else(tmp_path, name):
    with lzma.open(tmp_path / "file", "wb") as out, tarfile.open(fileobj=out, mode="w|") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    count, _, damaged = kernel_cache.unpack(tmp_path / "file")
    assert count == 0 and "no entry" in damaged
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_the_command(tmp_path, capsys, machine):
    file = str(tmp_path / "file")
    assert kernel_cache.main(["unpack", file]) == 0 and "0 kernels unpacked" in capsys.readouterr().out
    fill("a.so")
    assert kernel_cache.main(["pack", file]) == 0 and "1 kernels packed" in capsys.readouterr().out
    machine("two")
    assert kernel_cache.main(["unpack", file]) == 0 and "1 kernels unpacked" in capsys.readouterr().out
    pathlib.Path(file).write_bytes(b"nothing")
    assert kernel_cache.main(["unpack", file]) == 1 and "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ((), ("-n", "2")))
def test_the_option_of_pytest_unpacks_before_the_tests_and_packs_behind_them(machine, tmp_path, workers):
    fill("a.so")
    kernel_cache.pack(tmp_path / "file", {})

    def run(test):
        command = [sys.executable, "-m", "pytest", "-q", *workers, "--kernel-cache", str(tmp_path / "file"), test]
        return subprocess.run(command, cwd=CHECKOUT, text=True, capture_output=True, check=True,
                              env={**os.environ, "TKQ_CACHE_DIR": str(tmp_path / "two")}).stdout

    machine("two")
    fill("b.so")
    out = run("tests/cpu/runtime/cache/test_kernel_cache.py::test_the_command")
    assert "file: 1 kernels unpacked\n" in out and "file: 2 kernels packed\n" in out
    assert {path.name for path in cache().entries()} == {"a.so", "b.so"}
    machine("three")
    assert kernel_cache.unpack(tmp_path / "file") == (2, {}, None)


GPU_TEST = """
import pytest
from tests.helpers.process.kernels_for_tests import Scale
from tkq.runtime import Recipe, function

@pytest.mark.parametrize("factor", (2.0, 3.0, 2.0))
def test_scale(factor):
    assert function(Recipe("tests.helpers.process.kernels_for_tests:build_scale", (Scale(factor=factor),)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", (0, 2))
def test_what_gpu_tests_asked_for_is_compiled_ahead_of_the_next_run(machine, tmp_path, capsys, workers):
    kernel_cache.pack(tmp_path / "file", {"test_left_out_now.py": ["x"], "test_scale.py": ["y"]})
    (tmp_path / "test_scale.py").write_text(GPU_TEST)
    # conftest's plugin, for which these tests count as the GPU's
    (tmp_path / "conftest.py").write_text(
        "import pathlib\nfrom tests.helpers.process.kernel_cache import Carried\n"
        "def pytest_configure(config):\n"
        f"    config.pluginmanager.register(Carried(pathlib.Path({str(tmp_path / 'file')!r}),"
        " hasattr(config, 'workerinput'), lambda item: True))\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {**os.environ, "TKQ_CACHE_DIR": str(tmp_path / "one"), "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kernels packed" in done.stdout and "2 kernels  test_scale.py" in done.stdout
    machine("two")
    _, asked, _ = kernel_cache.unpack(tmp_path / "file")
    cache().entries()[0].unlink()  # as if its sources were others now
    assert asked.pop("test_left_out_now.py") == ["x"] and len(asked["test_scale.py"]) == 2
    asked["another.py"] = ["gASVAAAA"]  # no recipe
    compiled, failed = kernel_cache.refresh(asked)
    assert compiled == 1 and len(failed) == 1 and len(cache().entries()) == 2
    kernel_cache.pack(tmp_path / "file", {"test_scale.py": asked["test_scale.py"]})
    machine("three")
    assert kernel_cache.main(["refresh", str(tmp_path / "file")]) == 0
    out = capsys.readouterr().out
    assert "2 kernels unpacked" in out and "0 kernels compiled; 0 are no longer" in out and "2 kernels packed" in out
    assert kernel_cache.unpack(tmp_path / "file").asked == {"test_scale.py": asked["test_scale.py"]}
