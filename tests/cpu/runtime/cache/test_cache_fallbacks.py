"""What may be wrong with a machine, one thing after the other: kernels are compiled and run all the same, and one
warning says what it costs. Each in a fork of this process, with a kernel that runs on the CPU."""
import contextlib
import os
import pathlib
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time

import pytest
import torch

from tests.helpers.process import forked
from tests.helpers.process.kernels_for_tests import Scale
from tkq.cli import doctor
from tkq.runtime import configure, function
from tkq.runtime.call import dispatch, replay
from tkq.runtime.compile import build, bundle, link, native
from tkq.runtime.compile.cache import Cache, folders, packed, private_folder, unpacked
from tkq.runtime.compile.recipe import Recipe
from tkq.runtime.system import scratch
from tkq.warmup import precompile

RECIPE = Recipe("tests.helpers.process.kernels_for_tests:build_scale", (Scale(factor=3.0),))
needs_compiler = pytest.mark.skipif(link.why_not() is not None, reason="no C compiler, or no runtime of the DSL")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """What a test here asks for the cache finds the folders of that test, and none of them is left to others."""
    monkeypatch.setattr(build, "_cache", None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TKQ_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("TKQ_BUNDLE", raising=False)
    return tmp_path / "kernels"


def run(prepare=lambda: None, natives=True, seconds=100):
    """(the words of warnings, names in the cache): of a process that takes the functions in C, and a kernel twice."""
    def work():
        build._cache = None
        build._functions.clear()
        sys.modules["tkq.runtime.compile.cache"]._said.clear()  # of tests before this one, which the fork has too
        prepare()
        found, said = forked.with_warnings(taken)
        assert found == [0, 3, 6, 9, 12]
        return [text for text in said if "tkq" in text]

    def taken():
        if natives:
            for kind in (dispatch._in_c.__wrapped__, replay._library.__wrapped__):
                kind()
        for _ in range(2):
            x, y = torch.arange(5.0), torch.full((5,), float("nan"))
            function(RECIPE)(x, y)
            build._functions.clear()
        return y.tolist()

    return forked.done(work, seconds=seconds)


def test_nothing_is_said_where_nothing_is_wrong(folder):
    assert run() == []
    assert len(list(folder.glob("kernels_for_tests-*"))) == 1


# ---- the C compiler -------------------------------------------------------------------------------------------------


@pytest.fixture
def cc(tmp_path, monkeypatch):
    """A function that puts a program in the C compiler's place."""
    (tmp_path / "bin").mkdir()
    for name in ("cc", "gcc", "clang"):
        (tmp_path / "bin" / name).write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def put(text):
        (tmp_path / "bin/cc").write_text(text)
        (tmp_path / "bin/cc").chmod(0o755)
        link._on_path.cache_clear()

    yield put
    link._on_path.cache_clear()


GARBAGE = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf '%s' "$CONTENT" > "$2"
"""
FOREIGN = "\\177ELF\\2\\1\\1" + "\\0" * 9 + "\\3\\0\\363\\0" + "\\0" * 100  # of another machine


@needs_compiler
@pytest.mark.parametrize("program, words", (
    ("#!/bin/sh\necho no licence >&2\nexit 3\n", "no licence"),
    ("#!/bin/sh\nkill -9 $$\n", "status -9"),
    ("#!/nowhere/sh\n", "No such file"),
    ("no program", "Exec format error"),
    (GARBAGE, "no shared object for this machine"),
    (GARBAGE.replace('%s\' "$CONTENT"', FOREIGN + "'"), "no shared object for this machine"),
    ("#!/bin/sh\nexit 0\n", "No such file"),
), ids=("fails", "killed", "no interpreter", "no program", "garbage", "another machine", "writes nothing"))
def test_a_compiler_of_no_use(folder, cc, program, words):
    cc(program)
    said = run()
    assert len(said) == 1 and words in said[0] and "C compiler" in said[0]
    assert [path.suffix for path in folder.glob("kernels_for_tests-*")] == [".o"] and not list(folder.glob("again*"))


@needs_compiler
def test_a_compiler_that_does_not_end(folder, cc, tmp_path, monkeypatch):
    cc(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/process\nwait\n")
    monkeypatch.setattr(scratch, "LONGEST", 0.5)
    began = time.monotonic()
    said = run(natives=True)
    assert len(said) == 1 and "did not end in" in said[0] and time.monotonic() - began < 60
    stat_of = pathlib.Path(f"/proc/{(tmp_path / 'process').read_text().strip()}/stat")
    assert not stat_of.exists() or ") Z" in stat_of.read_text()  # what it started was ended too


@needs_compiler
def test_a_compiler_whose_children_keep_its_output_open(folder, cc):
    cc("#!/bin/sh\nsetsid sleep 20 &\nexit 1\n")
    began = time.monotonic()
    assert len(run()) == 1 and time.monotonic() - began < 15


# ---- file systems ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a file system of some options on a new folder, and returns that."""
    made = []

    def mount(name, options):
        place = tmp_path / name
        place.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", "-l", str(place)], check=True)


def temporary(place):
    """Of a process: its place for temporary files."""
    def prepare():
        tempfile.tempdir = str(place)
        os.environ["TMPDIR"] = str(place)

    return prepare


@needs_compiler
@pytest.mark.parametrize("also", ((), ("TMPDIR",)))
def test_a_cache_from_which_nothing_may_be_run(folder, mounted, monkeypatch, also):
    place = mounted("noexec", "noexec")
    monkeypatch.setenv("TKQ_CACHE_DIR", str(place / "kernels"))
    said = run(temporary(mounted("tmp", "noexec")) if also else lambda: None)
    assert len(said) == 1 and "cannot be loaded from there" in said[0]
    assert len(list((place / "kernels").glob("*.so"))) == 3  # stored all the same


@needs_compiler
def test_without_proc(folder, monkeypatch):
    """Descriptors have no paths there: copies in the process's own folder have."""
    monkeypatch.setattr(sys.modules["tkq.runtime.compile.cache"], "_path_of",
                        lambda file: contextlib.nullcontext(f"/nowhere/{file.number}"))
    said = run()
    assert len(said) == 1 and "copied by each process" in said[0]


@needs_compiler
def test_no_room_for_temporary_files_but_in_the_cache(folder, mounted):
    place = mounted("tmp", "size=4k")
    assert run(temporary(place)) == []
    assert len(list(folder.glob("*.so"))) == 3
    assert not list(folder.glob(".tkq-build-*")) and not list(place.iterdir())


@needs_compiler
def test_a_place_for_temporary_files_in_which_others_can_replace_them(folder, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    used = []

    def prepare():
        temporary(tmp_path / "open")()
        real = link.compiled
        link.compiled = lambda words, place: used.append(place) or real(words, place)

    def work():
        prepare()
        return [native._compiled("dispatch") is not None, used]

    build._cache = Cache(folder, before=())
    try:
        made, used_there = forked.done(work)
    finally:
        build._cache = None
    assert made and len(used_there) == 1 and used_there[0].startswith(str(folder))


@needs_compiler
def test_no_room_anywhere(folder, mounted, monkeypatch):
    monkeypatch.setenv("TKQ_CACHE_DIR", str(mounted("cache", "size=4k") / "kernels"))
    said = run(temporary(mounted("tmp", "size=4k")), natives=False)
    assert len(said) == 1 and "No space left" in said[0]


@pytest.mark.parametrize("most", (0, 100, 4096, 20000))
def test_files_of_limited_size(folder, most):
    said = run(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    assert len(said) == 1


def test_a_cache_that_is_removed_again_and_again(folder, monkeypatch):
    """Before each of its operations, and while it is locked and something is compiled."""
    for name in ("find", "put", "lock"):
        real = getattr(Cache, name)

        def removing(self, *given, real=real):
            shutil.rmtree(self.folder, ignore_errors=True)
            return real(self, *given)

        monkeypatch.setattr(Cache, name, removing)
    built = build._built
    monkeypatch.setattr(build, "_built", lambda *given: shutil.rmtree(folder, True) or built(*given))
    assert run() == []
    assert len(os.listdir(folder)) > 0


def test_a_lock_that_is_removed_as_it_is_made(folder, monkeypatch):
    """The folder goes between its making and the lock: then it is the process's own."""
    real = Cache.make

    def removing(self):
        made = real(self)
        if self.folder == folder:
            shutil.rmtree(folder)
        return made

    monkeypatch.setattr(Cache, "make", removing)
    said = run(natives=False)
    assert len(said) == 1 and "cannot be written" in said[0]


def test_an_entry_that_is_removed_between_the_search_and_the_load(folder, monkeypatch):
    loaded = build._loaded
    monkeypatch.setattr(build, "_loaded", lambda entry: shutil.rmtree(folder) or loaded(entry))
    assert run(natives=False) == []


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (b"k\xe4rnels with space \xf0\x9f\x8c\x8a newline\nin it %s{}", b"k\xe4rnels",
                                  b"with space", b"\xf0\x9f\x8c\x8a", b"newline\nin it", b"%s{}"))
@pytest.mark.sampled(when=lambda name: len(name) > 20)  # all in one
def test_a_folder_of_any_name(tmp_path, monkeypatch, capfd, name):
    folder = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    monkeypatch.setenv("TKQ_CACHE_DIR", str(folder))
    assert run(natives=name.startswith(b"k\xe4rnels")) == []
    assert len(list(folder.glob("*.so"))) >= 1
    monkeypatch.setattr(build, "_cache", Cache(folder, before=()))
    monkeypatch.setattr(build, "_functions", {})
    assert precompile.into_cache([], 1) == 0 and doctor.describe(doctor.examine())
    capfd.readouterr()
    folder.chmod(0o777)  # and a warning that names it
    assert len(run(natives=False)) == 1


def test_a_relative_folder_where_the_working_folder_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.setenv("TKQ_CACHE_DIR", "kernels")

    def prepare():
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    said = run(prepare, natives=False)
    assert len(said) == 1 and "no folder for a cache (kernels" in said[0]


def test_the_home_of_a_user_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("TKQ_CACHE_DIR", "~nobody-of-this-name/kernels")
    said = run(natives=False)
    assert len(said) == 1 and "no folder for a cache (~nobody-of-this-name/kernels" in said[0]
    with pytest.warns(UserWarning, match="~nobody-of-this-name"):
        monkeypatch.setenv("TKQ_CACHE_DIR", "~nobody-of-this-name/other:/here")
        assert folders() == (private_folder(), pathlib.Path("/here"))
    with pytest.raises(ValueError, match="folder: got '~nobody-of-this-name'"):
        configure("~nobody-of-this-name")


# ---- a bundle -------------------------------------------------------------------------------------------------------


def test_a_bundle_for_another_version_of_cuda(folder, tmp_path, monkeypatch):
    from tkq.runtime.compile import keys

    note = {"kind": "bundle", "arch": keys.TARGET, "machine": keys.machine(), "cuda": "99",
            "kernels": {keys.bundled_name(RECIPE): "tkq_x"},
            "native": {kind: bundle.digest(kind) for kind in bundle.NATIVE}}
    (tmp_path / bundle.NAME).write_bytes(packed(b"\x7fELF", note))
    for named in (str(tmp_path), str(tmp_path / bundle.NAME)):
        monkeypatch.setenv("TKQ_BUNDLE", named)
        said = run(bundle.current.cache_clear)
        assert len(said) == 1 and "it is for CUDA 99: libcudart.so.99" in said[0]

    def without_dsl():
        def missing(*_):
            raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

        bundle.current.cache_clear()
        build._cache = Cache(tmp_path / "empty", before=())
        build._functions.clear()
        build.function = missing
        try:
            forked.with_warnings(lambda: function(RECIPE))
        except RuntimeError as error:
            return str(error)

    assert "tkq-kernels.so (it is for CUDA 99" in forked.done(without_dsl)


def test_what_is_made_for_all_to_read_is_so_whatever_the_umask(tmp_path, monkeypatch):
    from tkq.runtime.compile import bundling

    before = os.umask(0o077)
    try:
        bundling._replace(tmp_path / bundle.NAME, packed(b"x", {}))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / bundle.NAME).stat().st_mode) == 0o644
    assert unpacked((tmp_path / bundle.NAME).read_bytes()) == (b"x", {}) and len(os.listdir(tmp_path)) == 1


@needs_compiler
def test_a_function_in_c_that_does_not_load_is_compiled_again(folder, monkeypatch):
    monkeypatch.setattr(build, "_cache", Cache(folder, before=()))
    path = native.library("dispatch").path
    build.cache().put(path.name, b"\x7fELF, but nothing that a loader takes", {"kind": "dispatch"})
    assert dispatch._in_c.__wrapped__() is not None
    assert len(native.library("dispatch").object()) > 1000
