"""Test files have names of their own: where there is a GPU, `make test` reads both suites in one run, and pytest takes
two files of one name for one module."""
import collections
from pathlib import Path

TESTS = Path(__file__).parents[2]


def twice(folder):
    """{name: its files} of test files below a folder that another has, too."""
    found = collections.defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        found[path.name].append(str(path.relative_to(folder)))
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_name_is_there_twice():
    assert twice(TESTS) == {}


def test_what_is_found(tmp_path):
    for name in ("cpu/test_one.py", "gpu/deep/test_one.py", "gpu/test_two.py", "gpu/one.py", "cpu/one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert twice(tmp_path) == {"test_one.py": ["cpu/test_one.py", "gpu/deep/test_one.py"]}
