"""Only files of our own are counted, changed or removed; a folder that is only read is never written."""
import os
import stat
import subprocess
import time

import pytest

from tests.helpers.process import forked
from tkq.runtime.compile import build, keys, link
from tkq.runtime.compile.cache import Cache, packed
from tkq.runtime.compile.recipe import Recipe
from tkq.runtime.system import locks
from tkq.warmup import precompile

DATA, NOTE = b"\x7fELF" + bytes(1000), {"symbol": "tkq_x", "kind": "static"}
# What others may have in the same folder: names like ours without an entry's end, an entry's end under another name.
FOREIGN = {"checkpoint.pt": bytes(5000), "libmine.so": b"\x7fELF" + bytes(3000), ".env": b"secret", "key.o": b"secret",
           f"model-{0:032x}.so": bytes(4000), "tkq-kernels.so": packed(bytes(3000), {"kind": "bundle"}),
           "saved": packed(bytes(3000), NOTE), "saved.so.bak": packed(bytes(3000), NOTE), ".new-abc": b"half",
           ".tkq-new-abc": b"half", ".lock-3": b"of another program"}


@pytest.fixture
def full(tmp_path):
    """A folder with such files, very old."""
    for name, data in FOREIGN.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "folder.so").mkdir()
    (tmp_path / "link.so").symlink_to(tmp_path / "saved")
    os.mkfifo(tmp_path / "fifo.so")
    return tmp_path


def unchanged(folder):
    assert {name: (folder / name).read_bytes() for name in FOREIGN} == FOREIGN
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in FOREIGN)
    assert (folder / "folder.so").is_dir() and (folder / "link.so").is_symlink() and (folder / "fifo.so").is_fifo()


def test_they_count_for_nothing_and_stay(full):
    store = Cache(full, most_bytes=2500, before=())
    for number in range(5):
        store.put(f"a-{number}.so", DATA, NOTE)
    assert [path.name for path in store.entries()] == ["a-3.so", "a-4.so"] and store.bytes() < 2500
    unchanged(full)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be had by root")
def test_entries_of_another_user_stay(tmp_path):
    store = Cache(tmp_path, most_bytes=1, before=())
    his = store.put("his-1.so", DATA, NOTE).path
    os.chown(his, forked.OTHER, forked.OTHER)
    store.put("mine-1.so", DATA, NOTE)
    assert his.exists() and [path.name for path in store.entries()] == ["mine-1.so"]


def test_entries_of_older_versions_go_too(tmp_path):
    old = tmp_path / "old-1.so"
    old.write_bytes(bytes(3000) + b"tkq-entry-1\n")
    Cache(tmp_path, most_bytes=2500, before=()).put("a-1.so", DATA, NOTE)
    assert not old.exists()


def test_sharing_a_folder_changes_no_mode_of_theirs(full):
    full.chmod(0o700)
    store = Cache(full, before=())
    entry = store.put("a-1.so", DATA, NOTE).path
    (full / "private-1.so").hardlink_to(full / "key.o")
    assert {"key.o", "checkpoint.pt", "private-1.so"} <= set(store.share())
    unchanged(full)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o644
    assert stat.S_IMODE(full.stat().st_mode) == 0o700  # what lies there would be open to all


def test_the_command_says_so(full, monkeypatch, capsys):
    monkeypatch.setattr(build, "_cache", Cache(full, before=()))
    precompile._share()
    assert "files that are not tkq's (.env, ...)" in capsys.readouterr().out
    unchanged(full)


@pytest.mark.parametrize("planted", ("link", "file", "fifo", "folder"))
def test_what_stands_in_the_place_of_a_lock(tmp_path, planted):
    victim = tmp_path / "victim"
    victim.write_text("of the user")
    store = Cache(tmp_path / "kernels", before=())
    store.make()
    for number in range(512):
        path = tmp_path / f"kernels/.tkq-lock-{number}"
        {"link": lambda path=path: path.symlink_to(victim), "file": lambda path=path: path.write_text("of the user"),
         "fifo": lambda path=path: os.mkfifo(path), "folder": path.mkdir}[planted]()

    def work():
        with store.lock("a"):
            return True

    if planted == "file":  # locked, and nothing is written into it
        assert forked.done(work, seconds=10)
        assert {path.read_text() for path in (tmp_path / "kernels").iterdir()} == {"of the user"}
    else:
        with pytest.raises(AssertionError, match="OSError|Untrusted|IsADirectory|ENXIO"):
            forked.done(work, seconds=10)
        with forked_warnings(store):
            pass
    assert victim.read_text() == "of the user"


