"""The files of a benchmark run: dataclasses that go to JSON and come back equal, and the arithmetic of bounds."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import tkq
from bench.core import accuracy
from tkq.testing.timing import Comparison, Timing, ratio

SHORT_US = 50.0  # kernels of less are timed between other kernels too
TOLERANCE = 0.01  # a bound on one shape holds if the ratio is at most 1 % below it
SUSTAINED = "sustained"  # the section of candidates that work for seconds, each by itself
PACKAGES = (
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cuda-bindings",
    "triton",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "quack-kernels",
    "flash-attn-4",
    "liger-kernel",
    "deep-gemm",
    "flash-attn-3",
    "flash-linear-attention",
    "flashinfer-python",
    "flash-qla",
    "flash-kda",
    "mamba-ssm",
    "causal-conv1d",
    "accelerated-scan",
)
WHEELS = {"flash-kda": "tokenspeed-flashkda", "deep-gemm": "tokenspeed-deepgemm"}  # by which some are installed


@dataclass(frozen=True)
class Environment:
    """Where and when a run was made. `versions` has None for what was not installed. processors: the GPU's SMs."""

    device: str
    driver: str
    cuda: str
    cudnn: str
    python: str
    date: str
    command: str
    versions: dict[str, str | None]
    processors: int = 0

    @classmethod
    def here(cls, driver: str = "unknown") -> Environment:
        """This process's environment; the driver's version comes from `bench.core.harness.Monitor`."""
        import torch

        return cls(
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            driver=driver,
            cuda=str(torch.version.cuda),
            cudnn=str(torch.backends.cudnn.version()),
            python=platform.python_version(),
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            command=command(sys.argv),
            versions={"tkq": tkq.__version__, **{name: _version(name) for name in PACKAGES}},
            processors=_processors(),
        )


def _processors() -> int:
    import torch

    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0


def run_here() -> dict[str, str]:
    """Of which run something is that is no `Report`: what its file has under "run"."""
    here = Environment.here()
    return {"date": here.date, "device": here.device, "command": here.command}


def command(argv: list[str]) -> str:
    """What was typed, of a script's path and its arguments."""
    script = Path(_relative(argv[0]))
    inside = script.with_suffix("").parts
    inside = inside[max((i for i, part in enumerate(inside) if part == "bench"), default=len(inside)):]
    name = "tkq bench" if inside[1:] == ("__main__",) else ".".join(inside)
    begin = f"python -m {name}" if inside else f"python {script.as_posix()}"
    return " ".join([begin, *map(_relative, argv[1:])])


def _relative(argument: str) -> str:
    """A path below the current folder as seen from there, any other by its name only: results are published."""
    if not os.path.isabs(argument):
        return argument
    inside = os.path.relpath(argument)
    return os.path.basename(argument) if inside.startswith("..") else inside


def _version(package: str) -> str | None:
    for name in (package, WHEELS.get(package)):
        if name:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
    return None


@dataclass(frozen=True)
class Reading:
    """The GPU's state while a candidate worked; None for what could not be read."""

    sm_mhz: int | None
    watts: float | None
    celsius: int | None


@dataclass(frozen=True)
class Bound:
    """The ratio to reach against the best of the named peers that were timed."""

    against: tuple[str, ...]
    at_least: float


