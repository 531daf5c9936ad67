"""What a kernel's machine code (SASS) shows, without a GPU: ``report`` reads it, ``expect`` judges it.

The one helper for this: the tests, the demo and ``python -m tkq compile --report`` use it.
"""
from __future__ import annotations

import bisect
import collections
import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

from ..runtime.compile import build, launches
from ..runtime.compile.cache import unpacked
from ..runtime.compile.expectation import REGISTER_FILE, Expectation
from ..runtime.compile.recipe import Recipe
from . import elf

WARPGROUP = 128  # threads
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@!?U?P[T\d]+\s+)?"  # address, predicate
                   r"([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)([^;]*)")  # opcode with modifiers, operands
_MISSING = "nvdisasm was not found: pip install nvidia-cuda-nvdisasm"
_NEVER = "@!PT"  # the predicate of an instruction that is never executed: padding beside LDGSTS


@dataclass(frozen=True)
class KernelReport:
    """One kernel. Instructions are counted in the code, not as often as they are executed.

    registers: of each thread at launch. stack, static_smem, dynamic_smem: bytes; dynamic_smem is None where a call
    decides or where only the machine code was at hand. threads: of a block, None where a call decides.
    setmaxreg: what USETMAXREG asks for, as ("DEALLOC", 40). opcodes: count of each opcode with its modifiers; None
    where instructions were not read, which only nvdisasm can: counts raise RuntimeError then. order: the opcodes as
    they stand in the code.
    """

    name: str
    registers: int
    stack: int
    static_smem: int
    dynamic_smem: int | None
    threads: int | None
    setmaxreg: tuple = ()
    opcodes: dict | None = field(default_factory=dict)
    order: tuple = field(default=(), repr=False)

    def count(self, *prefixes: str) -> int:
        """Instructions whose opcode is, or begins with and goes on with a modifier, one of these: "LDG.E.128"."""
        return sum(n for op, n in self._read.items() if any(op == p or op.startswith(p + ".") for p in prefixes))

    def wide(self, opcode: str) -> int:
        """Instructions of an opcode that move 128 bits a thread, whatever their other modifiers."""
        return sum(n for op, n in self._read.items() if op.split(".")[0] == opcode and "128" in op.split("."))

    @property
    def _read(self):
        if self.opcodes is None:
            raise RuntimeError(f"the instructions of {self.name} were not read: {_MISSING}")
        return self.opcodes

    @property
    def smem(self) -> int:
        """Static and dynamic bytes together."""
        return self.static_smem + (self.dynamic_smem or 0)

    @property
    def spill_loads(self) -> int:
        return self.count("LDL")

    @property
    def spill_stores(self) -> int:
        return self.count("STL")

    @property
    def tensor(self) -> int:
        """wgmma instructions."""
        return self.count("HGMMA", "QGMMA", "IGMMA")

    @property
    def arrives(self) -> int:
        """wgmma fences."""
        return self.count("WARPGROUP.ARRIVE")

    @property
    def waits(self) -> int:
        """Waits for wgmma."""
        return self.count("WARPGROUP.DEPBAR")

    @property
    def tma(self) -> int:
        """Tensor TMA loads, stores and reductions, and 1-D bulk copies."""
        return self.count("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")

    @property
    def total(self) -> int:
        return sum(self._read.values()) - self.count("NOP")


def report(what, instructions: bool = True) -> list[KernelReport]:
    """The kernels of a Recipe (from the disk cache, compiled where it is not there), of a file (.so, .o, .cubin, an
    entry of the cache), or of what the DSL's compiler returned.

    Args:
        instructions: False reads no instructions, but registers, stack, shared memory and threads: that takes no
            nvdisasm, which ``missing`` looks for.

    Raises:
        RuntimeError: nvdisasm is not installed, or refuses the code.
        ValueError: nothing in it was compiled for a GPU.

    Example::

        from tkq.warmup import catalog

        kernel, = testing.report(catalog.select(["softmax-bf16-n4096"])[0].recipe)
        print(kernel.registers, kernel.smem, kernel.count("LDG.E.128"))
    """
    return reports([what], instructions)[0]