class forked_warnings:
    """Where a lock cannot be had, what is compiled goes with the process, and a warning says so."""

    def __init__(self, store):
        self.store = store

    def __enter__(self):
        def work():
            build._cache = self.store
            with build.writable("a") as other:
                return other.folder != self.store.folder

        assert forked.done(lambda: forked.with_warnings(work))[0] is True

    def __exit__(self, *_):
        pass


def test_a_lock_is_written_over_not_cut(tmp_path):
    store = Cache(tmp_path, before=())
    with store.lock("a" * 100):
        pass
    path = next(tmp_path.iterdir())
    size = path.stat().st_size
    with store.lock("a" * 100):
        assert path.stat().st_size == size == locks._LINE
    assert path.read_text().strip() == f"tkq lock: {os.getpid()}, {'a' * 100}"


def test_temporary_names_cannot_be_foreseen(tmp_path, monkeypatch):
    names = []
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda src, dst, **by: names.append(src) or rename(src, dst, **by))
    for _ in range(3):
        Cache(tmp_path, before=()).put("a-1.so", DATA, NOTE)
    assert len(set(names)) == 3 and not any(str(os.getpid()) == name.rpartition("-")[2] for name in names)


# ---- an entry that is whole and does not load -----------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """(folders read, written; what was compiled): whatever is named "bad" does not load."""
    monkeypatch.setenv("TKQ_CACHE_DIR", f"{tmp_path / 'fleet'}:{tmp_path / 'own'}")
    monkeypatch.setattr(build, "_cache", None)
    monkeypatch.setattr(build, "_functions", {})
    monkeypatch.setattr(keys, "entry_name", lambda recipe, *_: "kernel-1")
    compiled = []
    monkeypatch.setattr(build, "_built", lambda *_: compiled.append(1) or (b"good", {"kind": "static", "symbol": "x"}))
    monkeypatch.setattr(link, "prepare", lambda kind: None)

    def load(path):
        with open(path, "rb") as file:
            if not file.read().startswith(b"good"):
                raise RuntimeError("cannot be loaded")
        return {"x": "a function"}

    monkeypatch.setattr(link, "load", load)
    return tmp_path / "fleet", tmp_path / "own", compiled


RECIPE = Recipe("tests.helpers.process.kernels_for_tests:build_scale", (1,))


def test_in_a_folder_that_is_read_it_stays_and_is_passed_over(kernels):
    fleet, own, compiled = kernels
    bad = Cache(fleet, before=()).put("kernel-1.so", b"bad", {"kind": "static", "symbol": "x"}).path
    before = bad.read_bytes(), bad.stat().st_mtime_ns, os.listdir(fleet)
    fleet.chmod(0o500)
    assert build.function(RECIPE) == "a function" and len(compiled) == 1
    assert (bad.read_bytes(), bad.stat().st_mtime_ns, os.listdir(fleet)) == before
    assert (own / "kernel-1.so").exists()
    build._functions.clear()
    assert build.function(RECIPE) == "a function" and len(compiled) == 1  # from the own folder


def test_in_the_own_folder_it_is_replaced(kernels):
    _, own, compiled = kernels
    Cache(own, before=()).put("kernel-1.so", b"bad", {"kind": "static", "symbol": "x"})
    assert build.function(RECIPE) == "a function" and len(compiled) == 1
    assert Cache(own, before=()).find("kernel-1.so").object() == b"good"


@pytest.mark.skipif(os.geteuid() != 0, reason="file systems are mounted by root")
def test_in_an_own_folder_that_cannot_be_written(kernels):
    _, own, compiled = kernels
    own.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(own)], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        Cache(own, before=()).put("kernel-1.so", b"bad", {"kind": "static", "symbol": "x"})
        subprocess.run(["mount", "-o", "remount,ro", str(own)], check=True)
        with pytest.warns(UserWarning, match="cannot be written.*Read-only") as said:
            assert build.function(RECIPE) == "a function" and len(compiled) == 1
        assert len(said) == 1 and (own / "kernel-1.so").exists()
    finally:
        subprocess.run(["umount", str(own)], check=True)


def test_an_abandoned_temporary_file_goes_and_a_link_of_its_name_stays(tmp_path):
    store = Cache(tmp_path / "kernels", before=())
    store.make()
    (tmp_path / "victim").write_text("of the user")
    old = tmp_path / f"kernels/.tkq-new-{1:016x}"
    old.write_bytes(b"half")
    aside = tmp_path / f"kernels/.tkq-new-{2:016x}"
    aside.symlink_to(tmp_path / "victim")
    for path in (old, tmp_path / "victim"):
        os.utime(path, (time.time() - 7200,) * 2)
    store.put("a-1.so", DATA, NOTE)
    assert not old.exists() and aside.is_symlink() and (tmp_path / "victim").exists()
