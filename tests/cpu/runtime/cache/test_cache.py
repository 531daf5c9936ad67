"""The disk cache by itself: what is stored comes back whole or not at all, and there is an end to it."""
import contextlib
import logging
import os
import pathlib
import stat
import subprocess
import sys
import threading
import time

import pytest

from tkq.runtime.compile.cache import Cache, default_folder, folders, private_folder, unpacked
from tkq.runtime.system import locks

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
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="cannot be written.*No space left"), pytest.raises(OSError, match="No space"):
        cache.put("a.so", DATA, NOTE)  # neither there nor in the folder that goes with the process
    assert list(cache.folder.iterdir()) == list(private_folder().glob(".tkq-new-*")) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KB, read by a function that makes it one that cannot be written."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_full_disk(small_disk):
    cache = Cache(small_disk / "kernels")
    first = cache.put("a.so", DATA, NOTE)
    with pytest.warns(UserWarning, match="No space left on device.*lost with this process"):
        big = cache.put("b.so", DATA * 8, NOTE)
    assert big.path.parent == private_folder() and unpacked(big.path.read_bytes()) == (DATA * 8, NOTE)
    assert names(cache) == ["a.so"] and cache.find("a.so") == first
    with contextlib.suppress(OSError), open(small_disk / "rest", "wb", buffering=0) as rest:
        while rest.write(bytes(1024)):
            pass
    for number in range(20):  # the holder of a lock may not be able to say so
        with cache.lock(f"kernel-{number}"):
            pass


def test_a_folder_that_may_not_be_written(small_disk):
    cache = Cache(small_disk / "kernels")
    cache.put("a.so", DATA, NOTE)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert cache.find("a.so").note == NOTE
    with pytest.raises(OSError, match="Read-only"), cache.lock("b"):
        pass
    with pytest.warns(UserWarning, match="Read-only.*lost with this process"):
        assert cache.put("b.so", DATA, NOTE).path.parent == private_folder()


def test_folders_that_are_only_read_come_first(tmp_path, monkeypatch):
    one, two, own = (tmp_path / name for name in ("one", "two", "own"))
    monkeypatch.setenv("TKQ_CACHE_DIR", os.pathsep.join(map(str, (one, two, own))))
    assert default_folder() == own
    Cache(one).put("a.so", DATA, {"of": "one"})
    for folder in (two, own):
        for name in ("a.so", "b.so"):
            Cache(folder).put(name, DATA, {"of": folder.name})
    Cache(own).put("c.so", DATA, {"of": "own"})
    for path in (*one.iterdir(), *two.iterdir()):
        os.utime(path, (1, 1))
    cache = Cache(own)
    assert [cache.find(name).note["of"] for name in ("a.so", "b.so", "c.so")] == ["one", "two", "own"]
    assert cache.find("d.so") is None
    cache.put("d.so", DATA, NOTE)
    assert cache.find("d.so").path == own / "d.so"
    assert all(path.stat().st_mtime == 1 for path in (*one.iterdir(), *two.iterdir()))  # nor marked as used
    (one / "a.so").write_bytes(b"damaged")
    assert cache.find("a.so").note["of"] == "two"
    assert Cache(tmp_path / "elsewhere").before == ()  # chosen by hand: the list is not for it
    one.chmod(0o777)
    with pytest.warns(UserWarning, match="written by everybody"):
        assert cache.find("a.so").note["of"] == "two"


def test_the_list_may_end_with_the_users_own(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("TKQ_CACHE_DIR", "/fleet/kernels:")
    assert folders() == (pathlib.Path("/fleet/kernels"), pathlib.Path("/somewhere/tkq"))
    assert Cache(default_folder()).before == (pathlib.Path("/fleet/kernels"),)


def test_a_folder_to_be_shared_can_be_read_by_all(cache):
    cache.put("a.so", DATA, NOTE)
    cache.share()
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((cache.folder / "a.so").stat().st_mode) == 0o644


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
    old, now = f".tkq-new-{0:016x}", f".tkq-new-{1:016x}"
    for name, age in ((old, 2 * 3600), (now, 0), (".new-mine", 2 * 3600), (".tkq-new-mine", 2 * 3600)):
        (cache.folder / name).write_bytes(b"half")
        os.utime(cache.folder / name, (time.time() - age,) * 2)
    cache.put("a.so", DATA, NOTE)
    assert sorted(os.listdir(cache.folder)) == [".new-mine", now, ".tkq-new-mine", "a.so"]


def test_the_folder_is_the_users_alone(cache):
    cache.put("a.so", DATA, NOTE)
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700


def test_a_folder_that_everybody_may_write_is_refused(cache):
    cache.put("a.so", DATA, NOTE)
    cache.folder.chmod(0o777)
    with pytest.warns(UserWarning, match="written by everybody.*TKQ_CACHE_DIR") as said:
        assert cache.find("a.so") is None  # what lies there would be run
        assert cache.put("b.so", DATA, NOTE).path.parent == private_folder()
    assert len(said) == 1 and not (cache.folder / "b.so").exists()
    with pytest.raises(PermissionError, match="written by everybody"), cache.lock("b"):
        pass


def test_one_process_holds_a_lock(cache):
    program = "\n".join((
        "import pathlib, sys, time",
        "from tkq.runtime.compile.cache import Cache",
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


def test_a_long_wait_is_logged(cache, monkeypatch, caplog):
    held, through = threading.Event(), threading.Event()

    def hold():
        with cache.lock("norm-1"):
            held.set()
            through.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    threading.Timer(0.4, through.set).start()
    with caplog.at_level(logging.WARNING, "tkq"), cache.lock("norm-1"):
        assert len(caplog.records) == 1
    assert f"another process, which compiles (process and kernel: {os.getpid()}, norm-1)" in caplog.text
    with cache.lock("norm-1"):  # none to wait for
        time.sleep(0.1)
    assert len(caplog.records) == 1
    holder.join()


def test_waiting_for_ones_own_lock_is_an_error(cache):
    of_file = {}
    for name in (f"norm-{number}" for number in range(200)):
        with cache.lock(name):
            file = next(path for path in cache.folder.iterdir() if path.read_text().strip().endswith(f", {name}"))
        of_file.setdefault(file, []).append(name)
    one, other = next(names for names in of_file.values() if len(names) > 1)[:2]
    with cache.lock(one):
        with cache.lock(other):  # another kernel, whose lock is the same file
            pass
        with pytest.raises(RuntimeError, match=f"{one}: asked for while it is being compiled"), cache.lock(one):
            pass
    with cache.lock(one):
        pass


def test_locks_are_few(cache):
    for number in range(300):
        with cache.lock(f"kernel-{number}"):
            pass
    assert 128 < len(os.listdir(cache.folder)) <= 512
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


NO_HOME = """
import pathlib, warnings
from tkq.runtime.compile import build
from tkq.runtime.compile.cache import folders, private_folder
def home():
    raise RuntimeError("Could not determine home directory.")  # what it says without $HOME and a name for the user
pathlib.Path.home = home
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    store = build.cache()
    with build.writable("a") as locked:
        entry = locked.put("a.so", b"123", {})
    assert folders() == (private_folder(),) == (store.folder,) and store.before == ()
assert entry.path.parent == store.folder and build._found(store, "a").path == entry.path
assert ["no folder for a cache" in str(w.message) for w in said] == [True]
"""


def test_a_user_without_a_home_has_a_cache_that_goes_with_the_process():
    nowhere = {name: value for name, value in os.environ.items() if name not in ("TKQ_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", NO_HOME], env=nowhere, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