def reports(several: list, instructions: bool = True) -> list[list[KernelReport]]:
    """``report`` of each of several, whose instructions are read together: nvdisasm takes 0.28 s to begin, and a
    hundredth of a second for a kernel."""
    codes = [_code(what) for what in several]
    files = [elf.cubins(data) for data, _ in codes]
    for what, of in zip(several, files):
        if not any(map(elf.kernels, of)):
            raise ValueError(f"{what}: no machine code of a GPU in it")
    listings = iter(_listings([cubin for of in files for cubin in of]) if instructions else itertools.repeat(None))
    return [[_kernel(name, facts, dynamic.get(name), lines)
             for cubin in of for lines in (next(listings),) for name, facts in elf.kernels(cubin).items()]
            for of, (_, dynamic) in zip(files, codes)]


def missing() -> str | None:
    """One line on what cannot be shown of machine code here, and what to install; None where all can."""
    if nvdisasm() is not None:
        return None
    return ("nvdisasm is missing, so that instructions and spills are not shown and not judged: pip install "
            "nvidia-cuda-nvdisasm")


def shown(name: str, what) -> str:
    """``report`` of ``what`` as lines for a person, by as much as can be read here; the last one says what cannot."""
    note = missing()
    lines = text(name, report(what, instructions=note is None))
    return lines if note is None else f"{lines}\n    {note}"


def expect(kernel: KernelReport, wanted: Expectation = Expectation()) -> list[str]:  # noqa: B008  (frozen)
    """In which ways a kernel is not as expected, a sentence each; empty: in none. ``assert_sass`` raises instead.

    Args:
        kernel: one of those that ``report`` returns. Without instructions, they are not judged.
        wanted: limits on registers and shared memory, instructions that must or must not be there.

    Example::

        from tkq.warmup import catalog

        kernel, = testing.report(catalog.select(["softmax-bf16-n4096"])[0].recipe)
        wrong = testing.expect(kernel, testing.Expectation(registers=16))
        print(wrong)  # a sentence for each limit that does not hold
    """
    wrong = [] if kernel.opcodes is None else _wrong_instructions(kernel, wanted)
    if kernel.stack and not wanted.local_memory:
        wrong.append(f"a stack of {kernel.stack} bytes")
    if kernel.registers > wanted.registers:
        wrong.append(f"{kernel.registers} registers, at most {wanted.registers} expected")
    if kernel.smem > wanted.smem:
        wrong.append(f"{kernel.smem} bytes of shared memory, at most {wanted.smem} expected")
    return wrong if kernel.opcodes is None else wrong + _wrong_launch(kernel, wanted.roles)


def _wrong_instructions(kernel, wanted):
    wrong = [f"no {i}" for i in wanted.instructions if not kernel.count(i)]
    wrong += [f"{kernel.count(i)} {i}, none expected" for i in wanted.absent if kernel.count(i)]
    local = kernel.spill_loads + kernel.spill_stores
    if local > wanted.local_memory:
        wrong.append(f"{kernel.spill_loads} local loads and {kernel.spill_stores} local stores; "
                     f"at most {wanted.local_memory} expected")
    if kernel.tensor < wanted.tensor:
        wrong.append(f"{kernel.tensor} tensor-core instructions, at least {wanted.tensor} expected")
    if kernel.tensor and kernel.waits > wanted.waits_per_mma * kernel.tensor:
        wrong.append(f"wgmma is serialised: {kernel.waits} waits for {kernel.tensor} tensor-core instructions (or the "
                     f"source has as many: waits_per_mma is {wanted.waits_per_mma:g})")
    return wrong


def expect_all(kernels: list[KernelReport], wanted: Expectation) -> list[str]:
    """``expect`` for each kernel of a recipe, named where there are several."""
    of = lambda k: next((other for word, other in wanted.others if word in k.name), wanted)
    return [(f"{k.name}: " if len(kernels) > 1 else "") + text for k in kernels for text in expect(k, of(k))]


