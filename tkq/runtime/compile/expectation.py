"""What a kernel's machine code must show, written down beside its recipe: needs neither torch nor the DSL."""
from __future__ import annotations

from dataclasses import dataclass

SMEM_LIMIT = 232448  # bytes that a block can have on sm_90, the 1024 that the driver reserves among them
REGISTER_FILE = 65536  # 32-bit registers of an SM


@dataclass(frozen=True)
class Expectation:
    """Judged by ``tkq.testing.sass.expect``, for each kernel of a recipe.

    tensor: tensor-core instructions (HGMMA, QGMMA) that must be there at least; 0 also means: none is asked for.
    waits_per_mma: with tensor, at most this many wgmma waits (WARPGROUP.DEPBAR) for each tensor instruction. ptxas
        serialises what it cannot prove safe by a wait for each: that is 1.
    instructions: opcode prefixes that must be there, as "UTMALDG", "LDG.E.128", "STG.E.128", "USETMAXREG".
    absent: opcode prefixes that must not be there.
    local_memory: local loads and stores allowed. 0: neither spills nor a stack.
    registers: a thread, at launch, at most.
    smem: static and dynamic bytes a block together, at most. The static count has 1024 that the driver reserves.
    roles: (registers, warpgroups) of each role that setmaxnreg makes, where they are not a producer and its consumers.
    others: (a word, what to expect) for kernels of a recipe that have the word in their name.
    """

    tensor: int = 0
    waits_per_mma: float = 0.5
    instructions: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    local_memory: int = 0
    registers: int = 255
    smem: int = SMEM_LIMIT
    roles: tuple[tuple[int, int], ...] = ()
    others: tuple[tuple[str, Expectation], ...] = ()

    def __post_init__(self):
        for name in ("instructions", "absent"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"Expectation: {name}: got {getattr(self, name)!r}, expected a tuple of prefixes")
