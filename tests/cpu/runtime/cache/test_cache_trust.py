"""What is run belongs to the user or root, and no other may write it: asked of what was opened, and that is loaded.

As root, other users are forks of this process with another number; elsewhere those tests are skipped."""
import os
import pathlib
import resource
import tempfile

import pytest

from tests.helpers.process import forked
from tests.helpers.process.forked import OTHER, THIRD
from tkq.runtime.compile import bundle
from tkq.runtime.compile.cache import Cache, packed, private_folder
from tkq.runtime.system import trusted

DATA, NOTE = b"\x7fELF" + bytes(300), {"symbol": "tkq_x"}
NAME = f"replay-{0:032x}.so"
root = pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be had by root")


@pytest.fixture
def shared():
    """A folder that every user may pass, in a sticky one."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        yield pathlib.Path(folder)


def plant(folder, mode=0o755, owner=None, file_mode=0o644, file_owner=None):
    """A whole entry in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_bytes(packed(DATA, NOTE))
    for path, bits, number in ((folder / NAME, file_mode, owner if file_owner is None else file_owner),
                               (folder, mode, owner)):
        if number is not None:
            os.chown(path, number, number)
        os.chmod(path, bits)
    return folder


def taken(folder, user=None):
    """(is the planted entry found, does what is put lie there, warnings), in a process of its own."""
    def work():
        store = Cache(folder, before=())
        found, said = forked.with_warnings(lambda: (store.find(NAME), store.put("mine-1.so", DATA, NOTE)))
        return found[0] is not None, found[1].path.parent == folder, said

    return forked.done(work, user)


def test_ones_own_are_taken(shared):
    assert taken(plant(shared / "own")) == [True, True, []]
    assert taken(plant(shared / "private", 0o700, file_mode=0o600)) == [True, True, []]


@root
def test_so_are_roots_by_a_user_and_his_own(shared):
    assert taken(plant(shared / "his", owner=OTHER), OTHER) == [True, True, []]
    found, there, said = taken(plant(shared / "roots"), OTHER)
    assert found and not there and len(said) == 1 and "cannot be written" in said[0]


@root
@pytest.mark.parametrize("victim", (0, OTHER))
@pytest.mark.parametrize("mode", (0o755, 0o700, 0o1755))
def test_a_folder_of_another_user(shared, victim, mode):
    found, there, said = taken(plant(shared / "planted", mode, THIRD), victim)
    assert not found and not there and len(said) == 1
    assert sorted(os.listdir(shared / "planted")) == [NAME]  # nothing was written, root's locks neither


@pytest.mark.parametrize("mode", (0o777, 0o1777, 0o2775, 0o770, 0o720))
def test_a_folder_that_others_may_write(shared, mode):
    found, there, said = taken(plant(shared / "open", mode))
    assert not found and not there and len(said) == 1 and f"mode {mode:o}" in said[0] and "TKQ_CACHE_DIR" in said[0]


@root
def test_a_folder_made_beforehand_in_a_sticky_one(shared):
    (shared / "tmp").mkdir()
    (shared / "tmp").chmod(0o1777)
    plant(shared / "tmp/tkq", owner=OTHER)
    assert taken(shared / "tmp/tkq")[:2] == [False, False]
    assert taken(shared / "tmp/mine")[:2] == [False, True]


def test_a_folder_on_whose_path_others_may_write(shared):
    (shared / "open").mkdir()
    plant(shared / "open/tkq", 0o700)
    for mode in (0o777, 0o757):
        (shared / "open").chmod(mode)
        found, there, said = taken(shared / "open/tkq")
        assert not found and not there and len(said) == 1 and "open on its path" in said[0]
    (shared / "open").chmod(0o1777)
    assert taken(shared / "open/tkq") == [True, True, []]


@root
def test_a_folder_on_a_path_of_another_user(shared):
    (shared / "his").mkdir()
    plant(shared / "his/tkq", 0o700)
    os.chown(shared / "his", OTHER, OTHER)
    assert taken(shared / "his/tkq")[:2] == [False, False]


def test_a_group_of_ones_own_may_write_on_the_path(shared, monkeypatch):
    """As systems have it that give each user a group of his name, and a umask of 002."""
    (shared / "dot-cache").mkdir()
    (shared / "dot-cache").chmod(0o775)
    plant(shared / "dot-cache/tkq", 0o700)
    for private in (True, False):
        monkeypatch.setattr(trusted, "_is_private", lambda group, private=private: private)
        assert taken(shared / "dot-cache/tkq")[0] is private


@pytest.mark.parametrize("mode", (0o666, 0o664, 0o622))
def test_an_entry_that_others_may_write(shared, mode):
    found, there, said = taken(plant(shared / "own", file_mode=mode))
    assert not found and there and not said  # it counts as missing, and will be made anew


@root
def test_an_entry_of_another_user(shared):
    assert taken(plant(shared / "own", file_owner=OTHER))[:2] == [False, True]
    assert taken(plant(shared / "his", owner=OTHER, file_owner=THIRD), OTHER)[:2] == [False, True]


