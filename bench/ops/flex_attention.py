"""flex_attention beside tkq's own kernels and torch's FlexAttention, forward and backward, and create_block_mask.

    python -m bench.ops.flex_attention [--sections calls,forward,backward,block_mask] [--match document]

bf16. Shapes: batch, heads, length, head dimension; of block_mask a length. Each with several masks, which --match
chooses by name: causal, document, sliding-window, prefix-LM, and with a score function on a causal mask, ALiBi and
softcap. FLOPs: 4 * D for a query and a key that it sees, 10 * D backward; the bytes of a block mask are those of the
mask in memory, one for a query and a key. backward: of the gradients alone. Block masks are made outside of timing, one
for all candidates. A result is judged by the formula in float64, on a head of the first sequence and one of the last.
Results go to OUT/flex_attention.json after every case.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import torch

from bench.core import harness
from bench.core.accuracy import EQUAL
from bench.core.command import Bench, Job, main
from bench.core.harness import Call
from bench.core.results import Bound, within
from bench.ops.attention_forward import CALL_US
from bench.peers import attention, flex
from bench.peers.flex import FA4, TRITON
from bench.peers.flex_masks import BESIDE, KINDS, Kind, Size, causal_pairs, functions
from tkq.testing.timing import relative_error

SHAPES = ((2, 16, 16384, 128),)
WIDE = ((2, 8, 8192, 256),)  # of the backward, too
AT_LEAST = {FA4: 1.15, TRITON: 1.5}  # times torch's FlexAttention
OWN = {"forward": 0.95, "backward": 0.90}  # of the kernel that tkq has for the same mask
OF_CAUSAL, SCORED = 0.90, 0.85  # of plain causal attention: another mask, by its share of the pairs; a score function
BLOCK_MASK_SHAPES, MASKS, BLOCK_MASK = ((32768,),), ("causal", "document"), 2.0  # times torch, compiled
KNOWN_US = 30.0  # of an eager call, to know functions that were seen before
ROWS, BLOCK = 2048, 128  # judged at a time: rows of scores; of a block mask


def own_bound(kind: Kind, size: Size, section: str) -> Bound:
    if kind.same:
        return Bound((kind.own,), OWN[section])
    at_least = SCORED if kind.score else OF_CAUSAL * causal_pairs(size) / kind.pairs(size)
    return Bound((kind.own,), at_least)


def jobs(section: str, shapes) -> Iterator[Job]:
    op = "flex_attention" if section == "forward" else "flex_attention_backward"
    ours = flex.ours if section == "forward" else flex.ours_backward
    for shape in shapes:
        size = Size(*shape)
        for kind in KINDS.values():
            work = (4 if section == "forward" else 10) * size.heads * size.dim * kind.pairs(size)
            question = harness.Question(
                section, op, f"{kind.name} {size}", "TFLOP/s", work, Bound((FA4,), AT_LEAST[FA4]),
                roof=own_bound(kind, size, section), instead=Bound((TRITON,), AT_LEAST[TRITON]), equal_error=EQUAL)
            yield Job(question, ours(kind, size), op, (kind.own, TRITON, FA4),
                      inputs(kind, size, section), error(kind, size, section), dict(kind=kind, size=size))


def inputs(kind: Kind, size: Size, section: str) -> Callable[[int], tuple]:
    """i -> (q, k, v), or (do, q, k, v, o, lse) with o and lse by our own forward."""
    qkv = attention.inputs(size.batch, size.length, size.heads, size.heads, size.dim, size.dim)

    def backward(i):
        tensors = qkv(i)
        return qkv(1000 + i)[0], *tensors, *flex.with_lse(kind, size)(*tensors)

    return qkv if section == "forward" else backward


# ---- what is right -----------------------------------------------------------------------------------------------


def exact(kind: Kind, size: Size, tensors: tuple, b: int, h: int) -> list[torch.Tensor]:
    """[o], and [dq, dk, dv] where do stands before q, k and v, of a head of one sequence: by the formula in float64, of
    some rows at a time."""
    *do, q, k, v = (x[b, :, h].double() for x in tensors)
    score_mod, block_mask = functions(kind, size, q.device)
    b, h, kv = *torch.tensor([b, h], device=q.device), torch.arange(size.length, device=q.device)
    found, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows in kv.unsqueeze(1).split(ROWS):
        part = slice(rows[0].item(), rows[-1].item() + 1)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q[part], k, v)]
            s = leaves[0] @ leaves[1].T * size.dim**-0.5
            if score_mod is not None:
                s = score_mod(s, b, h, rows, kv)
            o = s.masked_fill(~block_mask.mask_mod(b, h, rows, kv), -torch.inf).softmax(-1) @ leaves[2]
        if not do:
            found.append(o.detach())
            continue
        dq, *of_keys = torch.autograd.grad(o, leaves, do[0][part])
        found.append(dq)
        for total, x in zip((dk, dv), of_keys):
            total += x
    return [torch.cat(found), *((dk, dv) if do else ())]


def error(kind: Kind, size: Size, section: str) -> Callable:
    """The largest relative error of o, or of dq, dk and dv, of two heads; None of another problem's."""
    def of(name, given, found):
        if name == BESIDE:
            return None
        given, found = (given, [found]) if section == "forward" else (given[:4], found)
        worst = 0.0
        for b, h in ((0, 0), (size.batch - 1, size.heads - 1)):
            worst = max(worst, *(relative_error(x[b, :, h], wanted)
                                 for x, wanted in zip(found, exact(kind, size, given, b, h), strict=True)))
        return worst

    return of


