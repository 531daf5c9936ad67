"""From what was asked of the backward to how its kernels are built: pure Python, tested without a GPU."""
import itertools
from dataclasses import dataclass, replace

from tkq.attention.backward_spec import WIDTHS, BackwardSpec
from tkq.attention.plan import LENGTHS

SHARED_BYTES = 226 * 1024  # of a block, what the loader grants; the rest is the hardware's
SEMAPHORE_BYTES = 512  # semaphores, and what aligns them; all tiles are multiples of their alignment
ROWS = 128  # queries of a block of the kernel that makes dQ alone: likewise


@dataclass(frozen=True)
class BackwardConfig:
    """tile: query rows of a step. block: keys of a block. stages: tiles of Q, and of dO, in flight; ds_stages: of dS;
    p_stages: of P on its way between warpgroups, where width is above 128. dq_cols: columns of a product of dQ (of a
    tile). registers: of a thread of each role, the producer, the dQ warpgroup, then the two warpgroups with keys or,
    where width is above 128, that with dV and that with dK.

    section_mb: queries, their gradients and the dQ accumulator that are worked on together, in MB of L2. longest_first:
    where there are masks, the blocks with most queries first; of packed sequences, those with most queries. dq_add: how
    dQ gets to its accumulator, "red" from registers, "bulk" by way of shared memory. turns: the warpgroups with keys
    make P one after the other, so that they stay out of step. late: dK of a tile is made under P of the next, which is
    a product more in each task. direct: dK and dV are written from registers, not by way of K's and V's memory;
    persistent: which then has the next task's K and V meanwhile. background: and the producer's neighbours do what
    kernels before and after would (``tkq.attention.backward_background``). chain: dQ
    goes from block to block, without zeroes, background and a kernel behind (``tkq.attention.backward_chain``). split:
    query heads of a task, of those that share a K/V head, where that divides their number, else one; dK and dV are
    handed on from task to task (``tkq.attention.backward_split``). 0: all of them in one task.

    Of the kernel that makes dQ alone: kv, keys of a K or V tile, kv_stages, tiles of each in flight, and
    alone_registers, of the producer and of a consumer."""

    tile: int = 64
    block: int = 128
    stages: int = 3
    ds_stages: int = 2
    p_stages: int = 2
    dq_cols: int = 64
    registers: tuple = (24, 72, 208)
    section_mb: int = 24
    longest_first: bool = True
    dq_add: str = "red"
    turns: bool = False
    late: bool = False
    direct: bool = False
    persistent: bool = False
    background: bool = False
    chain: bool = False
    split: int = 0
    kv: int = 128
    kv_stages: int = 2
    alone_registers: tuple = (24, 240)

    @property
    def roles(self) -> tuple:
        """(registers, warpgroups) of each."""
        one_each = len(self.registers) == 4
        return tuple((n, 1 if one_each or i < 2 else 2) for i, n in enumerate(self.registers))

    @property
    def section_bytes(self) -> int:
        return self.section_mb << 20

    def dq_parts(self, width: int) -> tuple[int, int]:
        """A tile of dQ as (parts of 64 rows, parts of dq_cols columns)."""
        return self.tile // 64, width // self.dq_cols

    def workspace_floats(self, spec: BackwardSpec, rows: int) -> int:
        """Of a query head of ``rows`` rows, in whole tiles: two statistics a row and, where dQ is added up, its fp32;
        and counters, two of each sequence, or four of each tile."""
        counters = 6 if self.chain else 2
        return -(-rows // self.tile) * (self.tile * (2 + (spec.width if spec.adds_dq else 0)) + counters) + 8

    def handed_floats(self, spec: BackwardSpec, keys: int) -> int:
        """More of it, of a K/V head of ``keys`` keys: dK and dV on their way, and a counter for each warp."""
        return -(-keys // self.block) * (2 * self.block * spec.width + 8) + 8 if self.split else 0

    def shared_bytes(self, width: int) -> int:
        """Of a block."""
        tile = self.tile * width * 2
        stats, ds = 8 * self.tile * self.stages, self.block * self.tile * 2 * self.ds_stages
        dq = 64 * self.dq_cols * 4 if self.dq_add == "bulk" else 0
        dq *= self.tile // 64 * (width // self.dq_cols) if self.chain else 1
        p = self.p_stages * 64 * self.tile * 2 if width > 128 else 0
        keys = 2 * self.block * width * 2
        return SEMAPHORE_BYTES + keys + 2 * self.stages * tile + stats + ds + dq + p

    def check(self, width: int) -> "BackwardConfig":
        """Itself; ValueError for a configuration that cannot run."""
        wide = width > 128
        if self.tile % 64 or width % self.dq_cols or self.block != (64 if wide else 128):
            raise ValueError(f"{self}: tile must be a multiple of 64, dq_cols divide width {width}, and block be "
                             "128, 64 where width is above 128")
        if self.dq_add not in ("red", "bulk") or (wide and self.turns):
            raise ValueError(f"{self}: dq_add is red or bulk; turns are for two warpgroups with keys")
        if self.persistent and not self.direct:
            raise ValueError(f"{self}: persistent needs direct")
        if self.background and (not self.persistent or self.dq_cols % 32):
            raise ValueError(f"{self}: background needs persistent, and dq_cols a multiple of 32")
        if self.chain and (wide or not self.persistent or self.background or self.split or self.dq_add != "bulk"):
            raise ValueError(f"{self}: chain needs persistent and dq_add bulk, without background and split, and is "
                             "for two warpgroups with keys")
        if self.split and (wide or not self.persistent or self.background):
            raise ValueError(f"{self}: split needs persistent without background, and is for two warpgroups with keys")
        if self.late and (wide or self.stages < 2):
            raise ValueError(f"{self}: late is for two warpgroups with keys, and 2 stages or more")
        if len(self.registers) != (4 if wide else 3) or sum(n * groups for n, groups in self.roles) > 512:
            raise ValueError(f"{self}: registers of {4 if wide else 3} roles, "
                             "512 for a thread of each warpgroup in all")
        alone = SEMAPHORE_BYTES + 4 * width * (ROWS + self.kv * self.kv_stages)
        for what, taken in (("", self.shared_bytes(width)), (" for dQ alone", alone)):
            if taken > SHARED_BYTES:
                raise ValueError(f"{self}: {taken} bytes of shared memory{what} at width {width}, "
                                 f"there are {SHARED_BYTES}")
        return self


def plan(spec: BackwardSpec, length: str = "medium", grouped: bool = False) -> BackwardConfig:
    """The configuration for a problem of short, medium or long sequences (``plan.length_class`` of the keys). grouped:
    several query heads share a K/V head."""
    config = _planned(spec, length, grouped)
    if spec.varlen and spec.left:  # of the kernel that makes dQ alone, the producer needs more registers
        config = replace(config, kv=min(config.kv, 96 if spec.width <= 128 else 48), alone_registers=(40, 232))
    return config


def _planned(spec, length, grouped):
    if spec.softcap:
        return _SOFTCAP[spec.width]
    if spec.width == 256 or spec.left or not spec.adds_dq:
        return SINGLE[spec.width]
    if spec.varlen and (spec.width == 64 or length == "short"):
        return SINGLE[64] if spec.width == 64 else _D128_SHORT
    if grouped:
        return _of_groups(spec, length)
    if spec.width == 64 and length == "long" and not spec.right:
        return SINGLE[64]
    return replace(_BEHIND[spec.width], section_mb=_section(spec, length))


def _section(spec, length):
    """Without masks it is only how far ahead zeroes are made."""
    if spec.width == 128 and not spec.right and (spec.varlen or length == "short"):
        return 24
    return 4 if length == "short" else 8


def _of_groups(spec, length):
    """Causal blocks end at different times, so that all query heads of all blocks at work would have to stay in L2
    together: background would only add to it, and short sequences have them in parts."""
    if spec.width == 128 and not spec.varlen and length == "short":
        return _SPLIT if spec.right else _BEHIND[128]
    return _STAYS[spec.width] if spec.right or length == "short" else SINGLE[spec.width]


# What a softcap's slope takes of registers is missing for tiles of 128 rows, and for wider parts of dQ.
_SOFTCAP = {64: BackwardConfig(dq_add="bulk"),
            128: BackwardConfig(dq_add="bulk", dq_cols=32, registers=(24, 56, 216)),
            256: BackwardConfig(block=64, stages=2, registers=(24, 72, 208, 208), kv=48, kv_stages=1)}
_D64 = BackwardConfig(tile=128, dq_add="bulk", turns=True)
_D128 = BackwardConfig(dq_add="bulk", late=True, direct=True)
_D128_SHORT = BackwardConfig(dq_add="bulk", turns=True)
_D256 = BackwardConfig(block=64, stages=2, registers=(24, 72, 208, 208), kv=64, kv_stages=1)
_STAYS = {64: replace(_D64, direct=True, persistent=True), 128: replace(_D128, turns=True, persistent=True)}
_BEHIND = {width: replace(config, background=True, registers=(32, 64, 208), section_mb=8)
           for width, config in _STAYS.items()}
_SPLIT = replace(_STAYS[128], split=2)
SINGLE = {64: _D64, 128: _D128, 256: _D256}  # of a width: blocks that have one task, what variants are made of


def shipped():
    """Every configuration that ``plan`` can choose, for the kinds of call that differ most, and what its machine code
    must show."""
    from tkq.runtime.recipe import Recipe, Shipped

    mask, same = {"right": True}, {"deterministic": True}
    kinds = {"": {}, "causal": mask, "grouped": {}, "grouped_causal": mask, "window": {"left": True, **mask},
             "causal_softcap": {"softcap": True, **mask}, "causal_dlse": {"dlse": True, **mask},
             "causal_no_dq": {"dq": False, **mask}, "deterministic": same, "causal_deterministic": {**mask, **same},
             "window_softcap_deterministic": {"left": True, "softcap": True, **mask, **same},
             "varlen": {"varlen": True}, "varlen_causal": {"varlen": True, **mask},
             "varlen_used_window_deterministic": {"varlen": True, "used_q": True, "used_k": True, "left": True, **mask,
                                                  **same}}
    out = {}
    for (kind, options), dtype, width, length in itertools.product(
            kinds.items(), ("bf16", "fp16"), WIDTHS, LENGTHS):
        spec = BackwardSpec(dtype, width, **options)
        config = plan(spec, length, kind.startswith("grouped"))
        recipe = Recipe("tkq.attention.backward:build", (spec, config))
        name = "_".join(("flash_attn_backward", dtype, f"d{width}", *filter(None, [kind]), length))
        usual = dtype == "bf16" and (width, length) != (128, "short")
        quick = usual and (kind in ("", "causal") or (kind == "varlen_causal" and width == 128))
        out.setdefault(recipe, Shipped(name, recipe, _expectation(spec, config), quick=quick))
    return list(out.values())


def _expectation(spec, config):
    from tkq.testing.expectation import Expectation

    dq = ({"red": "REDG", "bulk": "UBLKRED"}[config.dq_add],) if spec.adds_dq else ()
    return Expectation(
        tensor=24, instructions=("UTMALDG", "STG.E.128" if config.direct else "UTMASTG", "UBLKCP", "USETMAXREG",
                                 *["STSM"] * (spec.adds_dq or not config.direct), *dq),
        roles=config.roles,
        others=(("BackwardQueries", Expectation(tensor=24, instructions=("UTMALDG", "UTMASTG", "USETMAXREG", "STSM"))),
                ("BackwardPre", Expectation(instructions=("LDG.E.128",))),
                ("BackwardPost", Expectation(instructions=("LDG.E.128", "STSM", "UTMASTG")))))