@dataclass(frozen=True)
class Case:
    """One operation at one shape, timed beside its peers (bound), and beside what only moves its bytes (roof).

    unit and work: "TFLOP/s" with floating-point operations per call, or "GB/s" with bytes per call.
    readings: per candidate, one for each round where NVML answers; under "" one for all where only nvidia-smi does.
    missing: peers that could not be timed here, with the reason. seconds: what it took to run the case.
    round_seconds, idle_seconds: how long a turn was, and the rest before it; None in files that do not say.
    date: of the run, in a file that was joined from several; None: the file's.
    alike: whose errors ours is judged beside; without any, all peers'. Others compute with another precision.
    equal_error: how many times the fastest peer's error ours may be; None: see ``accuracy.accurate``.
    """

    section: str
    op: str
    shape: str
    unit: str
    work: float
    comparison: Comparison
    ours: str = "tkq"
    bound: Bound | None = None
    readings: dict[str, tuple[Reading, ...]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    roof: Bound | None = None
    seconds: float | None = None
    round_seconds: float | None = None
    idle_seconds: float | None = None
    date: str | None = None
    alike: tuple[str, ...] = ()
    equal_error: float | None = None

    def __post_init__(self):
        if self.unit not in UNITS:
            raise ValueError(f"unit: one of {sorted(UNITS)}, got {self.unit!r}")

    @property
    def short(self) -> bool:
        """Does some candidate take less than `SHORT_US` back to back?"""
        return any(t.ok and 1e3 * t.median_ms < SHORT_US for t in self.comparison.timings)

    @property
    def between(self) -> bool:
        """Was every candidate that was timed also timed between other kernels? Those times are then what counts."""
        return any(t.ok for t in self.comparison.timings) and all(
            t.between_ms for t in self.comparison.timings if t.ok)

    def timing(self, name: str) -> Timing:
        """A candidate's times that count: between other kernels where that was timed, back to back elsewhere."""
        t = self.comparison[name]
        return replace(t, times_ms=t.between_ms) if self.between and t.ok else t

    def rate(self, name: str) -> float:
        """Work per second of a candidate at its median, in `unit`."""
        return self.work / self.timing(name).median_ms / UNITS[self.unit]

    def ratios(self) -> dict[str, float]:
        """For every other candidate that was timed: how many times faster ours is."""
        return self._ratios(self.timing)

    def back_to_back(self) -> dict[str, float]:
        """The same of calls back to back, whatever counts."""
        return self._ratios(self.comparison.__getitem__)

    def _ratios(self, timing: Callable[[str], Timing]) -> dict[str, float]:
        ours = timing(self.ours)
        if not ours.ok:
            return {}
        # a sustained candidate's turns lie seconds from another's: they are no rounds
        of = (lambda a, b: b.median_ms / a.median_ms) if self.section == SUSTAINED else ratio
        return {t.name: of(ours, timing(t.name)) for t in self.comparison.timings if t.ok and t.name != self.ours}

    def beside(self, bound: Bound | None) -> tuple[str, float] | None:
        """The strongest of the bound's peers (of all, without one) and the ratio against it; None where none was timed.
        """
        ratios = {k: v for k, v in self.ratios().items() if bound is None or k in bound.against}
        return min(ratios.items(), key=lambda item: item[1]) if ratios else None

    def timed_as(self, other: Case) -> bool:
        """Both in bursts after a rest, or neither as far as is known: at the power limit others are the fastest."""
        return bool(self.idle_seconds) == bool(other.idle_seconds)

    def against_best(self) -> tuple[str, float] | None:
        """The strongest of the bound's peers and the ratio against it."""
        return self.beside(self.bound)

    def accurate(self) -> bool | None:
        """Is our error about what the peers have? None where it was not measured, or no peer's was."""
        ours = self.comparison[self.ours]
        if not ours.ok:
            return False
        peers = self.errors()
        if ours.error is None or not peers:
            return None
        fastest = min(peers, key=self._ratios(self.timing).get)
        return accuracy.accurate(ours.error, peers, fastest, self.equal_error)

    def errors(self) -> dict[str, float]:
        """Of the peers that ours is judged beside."""
        return {t.name: t.error for t in self.comparison.timings if t.ok and t.error is not None
                and t.name != self.ours and t.name in (self.alike or (t.name,))}

    def holds_beside(self, bound: Bound) -> bool | None:
        """Does one of the bounds hold? None where one of its peers was not timed."""
        if not self.comparison[self.ours].ok:
            return False
        if not set(bound.against) <= set(self.ratios()):
            return None
        return within(self.beside(bound)[1], bound.at_least)

    def holds(self) -> bool | None:
        """Do the bounds hold? False where one does not; None without any, or where one could not be decided."""
        each = [self.holds_beside(bound) for bound in (self.bound, self.roof) if bound is not None]
        return False if False in each else None if None in each or not each else True


PROCESSORS = {"NVIDIA H100 80GB HBM3": 132}  # of files that do not say
UNITS = {"TFLOP/s": 1e9, "GB/s": 1e6}  # per millisecond


def within(ratio_: float, at_least: float) -> bool:
    """The rule for one shape: a ratio may be 1 % below its bound."""
    return ratio_ >= at_least * (1 - TOLERANCE)


def geometric_mean(values) -> float:
    """The mean of ratios."""
    values = list(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Cost:
    """A cost of calling or starting, in microseconds: the median, the least and the most of `samples` measurements.

    at_most: the bound in the same unit, None where there is none. note: what else was seen. date: of the run, in a file
    that was joined from several; None: the file's.
    """

    name: str
    median_us: float
    least_us: float
    most_us: float
    samples: int
    at_most: float | None = None
    note: str = ""
    date: str | None = None

    def holds(self) -> bool | None:
        return None if self.at_most is None else self.median_us <= self.at_most


HOST = "CPU per eager call: x + x"  # what says how quick a host is, and how busy
BUSY = 1.1  # the median of its batches over the least, where others are at work too


def host(costs: Iterable[Cost]) -> Cost | None:
    """What `x + x` costs the host of a run, None where it was not priced."""
    return next((cost for cost in costs if cost.name == HOST), None)


def busy(costs: Iterable[Cost]) -> str | None:
    """A sentence about a host that had other work while calls were priced, None where it was quiet."""
    x = host(costs)
    if x is None or x.median_us <= BUSY * x.least_us:
        return None
    return (f"The host was busy: `x + x` took {x.least_us:.1f} to {x.most_us:.1f} us, median {x.median_us:.1f} us. "
            "Compare calls by their ratio to it.")


@dataclass
class Report:
    """A run. `problems` says what did not run and why. copy_gbs: GB/s of a device copy in it, None if not timed."""

    environment: Environment
    cases: list[Case] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    copy_gbs: float | None = None

    def to_json(self) -> str:
        """The report, with what follows from each case beside it for the reader of the file."""
        data = dataclasses.asdict(self)
        for plain, case in zip(data["cases"], self.cases, strict=True):
            plain["derived"] = _derived(case)
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote; derived figures are computed anew."""
        data = json.loads(text)
        return cls(
            Environment(**{"processors": PROCESSORS.get(data["environment"]["device"], 0), **data["environment"]}),
            [_case(c) for c in data["cases"]],
            [Cost(**c) for c in data["costs"]],
            data["problems"],
            data.get("copy_gbs"),
        )

    def save(self, path: Path) -> None:
        """Write, so that a reader never sees half a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(self.to_json() + "\n")
        part.replace(path)


def reports_in(path: Path) -> dict[str, Report]:
    """Every file of results in a folder, or a single one, by its name. JSON that is no report is left out."""
    texts = {p.stem: p.read_text() for p in ([path] if path.is_file() else sorted(path.glob("*.json")))}
    return {name: Report.from_json(text) for name, text in texts.items() if "environment" in json.loads(text)}


def _derived(case: Case) -> dict:
    timed = [t for t in case.comparison.timings if t.ok]
    return {
        "median_ms": {t.name: t.median_ms for t in timed},
        **({"between_ms": {t.name: case.timing(t.name).median_ms for t in timed}} if case.between else {}),
        "quartiles_ms": {t.name: t.quartiles_ms for t in timed},
        "rate": {t.name: case.rate(t.name) for t in timed},
        "ratio": case.ratios(),
        **({"ratio_back_to_back": case.back_to_back()} if case.between else {}),
        "beyond_l2": case.comparison.beyond_l2,
        "accurate": case.accurate(),
        "holds": case.holds(),
    }


def _case(data: dict) -> Case:
    comparison = dict(data["comparison"])
    comparison["timings"] = tuple(map(_timing, comparison["timings"]))
    plain = {k: v for k, v in data.items() if k != "derived"}
    return Case(
        **{
            **plain,
            "comparison": Comparison(**comparison),
            "alike": tuple(data.get("alike", ())),
            **{name: _bound(data.get(name)) for name in ("bound", "roof")},
            "readings": {k: tuple(Reading(**r) for r in v) for k, v in data["readings"].items()},
        }
    )


def _timing(data: dict) -> Timing:
    return Timing(**{**data, **{name: tuple(data.get(name, ())) for name in ("times_ms", "between_ms")}})


def _bound(data: dict | None) -> Bound | None:
    return data and Bound(tuple(data["against"]), data["at_least"])


# words of a shape that say what kind of problem it is, not how large
KIND = re.compile(r"H[\d/+]+|D\d+|full|causal|with|bias|a|@|b|b\.t\(\)|equal|skewed"
                  r"|document|sliding-window|prefix-LM|ALiBi|softcap")


def kind_of(shape: str) -> str:
    """What a shape says of the kind of problem, without its sizes."""
    return _words(shape, True)


def _words(shape: str, of_kind: bool) -> str:
    return " ".join(word for word in shape.split() if bool(KIND.fullmatch(word)) is of_kind)
