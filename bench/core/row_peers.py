"""For each baseline in a row of a table: at how many shapes it was timed, and why not at the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench.core import ops
from bench.core.results import Case, Report

if TYPE_CHECKING:
    from bench.core.command import Job

TIMED, FAILED, HAS_NONE, NOT_INSTALLED, LEFT_OUT, NOT_REQUESTED = (
    "timed", "failed", "unsupported", "not installed", "excluded", "not run")
WHY = (FAILED, HAS_NONE, NOT_INSTALLED, LEFT_OUT, NOT_REQUESTED)


@dataclass(frozen=True)
class Peer:
    """A peer at the shapes of a row. at: how many there are of each word above, of all shapes together."""

    name: str
    at: dict[str, int]

    @property
    def shapes(self) -> int:
        return sum(self.at.values())

    @property
    def timed(self) -> int:
        return self.at.get(TIMED, 0)

    def __str__(self) -> str:
        return self.name if self.timed == self.shapes else (
            f"{self.name} at {self.timed} of {self.shapes} ({self.reasons})")

    @property
    def reasons(self) -> str:
        """Why it was not timed, with the number of shapes where there are several reasons."""
        return ", ".join(word if self.at[word] == self.shapes else f"{word} at {self.at[word]}"
                         for word in WHY if self.at.get(word))


def listed(peers: Iterable[Peer]) -> str:
    """Baselines as a cell of a table: those that were timed, then the others by reason; "none" without any."""
    peers = list(peers)
    absent: dict[str, list[str]] = {}
    for peer in peers:
        if not peer.timed:
            absent.setdefault(peer.reasons, []).append(peer.name)
    timed = [", ".join(str(peer) for peer in peers if peer.timed)]
    return "; ".join(filter(None, (*timed, *(f"{why}: {', '.join(names)}" for why, names in absent.items())))) or "none"


def asked_for(name: str) -> tuple[str, ...]:
    """The rivals that the benches as they are now ask for at some shape of a row, by its title."""
    found: dict[str, None] = {}
    for _, job in _jobs(name):
        found |= dict.fromkeys(filter(ops.is_rival, job.peer_names))
    return tuple(found)


def with_roofs(reports: Mapping[str, Report]) -> dict[str, Report]:
    """Reports whose cases have the roofs that their benches ask for now, where the files are older than these and what
    shows the roof was timed all the same."""
    roofs = {(name, job.question.section, job.question.op, job.question.shape): job.question.roof
             for name, job in _jobs() if job.question.roof is not None}

    def completed(file: str, case: Case) -> Case:
        roof = roofs.get((ops.title(file, case.section, case.op), case.section, case.op, case.shape))
        known = case.roof is not None or roof is None or not set(roof.against) <= set(case.ratios())
        return case if known else replace(case, roof=roof)

    return {file: replace(report, cases=[completed(file, case) for case in report.cases])
            for file, report in reports.items()}


def _jobs(only: str | None = None) -> Iterator[tuple[str, Job]]:
    """Every job of the benches with its row's title; of one row alone with ``only``."""
    for op, parts in ops.OPS.items():
        for part in parts:
            name = f"{op}, {part.what}" if part.what else op
            if only is not None and name != only:
                continue
            bench = ops.bench_of(part.bench)
            for section in part.sections:
                yield from ((name, job) for job in bench.sections[section](bench.shapes.get(section, ()))
                            if part.has(section, job.question.op))


def became_of(case: Case, peer: str) -> str:
    """One of the words above: what a case says of a peer. A case that does not know it was not asked for it."""
    for timing in case.comparison.timings:
        if timing.name == peer:
            return TIMED if timing.ok else _why(timing.note)
    return _why(case.missing[peer]) if peer in case.missing else NOT_REQUESTED


def _why(reason: str) -> str:
    """The word for why a peer was not timed, of what it raised when it was made or called."""
    if reason.startswith("NotImplementedError"):
        return HAS_NONE
    if reason.startswith(("ModuleNotFoundError", "ImportError")):
        return NOT_INSTALLED
    return LEFT_OUT if reason.startswith("left out") else FAILED


def of_row(cases: Iterable[Case], requested: Iterable[str] = ()) -> list[Peer]:
    """Every peer that was timed, failed, could not be had or was not asked at these cases, those that were timed most
    often first. requested: more peers, that the cases may not know of."""
    cases = list(cases)
    names: dict[str, None] = {}
    for case in cases:
        names |= dict.fromkeys((*(t.name for t in case.comparison.timings if t.name != case.ours), *case.missing))
        names |= dict.fromkeys(case.bound.against if case.bound else ())
    found = []
    for name in filter(ops.is_rival, {**names, **dict.fromkeys(requested)}):
        at: dict[str, int] = {}
        for case in cases:
            word = became_of(case, name)
            at[word] = at.get(word, 0) + 1
        found.append(Peer(name, at))
    return sorted(found, key=lambda peer: -peer.timed)
