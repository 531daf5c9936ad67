"""The disk cache by itself: what is stored comes back whole or not at all, and there is an end to it."""
import os
import pathlib
import stat
import subprocess
import sys
import time

import pytest

from tkq.runtime.cache import Cache, default_folder, unpacked

DATA = b"\x7fELF" + bytes(range(256)) * 64
NOTE = {"symbol": "tkq_x", "dynamic_smem": {"k": 1024}}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "kernels")


def names(cache):
    return [path.name for path in cache.entries()]


def test_what_is_stored_comes_back(cache):
    assert cache.find("a.so") is None
    put = cache.put("a.so", DATA, NOTE)
    found = cache.find("a.so")
    assert found == put and found.note == NOTE
    assert unpacked(found.path.read_bytes()) == (DATA, NOTE)
    assert found.path.read_bytes().startswith(DATA)  # a loader takes the file as it is


def test_any_other_file_is_all_object():
    assert unpacked(DATA) == (DATA, {})


@pytest.mark.parametrize("damage", (
    lambda data: b"",
    lambda data: data[:1],
    lambda data: data[:len(data) // 2],
    lambda data: data[:-1],
    lambda data: data + b"\0",
    lambda data: bytes(len(data)),
    lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    lambda data: data.replace(b"1024", b"2048"),
    lambda data: data[:-60] + bytes([data[-60] ^ 0x80]) + data[-59:],
))
def test_a_damaged_entry_counts_as_missing_and_can_be_replaced(cache, damage):
    path = cache.put("a.so", DATA, NOTE).path
    whole = path.read_bytes()
    broken = damage(whole)
    assert broken != whole
    path.write_bytes(broken)
    assert cache.find("a.so") is None
    cache.put("a.so", DATA, NOTE)
    assert cache.find("a.so").path.read_bytes() == whole


def test_a_failed_write_leaves_nothing(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        cache.put("a.so", DATA, NOTE)
    assert list(cache.folder.iterdir()) == []


def test_the_longest_unused_go_first(tmp_path):
    one = Cache(tmp_path).put("0.so", DATA, NOTE).path.stat().st_size
    cache = Cache(tmp_path, most_bytes=3 * one)
    for number in (1, 2):
        cache.put(f"{number}.so", DATA, NOTE)
    for age, name in enumerate(("2.so", "1.so", "0.so"), 1):
        os.utime(tmp_path / name, (time.time() - 100 * age,) * 2)
    assert cache.find("0.so")  # used: no longer the oldest
    cache.put("3.so", DATA, NOTE)
    assert names(cache) == ["2.so", "0.so", "3.so"]
    assert cache.bytes() == 3 * one
    cache.put("4.so", DATA, NOTE)
    assert names(cache) == ["0.so", "3.so", "4.so"]


def test_what_was_just_written_stays(tmp_path):
    cache = Cache(tmp_path, most_bytes=10)
    for name in ("a.so", "b.so"):
        cache.put(name, DATA, NOTE)
        assert names(cache) == [name] and cache.find(name)


def test_temporary_files_of_the_dead_are_removed_and_no_others(cache):
    cache.make()
    for name, age in ((".new-old", 2 * 3600), (".new-now", 0)):
        (cache.folder / name).write_bytes(b"half")
        os.utime(cache.folder / name, (time.time() - age,) * 2)
    cache.put("a.so", DATA, NOTE)
    assert sorted(os.listdir(cache.folder)) == [".new-now", "a.so"]


def test_the_folder_is_the_users_alone(cache):
    cache.put("a.so", DATA, NOTE)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_folder_that_everybody_may_write_is_refused(cache):
    cache.put("a.so", DATA, NOTE)
    cache.folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="TKQ_CACHE_DIR"):
        cache.put("b.so", DATA, NOTE)
    with pytest.raises(RuntimeError, match="written by everybody"):
        cache.find("a.so")  # what lies there would be run


def test_one_process_holds_a_lock(cache):
    program = "\n".join((
        "import pathlib, sys, time",
        "from tkq.runtime.cache import Cache",
        "with Cache(pathlib.Path(sys.argv[1])).lock('a'):",
        "    print('have it', flush=True)",
        "    sys.stdin.read()",
    ))
    other = subprocess.Popen([sys.executable, "-c", program, str(cache.folder)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "have it\n"
    waiting = subprocess.Popen([sys.executable, "-c", program, str(cache.folder)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1.0)
    other.kill()  # a process that dies lets go
    other.wait()
    assert waiting.wait(20) == 0
    assert waiting.stdout.read() == "have it\n"


def test_locks_are_few(cache):
    for number in range(300):
        with cache.lock(f"kernel-{number}"):
            pass
    assert 32 < len(os.listdir(cache.folder)) <= 64
    assert cache.entries() == []


def test_where_the_folder_is(monkeypatch):
    for variable in ("TKQ_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert default_folder() == pathlib.Path.home() / ".cache" / "tkq"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == pathlib.Path("/somewhere/tkq")
    monkeypatch.setenv("TKQ_CACHE_DIR", "/elsewhere/kernels")
    assert default_folder() == pathlib.Path("/elsewhere/kernels")
    monkeypatch.setenv("TKQ_CACHE_DIR", "~/kernels")
    assert default_folder() == pathlib.Path.home() / "kernels"
