"""What a compiled kernel's PTX says of its roles, and what a picture of them says."""
import collections
import re

from tkq.runtime.compile import build


def compiled(recipe, folder):
    """({arrivals: semaphores} that a kernel initialises, the registers that its roles ask for). folder: for the PTX."""
    ptx = build.compile_recipe(recipe, options=f"--keep-ptx --dump-dir {folder}", runs=False).__ptx__
    values = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", ptx))
    counts = re.findall(r"mbarrier\.init\.\S+\s+\[[^\]]*\], (\S+);", ptx)
    registers = {int(n) for n in re.findall(r"setmaxnreg\.\S+\s+(\d+);", ptx)}
    return dict(collections.Counter(int(values.get(n, n)) for n in counts)), registers


def shown(picture):
    """The same, of a ``viz.Pipeline``."""
    return picture.arrivals(), {role.registers for role in picture.roles}