def test_a_link_in_an_entrys_place(shared):
    plant(shared / "elsewhere")
    (shared / "own").mkdir()
    (shared / "own" / NAME).symlink_to(shared / "elsewhere" / NAME)
    assert Cache(shared / "own").find(NAME) is None
    Cache(shared / "own").put(NAME, DATA + b"new", NOTE)
    assert (shared / "elsewhere" / NAME).read_bytes() == packed(DATA, NOTE)  # the link was replaced, not followed
    assert Cache(shared / "own").find(NAME).object() == DATA + b"new"


def test_a_fifo_in_an_entrys_place(shared):
    (shared / "own").mkdir()
    os.mkfifo(shared / "own" / NAME)
    assert forked.done(lambda: Cache(shared / "own").find(NAME) is None, seconds=10)
    Cache(shared / "own").put(NAME, DATA, NOTE)
    assert Cache(shared / "own").find(NAME)


def test_links_on_the_path_of_ones_own(shared):
    (shared / "real/deep").mkdir(parents=True)
    (shared / "link").symlink_to("real/../real/deep")
    store = Cache(shared / "link/kernels")
    store.put(NAME, DATA, NOTE)
    assert store.find(NAME) and (shared / "real/deep/kernels" / NAME).is_file()
    (shared / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links"):
        trusted.folder(shared / "circle/kernels")


@root
def test_links_on_the_path_of_another_user(shared):
    (shared / "tmp").mkdir()
    (shared / "tmp").chmod(0o1777)
    plant(shared / "victims", 0o700)
    os.symlink(shared / "victims", shared / "tmp/tkq")
    os.lchown(shared / "tmp/tkq", OTHER, OTHER)
    assert taken(shared / "tmp/tkq")[:2] == [False, False]
    assert sorted(os.listdir(shared / "victims")) == [NAME]


@root
def test_root_with_a_users_home(shared, monkeypatch):
    (shared / "home").mkdir()
    os.chown(shared / "home", OTHER, OTHER)
    monkeypatch.setenv("HOME", str(shared / "home"))
    monkeypatch.delenv("TKQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def work():
        from tkq.runtime.compile import build

        build._cache = None
        with build.writable("a") as store:
            return store.put("a-1.so", DATA, NOTE).path.parent == private_folder()

    assert forked.done(work)
    assert not list((shared / "home").rglob("*"))


@pytest.mark.parametrize("swapped", ("own/" + NAME, "own", "."))
def test_what_was_verified_is_loaded_whatever_stands_there_now(shared, swapped):
    """Swapped between the check and the load: the file, its folder, and what is above it."""
    (shared / "above").mkdir()
    entry = Cache(plant(shared / "above/own")).find(NAME)
    (shared / "above" / swapped).rename(shared / "moved")
    (shared / "above/own").mkdir(parents=True, exist_ok=True)
    (shared / "above/own" / NAME).write_bytes(b"evil")
    assert entry.loaded(lambda path: pathlib.Path(path).read_bytes()) == packed(DATA, NOTE)


def test_each_load_has_a_name_of_its_own(shared):
    """A loader takes two files of one name for the same, and descriptors' numbers come again."""
    store, names = Cache(plant(shared / "own")), set()
    for _ in range(70):
        names.add(store.find(NAME).loaded(lambda path: path))
    assert len(names) == 70


@pytest.mark.parametrize("memory", (False, True))
def test_the_name_of_what_is_loaded_leads_to_no_other_file(shared, tmp_path, memory):
    """Backtraces of errors open the files of all loaded objects again, by the names that these were loaded by."""
    store, names = Cache(plant(shared / "own")), []

    def load(path):
        if memory and not names:
            names.append(path)
            raise OSError("from memory, please")
        names.append(path)
        return pathlib.Path(path).read_bytes()

    assert store.find(NAME).loaded(load) == packed(DATA, NOTE)
    files = [open(tmp_path / "another", "wb") for _ in range(200)]  # noqa: SIM115  (all open at a time)
    assert len(names) == 1 + memory and not any(map(os.path.exists, names))
    for file in files:
        file.close()


def test_few_descriptors_are_allowed(shared):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def work():
        few = max(40, max(map(int, os.listdir("/proc/self/fd"))) + 9)  # whatever tests before this one hold
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        return Cache(plant(shared / "own")).find(NAME).loaded(lambda path: len(pathlib.Path(path).read_bytes()))

    assert forked.done(work) == len(packed(DATA, NOTE))


@root
@pytest.mark.parametrize("planted", ("folder", "file", "mode", "fifo"))
def test_a_bundle_of_another_user(shared, monkeypatch, planted):
    note = {"kind": "bundle", "arch": "sm_90a", "machine": os.uname().machine, "cuda": "13", "kernels": {},
            "native": {}}
    plant(shared / "kernels")
    path = shared / "kernels" / bundle.NAME
    os.mkfifo(path) if planted == "fifo" else path.write_bytes(packed(DATA, note))
    path.chmod(0o666 if planted == "mode" else 0o644)
    monkeypatch.setenv("TKQ_BUNDLE", str(shared / "kernels"))

    def work():
        bundle.current.cache_clear()
        found, said = forked.with_warnings(bundle.current)
        return found is not None, said

    if planted in ("folder", "file"):
        assert forked.done(work) == [True, []]
        os.chown(shared / "kernels" if planted == "folder" else path, OTHER, OTHER)
    found, said = forked.done(work)
    assert not found and len(said) == 1 and "cannot be used" in said[0]
