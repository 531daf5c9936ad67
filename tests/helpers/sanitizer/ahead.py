"""The kernels that a module's calls take, into the kernel cache, by all processors: a sanitized process compiles one
after the other, and stands still in the tool meanwhile.

    python -m tests.helpers.sanitizer.ahead tests.helpers.sanitizer.attention_calls [-j N]
"""
import argparse
import importlib
import os
import sys

from tkq.runtime.compile import build, dry_run
from tkq.warmup import precompile


def recipes(module: str) -> list:
    """What all families of a module ask for on a GPU of 132 multiprocessors. For a process of its own."""
    families = importlib.import_module(module).FAMILIES
    dry_run.begin()
    for family in families.values():
        for _ in family("meta"):
            pass
    return dry_run.taken()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    made = list(precompile.mapped(build.ensure, recipes(options.module), options.jobs))
    print(f"{len(made)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