def assert_sass(what, wanted: Expectation = Expectation()) -> list[KernelReport]:  # noqa: B008  (frozen)
    """The machine code is as expected, or AssertionError says in which ways it is not. Needs no GPU.

    Args:
        what: as ``report`` takes it: a Recipe (``MyKernel.recipe(x=x, ...)``), a file, or what ``cute.compile`` gave.
            Or the list that ``report`` returned.
        wanted: without it: no spills, no stack, no serialised wgmma, and a launch that an SM can take.

    Returns:
        The reports, for what else a test has to say of them.

    Raises:
        AssertionError: with the report, and what is wrong. And what ``report`` raises.

    Example::

        from tkq.warmup import catalog

        shipped = catalog.select(["softmax-bf16-n4096"])[0]
        testing.assert_sass(shipped.recipe, testing.Expectation(registers=64, instructions=("STG.E.128",)))
    """
    kernels = what if isinstance(what, list) else report(what)
    wrong = expect_all(kernels, wanted)
    if wrong:
        raise AssertionError(f"{'; '.join(wrong)}\n{text(getattr(what, 'builder', 'kernel'), kernels)}")
    return kernels


def register_budget(few: int, many: int, consumers: int, launch_registers: int, threads: int) -> str | None:
    """What is wrong with a split of registers between roles by setmaxnreg; None: nothing.

    One warpgroup goes down to ``few`` registers a thread and ``consumers`` of them up to ``many``. More than the block
    got at launch is never granted: the kernel hangs.
    """
    need, have = WARPGROUP * (few + many * consumers), launch_registers * threads
    if need <= have:
        return None
    return (f"setmaxnreg hangs: {few} x {WARPGROUP} + {many} x {consumers * WARPGROUP} = {need} registers, but the "
            f"launch gives {launch_registers} x {threads} = {have}")


def text(name: str, kernels: list[KernelReport]) -> str:
    """The report as lines for a person."""
    lines = []
    for k in kernels:
        smem = "?" if k.dynamic_smem is None else k.smem
        if k.opcodes is None:
            lines.append(f"{name}: {k.registers} registers, {smem} bytes of shared memory, a stack of {k.stack} bytes")
            continue
        lines.append(f"{name}: {k.registers} registers, {smem} bytes of shared memory, "
                     f"{k.spill_loads + k.spill_stores} spills, {k.total} instructions")
        counted = {"tensor": k.tensor, "wgmma waits": k.waits, "TMA": k.tma, "LDG.128": k.wide("LDG"),
                   "STG.128": k.wide("STG"), "LDGSTS.128": k.wide("LDGSTS"), "USETMAXREG": len(k.setmaxreg)}
        lines.append("    " + (", ".join(f"{label} {n}" for label, n in counted.items() if n) or "no wide access"))
    return "\n".join(lines)


