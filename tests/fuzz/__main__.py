"""The command line: see the package's words."""
import argparse
import multiprocessing
import os
import sys
from collections import Counter

from .run import OPERATIONS, run  # not defined here: new processes do not know what a package's __main__ has


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random calls, judged in float64.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each compiles its own kernels on a GPU")
    parser.add_argument("--only", default="", help="operations, with commas")
    options = parser.parse_args(argv)
    names = options.only.split(",") if options.only else list(OPERATIONS)
    parts = [(names[i::options.jobs] or names, options.device, options.calls // options.jobs, options.seed + i,
              options.seconds) for i in range(options.jobs)]
    if options.jobs == 1:
        found = [run(*parts[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            found = pool.starmap(run, parts, 1)
    return report([o for part in found for o in part], options)


def report(outcomes, options):
    counts, kinds = Counter(o.verdict for o in outcomes), {}
    for o in outcomes:
        if not o.good:
            kinds.setdefault(o[:3], [0, o.detail])[0] += 1
    print(f"{len(outcomes)} calls on {options.device}, seed {options.seed}: "
          + ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()))
    for (name, verdict, what), (n, detail) in sorted(kinds.items()):
        print(f"{verdict} | {name}({what}) x{n}: {detail}")
    return min(len(kinds), 100)


if __name__ == "__main__":
    verdict = main()
    sys.stdout.flush()
    # what was found is said: autograd's threads may abort a process whose interpreter ends (pytorch/pytorch#38228)
    os._exit(verdict)
