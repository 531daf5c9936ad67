"""The masks and scores of bench/ops/flex_attention.py, each with the kernel that tkq has for it or beside it.

Functions are as a user writes them. They and their block mask are made once for a size: every candidate of a case has
the same objects.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bench.peers.attention import Call, pairs

WINDOW = 1024  # a query sees itself and the 1023 keys before it
CAP = 5.0  # small enough that scores of normal numbers feel it
# the shares below are of LENGTH tokens; those of other lengths are in proportion
LENGTH = 16384
DOCUMENTS = (700, 3500, 1300, 2900, 450, 2200, 4100, 1234)  # tokens of each
PREFIXES = (3000, 5000)  # tokens that all see, of even and odd batch elements
SAME, BESIDE = "own kernel", "plain causal"  # of the same mask; of a causal one in the place of another


@dataclass(frozen=True)
class Size:
    batch: int
    heads: int
    length: int
    dim: int

    def __str__(self):
        return f"B{self.batch} S{self.length} H{self.heads} D{self.dim}"


@dataclass(frozen=True)
class Kind:
    """A mask, and a score function or none.

    mask, score: from a size and a device to what the user writes. pairs: of a query and a key that it sees, of all
    sequences and one head. each: does the mask differ between batch elements? call: what ``tkq.flash_attn`` or
    ``flash_attn_varlen`` is asked for beside it; same: is that the same problem?
    """

    name: str
    mask: Callable[[Size, torch.device], Callable]
    pairs: Callable[[Size], float]
    call: Callable[[Size], Call]
    score: Callable[[Size, torch.device], Callable] | None = None
    each: bool = False
    same: bool = True

    @property
    def own(self) -> str:
        """What the candidate is called that has the kernel of ``call``."""
        return SAME if self.same else BESIDE


class Functions(NamedTuple):
    score_mod: Callable | None
    block_mask: Any


@functools.cache
def functions(kind: Kind, size: Size, device: torch.device) -> Functions:
    """What ``flex_attention`` takes."""
    import tkq

    n, batch = size.length, size.batch if kind.each else None
    mask = tkq.create_block_mask(kind.mask(size, device), batch, None, n, n, device=device)
    return Functions(kind.score and kind.score(size, device), mask)


# ---- masks -------------------------------------------------------------------------------------------------------


def causal(size, device):
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def sliding_window(size, device):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def lengths(size: Size) -> tuple[int, ...]:
    """Of the documents of one sequence."""
    ends = [round(sum(DOCUMENTS[:i]) * size.length / LENGTH) for i in range(len(DOCUMENTS) + 1)]
    return tuple(b - a for a, b in itertools.pairwise(ends))


def document(size, device):
    each = torch.tensor(lengths(size), device=device)
    ids = torch.arange(len(DOCUMENTS), device=device, dtype=torch.int32).repeat_interleave(each)
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def prefixes(size: Size) -> tuple[int, ...]:
    return tuple(round(PREFIXES[i % 2] * size.length / LENGTH) for i in range(size.batch))


def prefix_lm(size, device):
    prefix = torch.tensor(prefixes(size), device=device, dtype=torch.int32)
    return lambda b, h, q_idx, kv_idx: (kv_idx < prefix[b]) | (q_idx >= kv_idx)


# ---- scores ------------------------------------------------------------------------------------------------------


def alibi(size, device):
    slopes = 2.0 ** (-8 / size.heads * torch.arange(1, size.heads + 1, device=device))
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def softcap(size, device):
    return lambda score, b, h, q_idx, kv_idx: CAP * torch.tanh(score / CAP)


# ---- both --------------------------------------------------------------------------------------------------------


def causal_pairs(size: Size) -> float:
    return size.batch * pairs(size.length, True)


def _plain(size: Size) -> Call:
    return Call(True)


KINDS = {kind.name: kind for kind in (
    Kind("causal", causal, causal_pairs, _plain),
    Kind("document", document, lambda size: size.batch * sum(pairs(n, True) for n in lengths(size)),
         lambda size: Call(True, max_seqlen=max(lengths(size)))),
    Kind("sliding-window", sliding_window, lambda size: size.batch * pairs(size.length, False, WINDOW - 1, 0),
         lambda size: Call(window=(WINDOW - 1, 0))),
    Kind("prefix-LM", prefix_lm, lambda size: causal_pairs(size) + sum(n * n / 2 for n in prefixes(size)), _plain,
         each=True, same=False),
    Kind("ALiBi", causal, causal_pairs, _plain, alibi, same=False),
    Kind("softcap", causal, causal_pairs, _plain, softcap, same=False),
)}
