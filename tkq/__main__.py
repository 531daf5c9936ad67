"""python -m tkq doctor | demo | compile | bench"""
from __future__ import annotations

import argparse
import os
import pathlib
import runpy
import sys


def main(argv=None) -> int:
    """Run one subcommand; its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m tkq", description="GPU kernels for NVIDIA Hopper, from PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed here, and what is wrong with it")
    commands.add_parser("demo", help="run the kernels beside PyTorch; without a GPU, inspect them", add_help=False)
    commands.add_parser("bench", help="the benchmarks of a source checkout", add_help=False)
    commands.add_parser("compile", help="fill the disk cache, or make a bundle; needs no GPU", add_help=False)
    if argv[:1] == ["demo"]:  # takes its own arguments
        from .cli import demo

        return demo.main(argv[1:])
    if argv[:1] == ["bench"]:
        return _bench(argv[1:])
    if argv[:1] == ["compile"]:
        from .warmup import precompile

        return precompile.main(precompile.parsed(argv[1:]))
    parser.parse_args(argv)
    from .cli import doctor

    return doctor.main()


def _bench(argv) -> int:
    checkout = pathlib.Path(__file__).resolve().parent.parent
    script = checkout / "bench" / "__main__.py"
    if script.is_file():
        sys.argv = [os.fspath(script), *argv]
        sys.path.insert(0, os.fspath(checkout))
        runpy.run_module("bench", run_name="__main__", alter_sys=True)
        return 0
    print("tkq bench: the benchmarks are not part of the installed package; run it from a source checkout, which has "
          "bench/", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # what reads the output has had enough: nothing is said of it, when Python ends either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
