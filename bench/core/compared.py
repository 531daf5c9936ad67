"""The comparison of two runs: what got slower, beyond the spread of both.

A card's clock differs from run to run and from card to card. What both runs timed beside tkq, peers and roofs, shows by
how much: the geometric mean of their change is the run's, and ours is judged by what is beyond it. Where nothing else
was timed in both, our times are compared as they are. Less than 1 % is no change, however little the rounds of one run
differ by. Bursts after a rest are not compared with turns without one, nor with turns of which a file does not say it.
What calls cost is compared beside `x + x` of the same host; what peers' calls cost is not ours to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.core import ops
from bench.core.results import HOST, UNITS, Case, Cost, Report, geometric_mean, host
from tkq.testing.timing import Timing

LEAST = 0.01  # of a change that counts
CALL = "CPU per eager call"
_RIVALS = tuple(f" {name}" for names in ops.AGAINST.values() for name in names)


@dataclass(frozen=True)
class Change:
    """What became of one case or cost. Times: above 1, the new one takes longer.

    ratio: ours, new over old. others: what both runs timed beside ours, in the mean; None where nothing was.
    spread: what the measurements differ by among themselves, both runs' together.
    """

    op: str
    shape: str
    old: str
    new: str
    ratio: float
    others: float | None
    spread: float

    @property
    def beyond(self) -> float:
        """Our change without the run's."""
        return self.ratio / (self.others or 1.0)

    @property
    def verdict(self) -> str:
        counts = 1 + max(self.spread, LEAST)
        if self.beyond > counts:
            return "slower"
        return "faster" if self.beyond < 1 / counts else ""


def spread(timing: Timing) -> float:
    """Half of what lies between the quartiles, as a share of the median."""
    low, high = timing.quartiles_ms
    return (high - low) / 2 / timing.median_ms


def changes(old: Report, new: Report) -> list[Change]:
    """Of every case and every cost of ours that both runs have."""
    before = {(case.section, case.op, case.shape): case for case in old.cases}
    pairs = ((before.get((case.section, case.op, case.shape)), case) for case in new.cases)
    found = [_case(a, b) for a, b in pairs
             if a and a.comparison[a.ours].ok and b.comparison[b.ours].ok and a.timed_as(b)]
    costs = {cost.name: cost for cost in old.costs}
    hosts = host(old.costs), host(new.costs)
    return found + [_cost(costs[cost.name], cost, hosts) for cost in new.costs
                    if cost.name in costs and _is_ours(cost.name)]


def _case(old: Case, new: Case) -> Change:
    a, b = old.comparison[old.ours], new.comparison[new.ours]
    ours = lambda name: name == old.ours or ops.is_own(name)  # our variants may have got slower for the same reason
    then, now = ({t.name: t for t in case.comparison.timings if t.ok and not ours(t.name)} for case in (old, new))
    both = [name for name in then if name in now]
    others = geometric_mean(now[name].median_ms / then[name].median_ms for name in both) if both else None
    text = lambda case, t: f"{case.work / t.median_ms / UNITS[case.unit]:.0f} {case.unit}"  # back to back, as the ratio
    return Change(new.op, new.shape, text(old, a), text(new, b), b.median_ms / a.median_ms, others,
                  spread(a) + spread(b))


def _is_ours(name: str) -> bool:
    """Is a cost tkq's? A peer's call has the peer's name, a first call or an import torch's; the host is what calls are
    compared beside."""
    if name.startswith(CALL):
        return not name.startswith(HOST) and not name.partition(",")[0].endswith(_RIVALS)
    return name != "import torch" and ": torch.sum" not in name and not name.startswith("torch: ")


def _cost(old: Cost, new: Cost, hosts: tuple[Cost | None, Cost | None]) -> Change:
    """The least of the measurements says how far below the median a quiet host comes: that is the spread."""
    calls = new.name.startswith(CALL) and None not in hosts
    of = lambda cost: (cost.median_us - cost.least_us) / cost.median_us
    return Change(new.name, "", f"{old.median_us:.1f} us", f"{new.median_us:.1f} us", new.median_us / old.median_us,
                  hosts[1].median_us / hosts[0].median_us if calls else None, of(old) + of(new))


def text(found: Iterable[Change]) -> str:
    """The changes as a Markdown table, what got slower first, and what they come to."""
    found = sorted(found, key=lambda change: -change.beyond)
    if not found:
        return "The runs have no case in common."
    slower = [change for change in found if change.verdict == "slower"]
    faster = [change for change in found if change.verdict == "faster"]
    counts = f"{len(slower)} slower, {len(faster)} faster, {len(found) - len(slower) - len(faster)} within the spread"
    lines = [f"{len(found)} compared: {counts}.", ""]
    if slower or faster:
        lines += ["| operation | shape | old | new | time | baselines' time | net | spread | |",
                  "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
        lines += [f"| `{c.op}` | {c.shape} | {c.old} | {c.new} | {c.ratio - 1:+.1%} | "
                  f"{'' if c.others is None else f'{c.others - 1:+.1%}'} | {c.beyond - 1:+.1%} | {c.spread:.1%} | "
                  f"{c.verdict} |" for c in slower + faster]
    return "\n".join(lines).rstrip()


def tell(old: Mapping[str, Report], new: Mapping[str, Report]) -> int:
    """Print what changed between two folders' results; how many cases and costs got slower."""
    found = [change for name in old if name in new for change in changes(old[name], new[name])]
    print(f"\nSince {', '.join(sorted({report.environment.date[:10] for report in old.values()}))}: {text(found)}")
    return sum(change.verdict == "slower" for change in found)


def named(old: Mapping[str, Report], path: Path, new: Mapping[str, Report]) -> Mapping[str, Report]:
    """A single old file is the one whose cases it has, whatever it is called."""
    if path.is_dir() or path.stem in new or not new:
        return old
    (report,) = old.values()
    return {max(new, key=lambda name: len(changes(report, new[name]))): report}
