"""A byte that was flipped, anywhere in a file, makes it one that is built again: never an error, never wrong code."""
import json
import os

import pytest

from tests.helpers.process import forked
from tkq.runtime.compile import build, bundle, keys
from tkq.runtime.compile.cache import _MAGIC, _TAIL, Cache, packed, read_entry, unpacked
from tkq.runtime.compile.recipe import Recipe

DATA, NOTE = b"\x7fELF" + bytes(range(60)), {"symbol": "tkq_x", "kind": "static", "dynamic_smem": {"k": 1024}}
WHOLE = packed(DATA, NOTE)


@pytest.mark.parametrize("bit", (0, 3, 7))
def test_a_bit_of_each_byte(tmp_path, bit):
    store = Cache(tmp_path, before=())
    path = store.put("a-1.so", DATA, NOTE).path
    for at in range(len(WHOLE)):
        path.write_bytes(WHOLE[:at] + bytes([WHOLE[at] ^ 1 << bit]) + WHOLE[at + 1:])
        assert store.find("a-1.so") is None, f"byte {at} of {len(WHOLE)}"
    path.write_bytes(WHOLE)
    assert store.find("a-1.so").note == NOTE


def test_each_length(tmp_path):
    store = Cache(tmp_path, before=())
    path = store.put("a-1.so", DATA, NOTE).path
    for end in range(len(WHOLE)):
        path.write_bytes(WHOLE[:end])
        assert store.find("a-1.so") is None
        path.write_bytes(WHOLE[end:] if end else b"")
        assert store.find("a-1.so") is None


def test_a_file_larger_than_the_memory(tmp_path):
    """A terabyte without a byte on the disk, with a name of an entry's or a bundle's: nothing of it is read."""
    store = Cache(tmp_path, before=())
    path = store.put("a-1.so", DATA, NOTE).path
    os.truncate(path, 1 << 40)
    assert store.find("a-1.so") is None and read_entry(path) is None


def test_other_lengths_of_the_note(tmp_path):
    store = Cache(tmp_path, before=())
    path = store.put("a-1.so", DATA, NOTE).path
    for at in range(len(WHOLE) - _TAIL, len(WHOLE) - _TAIL + 8):
        for value in {*range(0, 256, 15), 1, 127, 128} - {WHOLE[at]}:
            path.write_bytes(WHOLE[:at] + bytes([value]) + WHOLE[at + 1:])
            assert store.find("a-1.so") is None


def test_what_is_packed_is_unpacked():
    assert unpacked(WHOLE) == (DATA, NOTE) and WHOLE.endswith(_MAGIC) and WHOLE.startswith(DATA)
    assert json.loads(WHOLE[len(DATA):-_TAIL]) == NOTE


def test_a_kernel_with_a_flipped_bit_is_built_again(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(build, "_cache", Cache(tmp_path, before=()))
    monkeypatch.setattr(build, "_built", lambda *_: compiled.append(1) or (DATA, NOTE))
    monkeypatch.setattr(keys, "entry_name", lambda recipe, *_: "kernel-1")
    recipe = Recipe("a:b")
    assert build.ensure(recipe) is True and build.ensure(recipe) is False
    path = tmp_path / "kernel-1.so"
    for at in range(len(WHOLE) - _TAIL, len(WHOLE)):
        path.write_bytes(WHOLE[:at] + bytes([WHOLE[at] ^ 16]) + WHOLE[at + 1:])
        assert build.ensure(recipe) is True and path.read_bytes() == WHOLE


def test_a_bundle_with_a_flipped_bit_is_named(tmp_path, monkeypatch):
    note = {"kind": "bundle", "arch": keys.TARGET, "machine": keys.machine(), "cuda": "13", "kernels": {}, "native": {}}
    whole, path = packed(DATA, note), tmp_path / bundle.NAME
    monkeypatch.setenv("TKQ_BUNDLE", str(path))

    def found():
        bundle.current.cache_clear()
        held, said = forked.with_warnings(bundle.current)
        return held is not None, len(said)

    path.write_bytes(whole)
    assert found() == (True, 0)
    for at in range(len(whole) - _TAIL, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1:])
        assert found() == (False, 1)
    for changed in ({"kernels": 3}, {"cuda": 13}, {"native": None}, {"arch": None}):
        path.write_bytes(packed(DATA, {**note, **changed}))
        assert found() == (False, 1)
    bundle.current.cache_clear()


def test_killed_in_the_middle_of_writing(tmp_path):
    """The file has its name when it is whole, or never: a process is killed at each of its writes and at the rename."""
    for step in range(6):
        def work(step=step):
            count = iter(range(100))

            def counted(real):
                def wrapper(*given, **named):
                    if next(count) == step:
                        os.kill(os.getpid(), 9)
                    return real(*given, **named)
                return wrapper

            for name in ("open", "write", "fchmod", "close", "replace"):
                setattr(os, name, counted(getattr(os, name)))
            Cache(tmp_path, before=()).put("a-1.so", DATA, NOTE)

        process, reading = forked.start(work)
        os.close(reading)
        os.waitpid(process, 0)
        found = Cache(tmp_path, before=()).find("a-1.so")
        assert found is None or found.note == NOTE
        assert (tmp_path / "a-1.so").exists() == (found is not None)
    Cache(tmp_path, before=()).put("a-1.so", DATA, NOTE)
    assert Cache(tmp_path, before=()).find("a-1.so").note == NOTE
