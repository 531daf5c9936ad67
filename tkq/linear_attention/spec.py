"""What was asked for, as far as a kernel of linear attention depends on it: a frozen dataclass, the compile key."""
from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bf16", "fp16")
GATES = ("none", "head", "token")
HEAD_DIMS = tuple(range(32, 257, 16))
LEAST = 2.0**-4  # size of beta from which on the delta rule's forward keeps a corrected value, else what values lack
GROUP = 64  # columns of V of a warpgroup of the state
NARROW = 128  # columns of K: two warpgroups of a block have the registers for states of that width, one for wider ones
COLUMN_DIMS = tuple(range(32, NARROW + 1, 16))  # K with gates for each column
VALUE_DIMS = tuple(range(32, 257, 16))
WIDE = "bf16", "fp16", "fp32"


@dataclass(frozen=True)
class SsdSpec:
    """What Mamba-2's state space dual has beside linear attention (see `engine.ssd.Ssd`).

    dt, bias, skip: dtypes of dt, dt_bias and D; the latter two may be None. softplus: dt is that of dt + dt_bias.
    skip_dims: of D: 1, a number for each head; 2, one for each of its V columns. gated: outputs are multiplied by
    silu(z), which has the place of the engine's x; not reversed and without dot. skip_gradient: with dot, reversed: for
    each head and column of V the sum of v times x over the tokens.
    """

    dt: str
    bias: str | None = None
    softplus: bool = False
    skip: str | None = None
    skip_dims: int = 1
    gated: bool = False
    skip_gradient: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dt", self.dt, WIDE), ("bias", self.bias, (None, *WIDE)),
                                   ("skip", self.skip, (None, *WIDE)), ("skip_dims", self.skip_dims, (1, 2))):
            if got not in allowed:
                raise ValueError(f"SsdSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class LinearSpec:
    """A forward of linear attention.

    dtype: of q, k, v and o. head_dim, value_dim: K and V. gate: "none"; "head", a logarithm of a decay for each head;
    "token", one for each token and head. initial, final: dtypes of the states that come in and go out, or None.
    dot: of each token and head also the sum of o times another tensor, from o before it is rounded, and with no operand
        rounded to 16 bits; with a gate. With delta, which is reversed then, operands are rounded, and the other tensor
        is what a forward with updates kept: sums are beta's gradient, o is that of the values.
    delta: beta's dtype, with the delta rule. Reversed it is the gradient of the values that comes out, and q in the
        place of which are the keys (see `delta.gradients`).
    reverse: from the last token to the first, each of which sees those behind it: gradients are of this form.
    strict: a token does not see itself; without delta.
    updates: with delta, not reversed: corrected values come out, too; of a beta below `LEAST`, what values lack (see
        `engine.delta`).
    inverse: with delta: "out", each chunk's inverse comes out, not reversed; "in", it is given, as it came out:
        reversed always, otherwise of segments' transfers and outputs; None.
    others: a token sees those of other chunks alone; without gates, delta and strict.
    ssd: Mamba-2's gate and factors, with the gate "token" and without delta; or None.
    state_v_first: states are V by K, and not K by V.
    checkpoints: dtype of states that are written on the way, not reversed; or None.
    packed: dtype of cu_seqlens, with sequences of any length one behind the other; None: a batch.
    pool: dtype of state_indices, with states in rows of a pool, which is initial and final; None: one behind the other.
    part: of segments of a sequence, one behind the other in the states' rows: "states", what each adds to a state, and
        what becomes of one by it, without outputs; "transfers", the latter with the delta rule; "outputs", with the
        state that each begins with, and, with final, that behind each; None: no segments.
    second: "query", a second query of each token; "pair", a second key and value (see `engine.second`); or None. K of
        128 at most, without delta, strict, others and ssd. With dot pairs of a chunk are used both ways, by the launch
        with a second query: that with a second key and value sees other chunks alone (see `engine.both_ways`).
    summed: outputs are of two neighbouring heads each, which share values, or of second operands ones of them; every
        head has queries of its own. With second, or with ssd without skip and gated; value_dim above 64.
    less: with second "pair": another tensor, which is taken off what comes out; with dot it is added.
    kept: of keys, or reversed of queries, that are what the delta rule's forward has kept with updates: beta's dtype,
        which makes corrected values of them. Without delta and ssd; or None.
    blocks: with delta, and updates or dot, or of segments the outputs, or reversed the states: a chunk is gone through
        block by block (see `blocks`), and there is no inverse. K of 64 or 128, V above 64.
    reach: with delta and gates: of segments' states and transfers which chunks matter is given (see `split.reach`); of
        the forward by blocks, without a part, where segments of its sequences begin (see `OverlappingSegments`).
    halves: with reach, of states: segments are halves, two neighbours one of those whose states are needed.
    """

    dtype: str
    head_dim: int
    value_dim: int
    gate: str = "none"
    initial: str | None = None
    final: str | None = None
    reverse: bool = False
    delta: str | None = None
    dot: bool = False
    strict: bool = False
    updates: bool = False
    packed: str | None = None
    pool: str | None = None
    ssd: SsdSpec | None = None
    state_v_first: bool = False
    others: bool = False
    checkpoints: str | None = None
    part: str | None = None
    second: str | None = None
    inverse: str | None = None
    summed: bool = False
    less: bool = False
    kept: str | None = None
    blocks: bool = False
    reach: bool = False
    halves: bool = False

    def __post_init__(self):
        for name, got, allowed in (("dtype", self.dtype, DTYPES), ("gate", self.gate, GATES),
                                   ("head_dim", self.head_dim, HEAD_DIMS), ("value_dim", self.value_dim, VALUE_DIMS),
                                   ("initial", self.initial, (None, "fp32", "bf16")),
                                   ("final", self.final, (None, "fp32", "bf16")),
                                   ("checkpoints", self.checkpoints, (None, "fp32")),
                                   ("delta", self.delta, (None, "fp32", "bf16")),
                                   ("kept", self.kept, (None, "fp32", "bf16")),
                                   ("packed", self.packed, (None, "int32", "int64")),
                                   ("pool", self.pool, (None, "int32", "int64")),
                                   ("part", self.part, (None, "states", "transfers", "outputs")),
                                   ("second", self.second, (None, "query", "pair")),
                                   ("inverse", self.inverse, (None, "out", "in"))):
            if got not in allowed:
                raise ValueError(f"LinearSpec: {name} is {got!r}, allowed are {', '.join(map(str, allowed))}")
        if self.delta and self.strict:
            raise ValueError("LinearSpec: delta and strict, allowed is one of them")
        if self.delta and self.gate == "head":
            raise ValueError("LinearSpec: gate is 'head', allowed with delta are 'none' and 'token'")
        self._check_inverse()
        if self.dot and not (self.reverse if self.delta else self.gated):
            raise ValueError("LinearSpec: dot, allowed is with a gate, or with delta and reversed")
        if self.ssd and (self.gate != "token" or self.delta or self.strict):
            raise ValueError("LinearSpec: ssd, allowed is with the gate 'token' and without delta and strict")
        if self.gated_by_x and (self.reverse or self.dot):
            raise ValueError("LinearSpec: ssd.gated, allowed is without reverse and without dot")
        if self.ssd and self.ssd.skip_gradient and not (self.reverse and self.dot):
            raise ValueError("LinearSpec: ssd.skip_gradient, allowed is with reverse and dot")
        self._check_states()

    def _check_states(self):
        if self.checkpoints and self.reverse:
            raise ValueError("LinearSpec: checkpoints, allowed is not reversed")
        if self.pool and (self.reverse or self.initial is None or self.initial != self.final):
            raise ValueError("LinearSpec: pool, allowed is not reversed, with initial and final of one dtype")
        self._check_others()
        self._check_part()
        self._check_second()

    def _check_inverse(self):
        if self.blocks:
            of_whole = self.dot if self.reverse else self.updates
            fits = of_whole or self.part == ("states" if self.reverse else "outputs")
            if self.inverse or not (self.delta and fits and (self.writes or self.reverse)) or (
                    self.head_dim not in (GROUP, NARROW) or self.value_dim <= GROUP):
                raise ValueError("LinearSpec: blocks, allowed is with delta, and updates or reverse and dot, or of "
                                 "segments the outputs, or reversed the states, without inverse, with head_dim "
                                 f"{GROUP} or {NARROW} and value_dim above {GROUP}")
            return
        if self.updates and (self.reverse or not self.inverse):
            raise ValueError("LinearSpec: updates, allowed is with delta and inverse, and not reversed")
        known = self.inverse == "in"
        if (self.delta and self.reverse and not (known and (self.dot or not self.writes))) or (
                self.inverse and not self.delta) or (
                not self.reverse and known != (self.part in ("transfers", "outputs")) and self.delta):
            raise ValueError(f"LinearSpec: inverse {self.inverse!r}, allowed is with delta; reversed 'in', with dot "
                             "where there are outputs; otherwise 'in' of segments' transfers and outputs alone")

    def _check_part(self):
        states = [("fp32", None), ("fp32", "fp32")] if self.part == "outputs" else [(None, "fp32")]
        if self.part == "transfers" and (self.reverse or not self.delta):
            raise ValueError("LinearSpec: part 'transfers', allowed is with delta and not reversed")
        if self.reach and (not self.delta or self.gate == "none" or (self.writes and not self._plain)):
            raise ValueError("LinearSpec: reach, allowed is with delta and a gate, of segments' states and "
                             f"transfers, or of a batch's forward alone, with head_dim {GROUP} or {NARROW} and "
                             f"value_dim above {GROUP}")
        if self.halves and not (self.reach and self.part == "states"):
            raise ValueError("LinearSpec: halves, allowed is with reach, of segments' states")
        if self.part and ((self.initial, self.final) not in states or self.packed or self.pool):
            raise ValueError(f"LinearSpec: part {self.part!r}, allowed is with initial, final "
                             f"{' or '.join(map(str, states))} and without packed and pool")

    def _check_second(self):
        others = self.delta or self.strict or self.others or self.ssd or self.head_dim > NARROW
        if self.second and (others or (self.second == "query" and not self.writes)):
            raise ValueError(f"LinearSpec: second {self.second!r}, allowed is with head_dim of {NARROW} at most, "
                             "without delta, strict, others and ssd, and of segments' states 'pair' alone")
        of_ssd = self.ssd and self.ssd.skip is None and not self.ssd.gated
        if self.summed and not ((self.second or of_ssd) and self.writes and self.value_dim > GROUP):
            raise ValueError("LinearSpec: summed, allowed is with second, or with ssd without skip and gated, with "
                             f"outputs and value_dim above {GROUP}")
        if self.kept and (self.delta or self.ssd):
            raise ValueError("LinearSpec: kept, allowed is without delta and ssd")
        if self.less and not (self.second == "pair" and self.writes):
            raise ValueError("LinearSpec: less, allowed is with second 'pair' and outputs")

    def _check_others(self):
        if self.others and (self.gated or self.delta or self.strict):
            raise ValueError("LinearSpec: others, allowed is without gates, delta and strict")

    @property
    def _plain(self):
        """Is it a batch's forward by blocks, of whole sequences?"""
        others = self.reverse or self.updates or self.part or self.packed or self.pool or self.checkpoints
        return not (others or self.inverse) and self.head_dim in (GROUP, NARROW) and self.value_dim > GROUP

    @property
    def overlapping(self) -> bool:
        """Does a launch that writes outputs take `reach` (see `OverlappingSegments`)?"""
        return self.reach and self.writes

    @property
    def gated(self) -> bool:
        """Does the state decay, or has a key a factor?"""
        return self.gate != "none" or self.kept is not None

    @property
    def scored(self) -> bool:
        """Are there outputs of a chunk's own tokens?"""
        return self.queried and not self.others and not (self.second == "pair" and self.dot)

    @property
    def both_ways(self) -> bool:
        """Do a chunk's pairs give keys something, too?"""
        return self.second == "query" and self.dot

    @property
    def gated_by_x(self) -> bool:
        """Are outputs multiplied by silu of another tensor?"""
        return self.ssd is not None and self.ssd.gated

    @property
    def has_x(self) -> bool:
        """Does a launch read another tensor beside the values?"""
        return ((self.dot and self.second != "pair") or self.gated_by_x) and self.writes

    @property
    def writes(self) -> bool:
        """Are there outputs?"""
        return self.part not in ("states", "transfers")

    @property
    def queried(self) -> bool:
        """Is something made of queries? Reversed, the delta rule's state is, too."""
        return self.writes or (bool(self.delta) and self.reverse)

    @property
    def exact(self) -> bool:
        """Are the state and what it takes up in two parts as operands?"""
        return self.dot and not self.delta

    @property
    def exact_outputs(self) -> bool:
        """Is what the state gives queries?"""
        return self.exact and self.writes

    @property
    def exact_scores(self) -> bool:
        """Are scores? Where queries and keys get a pair's part of the same product, rounding it takes as much from
        both, and their differences have nothing of it."""
        return self.exact_outputs and not self.second

    @property
    def dots(self) -> bool:
        """Are there sums of outputs times another tensor?"""
        return self.dot and self.writes


PARTS = 8  # of sums: one for each 64 of a head's columns, K's and V's, each up to 256 (see `gradients.parts_of`)


@dataclass(frozen=True)
class ProductsSpec:
    """Sums of the products of two states (see `suffix.products.StateProducts`). head_dim: K."""

    head_dim: int

    def __post_init__(self):
        if self.head_dim % 16 or not 32 <= self.head_dim <= 256:
            raise ValueError(f"ProductsSpec: head_dim is {self.head_dim}, allowed are multiples of 16 from 32 to 256")


@dataclass(frozen=True)
class StepSpec:
    """Mamba-2's step sizes (see `suffix.steps.StepSizes`): dtypes of dt, and of dt_bias or None."""

    dt: str
    bias: str | None = None
    softplus: bool = False


@dataclass(frozen=True)
class SuffixSpec:
    """Sums over each token and those behind it (see `suffix.kernel.SuffixSums`). x, less: of how many parts these are
    sums; less 0: nothing is taken off. packed: dtype of cu_seqlens, or None. pool: none of the states that
    `engine.packed` finds for the engine. steps: what is taken off is multiplied by Mamba-2's step sizes, whose
    gradients come out; with less; or None."""

    x: int = 1
    less: int = 0
    end: bool = False
    packed: str | None = None
    pool = None
    steps: StepSpec | None = None

    def __post_init__(self):
        if self.steps and not self.less:
            raise ValueError("SuffixSpec: steps, allowed is with less")
        for name, got, least in (("x", self.x, 1), ("less", self.less, 0)):
            if not least <= got <= PARTS:
                raise ValueError(f"SuffixSpec: {name} is {got}, allowed are {least} to {PARTS}")
        if self.packed not in (None, "int32", "int64"):
            raise ValueError(f"SuffixSpec: packed is {self.packed!r}, allowed are None, int32, int64")
