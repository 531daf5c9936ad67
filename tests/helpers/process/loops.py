"""How many instructions the loops of a kernel have, of all its roles: an SM has an instruction cache of so many."""
import re

from tkq.testing import elf, sass

CACHED = 2048  # of 16 bytes: bench/results/h200/tuning/instruction_cache.json
SHORTEST = 40  # what has fewer is a wait


def in_loops(path) -> dict[str, int]:
    """{kernel: instructions in its outermost loops} of a file with machine code."""
    found = {}
    for cubin in elf.cubins(sass._code(path)[0]):
        for part in re.split(r"^\.text\.", sass._disassembled(cubin, "-c"), flags=re.M)[1:]:
            name, code = part.split(":", 1)
            found[name] = sum(end - begin for begin, end in outermost(*lines_and_labels(code)))
    return found


def lines_and_labels(code):
    """([instruction], {label: the number of the instruction behind it})."""
    lines, labels = [], {}
    for label, instruction in re.findall(r"^\s*(?:(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);)", code, flags=re.M):
        if label:
            labels[label] = len(lines)
        else:
            lines.append(instruction)
    return lines, labels


def outermost(lines, labels):
    """(first, last) of each. Waits' second tries stand behind the end of the code and jump back: no loops."""
    loops = {}
    for at, line in enumerate(lines):
        to = labels.get(next(iter(re.findall(r"BRA.*`\((\S+)\)", line)), ""), at)
        waits = any("SYNCS.PHASECHK" in x for x in lines[max(0, at - 4):at])
        if to <= at - SHORTEST and not waits:
            loops[to] = at
    inside = lambda a, b: any(c <= a and b <= d and (a, b) != (c, d) for c, d in loops.items())
    return [loop for loop in loops.items() if not inside(*loop)]
