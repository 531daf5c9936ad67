"""What compute-sanitizer's racecheck reports, with the instructions that are at the addresses it names."""
from __future__ import annotations

import re
from typing import NamedTuple

COPIES = "UBLKCP.S", "UTMALDG", "LDGSTS"  # into shared memory, while the thread goes on
STORES = "STS ", "STS."  # and not STSM, whose tiles tensor cores read
READS = "LDS",
_ACCESS = re.compile(r"(Race reported between|and) (\w+) access at (\S+?)\+0x([0-9a-f]+)(?: .*?\[(\d+) hazards?\])?")


class Race(NamedTuple):
    """accesses: what ("Write"), where in the kernel, how often in a race with the first one."""

    kernel: str
    accesses: tuple[tuple[str, int, int], ...]


def races(report: str) -> list[Race]:
    """A line names an access, and those below it, up to the next such line, what it is in a race with."""
    found = []
    for line in report.splitlines():
        access = _ACCESS.search(line)
        if access is None:
            continue
        begins, what, kernel, at, often = access.groups()
        one = what, int(at, 16), int(often or 0)
        if begins != "and":
            found.append(Race(kernel, (one,)))
        elif found:
            found[-1] = found[-1]._replace(accesses=(*found[-1].accesses, one))
    return found


def instructions(race: Race, listings) -> list[tuple[str, ...]]:
    """Of its accesses. More than one where several kernels have its name, which is cut off; none where nothing is known
    of it. listings: of each file with kernels, {kernel: {address: instruction}}."""
    return list(dict.fromkeys(
        tuple(code[at] for _, at, _ in race.accesses)
        for kernels in listings for name, code in kernels.items()
        if name.startswith(race.kernel) and all(at in code for _, at, _ in race.accesses)))


def by_copy(race: Race, listings) -> bool:
    """Is it between copies into shared memory, which are waited for by mbarriers, and reads? Where several kernels have
    the name, of one of them."""
    return _between(race, listings, COPIES)


def by_store(race: Race, listings) -> bool:
    """Is it between stores into shared memory and reads? Where several kernels have the name, of one of them."""
    return _between(race, listings, STORES)


def _between(race, listings, writes):
    pairs = lambda first, other: any(_is(x, writes) and _is(y, READS) for x, y in ((first, other), (other, first)))
    return any(others and all(pairs(first, other) for other in others)
               for first, *others in instructions(race, listings))


def _is(instruction, kinds):
    return re.sub(r"^\{?\s*(@\S+\s+)?", "", instruction).startswith(kinds)  # without its predicate


def described(race: Race, listings) -> str:
    """The accesses, each with its instruction in all kernels of the name."""
    found = instructions(race, listings) or [("?",) * len(race.accesses)]
    lines = []
    for i, (what, at, often) in enumerate(race.accesses):
        times = f" [{often}]" if often else ""
        lines.append(f"  {what} at {at:#x}{times}: " + " or ".join(dict.fromkeys(code[i] for code in found)))
    return "\n".join((race.kernel[:100], *lines))