# ---- block masks -------------------------------------------------------------------------------------------------


def block_masks(shapes) -> Iterator[Job]:
    for (length,) in shapes:
        size = Size(1, 1, length, 128)
        for name in MASKS:
            question = harness.Question("block_mask", "create_block_mask", f"{name} S{length}", "GB/s", length**2,
                                        Bound(("torch.compile",), BLOCK_MASK))
            yield Job(question, flex.block_mask(), "create_block_mask", ("torch.compile",),
                      functools.partial(_mask_inputs, KINDS[name], size), mask_error)


def _mask_inputs(kind: Kind, size: Size, i: int, device="cuda") -> tuple:
    """One function for all i: another one is compiled again."""
    device = torch.device(device)
    return functions(kind, size, device).block_mask.mask_mod, size.length, device


def mask_error(_, given, found) -> float:
    """0 where the lists are those of the mask, 1 where they are not."""
    mask_mod, length, device = given
    at, none = torch.arange(length, device=device), torch.zeros((), dtype=torch.long, device=device)
    parts = []
    for rows in at.unsqueeze(1).split(BLOCK):
        seen = mask_mod(none, none, rows, at).unflatten(1, (-1, BLOCK))
        parts.append(torch.stack((seen.any(2).any(0), seen.all(2).all(0))))
    some, full = torch.stack(parts, 1)
    rows = _dense(found.kv_num_blocks, found.kv_indices), _dense(found.full_kv_num_blocks, found.full_kv_indices)
    columns = _dense(found.q_num_blocks, found.q_indices), _dense(found.full_q_num_blocks, found.full_q_indices)
    wanted = some & ~full, full
    right = all(torch.equal(x, y) for x, y in (*zip(rows, wanted), *zip(columns, (x.T for x in wanted))))
    return 0.0 if right else 1.0


def _dense(num, indices):
    """(rows, columns) bool: the blocks that are listed."""
    num, indices = num[0, 0], indices[0, 0]
    (rows, columns), at = indices.shape, torch.arange(indices.shape[1], device=num.device)
    listed = torch.where(at < num.unsqueeze(1), indices.long(), columns)
    return torch.zeros(rows, columns + 1, dtype=torch.bool, device=num.device).scatter_(1, listed, True)[:, :columns]


# ---- all together ------------------------------------------------------------------------------------------------


def calls() -> dict[str, Call]:
    """Eager calls on tiny tensors."""
    import tkq

    size, device = Size(1, 2, 128, 128), torch.device("cuda", torch.cuda.current_device())
    q, k, v = (torch.randn(1, 128, 2, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    masked, scored = (flex.ours(KINDS[name], size) for name in ("document", "ALiBi"))
    return {"x + x": Call(lambda: q + q),
            "flash_attn tkq": Call(lambda: tkq.flash_attn(q, k, v, causal=True)),
            "flex_attention tkq": Call(lambda: masked(q, k, v), at_most=CALL_US + KNOWN_US),
            "flex_attention tkq, score": Call(lambda: scored(q, k, v), at_most=CALL_US + KNOWN_US)}


def judge(cases) -> list[str]:
    """Each case's bound is the one beside FA4's backend; here are those beside Triton's."""
    return [f"{case.op} {case.shape}: {ratio:.3f}x {TRITON}, bound {AT_LEAST[TRITON]}" for case in cases
            if case.bound.against == (FA4,) and (ratio := case.ratios().get(TRITON)) is not None
            and not within(ratio, AT_LEAST[TRITON])]


BENCH = Bench(
    "flex_attention", __doc__,
    {**{section: functools.partial(jobs, section) for section in OWN}, "block_mask": block_masks},
    shapes={"forward": SHAPES, "backward": SHAPES + WIDE, "block_mask": BLOCK_MASK_SHAPES},
    calls=calls,
    judge=judge,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
