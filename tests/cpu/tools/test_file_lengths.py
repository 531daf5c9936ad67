"""A file has at most 400 lines: what is longer today is listed, to be split."""
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIMIT = 400
FOLDERS = ("tkq", "bench", "tests", "docs/tools", "examples")

# This list shrinks: a file is split, its line goes. No line is added, no number grows.
LONGER = {
    "tests/cpu/bench/test_bench_harness.py": 594,
    "tests/cpu/losses/test_losses_cpu.py": 440,
    "tests/cpu/norms/test_norm_options_cpu.py": 494,
}


def test_no_file_is_longer():
    new = {file: lines for file, lines in lengths(ROOT).items() if lines > max(LIMIT, LONGER.get(file, 0))}
    assert not new, f"split these by what they do, {LIMIT} lines are the limit: {new}"


def test_the_list_shrinks():
    found = lengths(ROOT)
    done = [file for file in LONGER if found.get(file, 0) <= LIMIT]
    assert not done, f"short enough, moved or gone: take them off LONGER: {done}"


def test_what_is_counted(tmp_path):
    for folder in FOLDERS:
        (tmp_path / folder / "room").mkdir(parents=True)
        (tmp_path / folder / "room" / "file.py").write_text("x = 1\n" * 401)
    (tmp_path / "tkq" / "shim.c").write_text("int x;\n" * 3)
    assert lengths(tmp_path) == {"tkq/shim.c": 3} | {f"{folder}/room/file.py": 401 for folder in FOLDERS}


def lengths(root):
    """{file: its lines} of the sources below FOLDERS."""
    return {str(path.relative_to(root)): len(path.read_text().splitlines())
            for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in {".py", ".c", ".h"}}