def by_address(what, names: tuple[str, ...] = ("",)) -> dict[str, dict[int, str]]:
    """{kernel: {address: instruction with its operands}} of what ``report`` takes: addresses as tools name them.

    names: nothing is looked at but code with a kernel whose name begins with one of them."""
    found = {}
    for cubin in elf.cubins(_code(what)[0]):
        if not any(name.startswith(names) for name in elf.kernels(cubin)):
            continue
        current = None
        for line in _disassembled(cubin, "-c").splitlines():
            section = re.match(r"^\.text\.(\S+):", line)
            if section:
                current = found.setdefault(section.group(1), {})
            instruction = re.match(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", line)
            if instruction and current is not None:
                current[int(instruction.group(1), 16)] = instruction.group(2).strip()
    return found


def _wrong_launch(kernel, roles):
    if kernel.threads is None:
        return ["setmaxnreg in a block of unknown size"] if kernel.setmaxreg else []
    wrong = []
    granted = -(-kernel.registers // 8) * 8  # the hardware gives them in eights
    if granted * kernel.threads > REGISTER_FILE:
        wrong.append(f"{granted} registers x {kernel.threads} threads: a multiprocessor has {REGISTER_FILE}")
    if roles:
        return wrong + _wrong_roles(kernel, roles, granted)
    down = [n for kind, n in kernel.setmaxreg if kind == "DEALLOC"]
    up = [n for kind, n in kernel.setmaxreg if kind != "DEALLOC"]
    if up:
        # The first warpgroup is the producer; where it keeps its registers, it has those of the launch.
        budget = register_budget(max(down, default=granted), max(up), kernel.threads // WARPGROUP - 1, granted,
                                 kernel.threads)
        wrong += [budget] if budget else []
    return wrong


def _wrong_roles(kernel, roles, granted):
    found, requested = sorted({n for _, n in kernel.setmaxreg}), sorted({n for n, _ in roles})
    if found != requested:
        return [f"setmaxnreg asks for {found}, expected {requested}"]
    need, have = WARPGROUP * sum(n * groups for n, groups in roles), granted * kernel.threads
    return [f"setmaxnreg hangs: {need} registers in all, but the launch gives {have}"] if need > have else []


def _code(what) -> tuple[bytes, dict]:
    """(bytes with the machine code, {kernel: dynamic shared memory})."""
    if isinstance(what, Recipe):
        what = build.entry_of(what).path
    if isinstance(what, (str, os.PathLike)):
        data, note = unpacked(pathlib.Path(what).read_bytes())
        return data, note.get("dynamic_smem", {})
    if not hasattr(what, "export_to_c"):
        raise TypeError(f"report: got {type(what).__name__}, expected a Recipe, a path or what cute.compile returned")
    return launches.machine_code(what), launches.dynamic_smem(what)


def _kernel(name, facts, dynamic, lines):
    if lines is None:
        return KernelReport(name, dynamic_smem=dynamic, opcodes=None, **facts)
    order = tuple(sys.intern(opcode) for opcode, _ in lines[name])
    setmaxreg = tuple((opcode.split(".")[1], int(operands.split(",")[-1].strip(), 0))
                      for opcode, operands in lines[name] if opcode.startswith("USETMAXREG"))
    return KernelReport(name, dynamic_smem=dynamic, setmaxreg=setmaxreg, opcodes=dict(collections.Counter(order)),
                        order=order, **facts)


def _listings(cubins: list) -> list[dict[str, list[tuple[str, str]]]]:
    """{kernel: [(opcode with modifiers, operands)]} of each: those for one architecture in one run of nvdisasm, which
    gets their instructions alone, one kernel's behind the other's."""
    texts, found = [elf.text(cubin) for cubin in cubins], [{} for _ in cubins]
    for arch in {*map(elf.architecture, cubins)}:
        code, parts = b"", []
        for one, of in ((one, of) for cubin, one, of in zip(cubins, texts, found) if elf.architecture(cubin) == arch):
            for name, instructions in one.items():
                parts.append((len(code), of.setdefault(name, [])))
                code += instructions
        starts = [start for start, _ in parts]
        for line in _disassembled(code, "-b", f"SM{arch}{'a' * (arch >= 90)}").splitlines():
            instruction = _LINE.match(line)
            if instruction and _NEVER not in line:
                address, opcode, operands = instruction.groups()
                parts[bisect.bisect(starts, int(address, 16)) - 1][1].append((opcode, operands))
    return found


def _disassembled(code, *options):
    tool = nvdisasm()
    if tool is None:
        raise RuntimeError(_MISSING)
    with tempfile.TemporaryDirectory(prefix="tkq-sass-") as folder:
        path = os.path.join(folder, "code")
        pathlib.Path(path).write_bytes(code)
        # Without the analysis of data flow: a quarter of the tool's time, for where indirect jumps go, which nothing
        # here reads.
        done = subprocess.run([tool, *options, "-ndf", path], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def nvdisasm() -> str | None:
    """The path of nvdisasm: from the wheel nvidia-cuda-nvdisasm, else on PATH; None where there is none."""
    for root in sys.path:
        path = os.path.join(root or ".", "nvidia", "cu13", "bin", "nvdisasm")
        if os.access(path, os.X_OK):
            return path
    return shutil.which("nvdisasm")
