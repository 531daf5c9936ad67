"""Attention, and linear attention in segments, under pressure: cases of `tests.helpers.sanitizer.pressed`."""
import dataclasses
import functools
import math

import torch

from tests.helpers.sanitizer.repeated import BF16, num_sms, same_bits


def attention(causal=True, overlap_tasks=False):
    """Rows and tasks whose largest scores differ, and rise from block to block, which come last to first."""
    from tests.helpers.attention.inputs import make
    from tkq.attention.forward.config import AttentionConfig

    num_sms(6)
    q, k, v = make(2, 640, 700, 8, 2, 128)
    q = (q * torch.rand(2, 640, 8, 1, device="cuda") * 5).to(BF16)
    k = (k * torch.linspace(4, 0.3, 700, device="cuda")[:, None, None]).to(BF16)
    forward(q, k, v, AttentionConfig(overlap_tasks=True) if overlap_tasks else None, causal=causal)


def forward(q, k, v, config, **options):
    from tests.helpers.attention.inputs import compare, run

    def again():
        o, lse = torch.full_like(q, math.nan), torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device="cuda")
        run(q, k, v, o, lse, config, **options)
        return o, lse

    same_bits(lambda: compare(q, k, v, config=config, **options), again)


def attention_overlap_tasks():
    attention(causal=False, overlap_tasks=True)


def attention_cluster():
    """Two blocks bring half of each K and V tile to both: a task's Q, behind its own half of K, is there before the
    other's."""
    from tests.helpers.attention.inputs import make
    from tkq.attention.forward.plan import _D128_LONG_FULL

    num_sms(6)
    forward(*make(2, 640, 700, 8, 2, 128), _D128_LONG_FULL)


def attention_fp8(dim=128):
    """As `attention`, of float8: maxima that rise from block to block."""
    from tests.helpers.attention.fp8 import call, compare, quantised
    from tests.helpers.attention.inputs import make

    num_sms(6)
    q, k, v = make(2, 640, 700, 8, 2, dim)
    k = k * torch.linspace(4, 0.3, 700, device="cuda")[:, None, None]
    given = quantised(q, k, v)
    same_bits(functools.partial(compare, given, causal=True), functools.partial(call, given, causal=True))


def attention_fp8_parts():
    """Of 256 columns, whose P V comes in two parts."""
    attention_fp8(256)


def attention_wide(cluster=1):
    """Few slots, each used again soon; maxima that move, so that O is corrected. And many tasks of one block each, of
    which the next one's end is near."""
    from tests.helpers.attention.inputs import make
    from tkq.attention.wide.plan import plan
    from tkq.attention.wide.spec import WideSpec

    num_sms(6)
    q, k, v = make(1, 400, 700, 4, 2, 320)
    k = (k * torch.linspace(4, 0.3, 700, device="cuda")[:, None, None]).to(BF16)
    config = dataclasses.replace(plan(WideSpec("bf16", 320)), cluster=cluster, stages=9)
    forward(q * 3, k, v, config, causal=True)
    forward(*make(8, 60, 60, 4, 2, 320), config, causal=True)


def attention_wide_cluster():
    """Two blocks bring half of each slot to both."""
    attention_wide(2)


def attention_wide_backward():
    """Few slots; two query heads of a K/V head."""
    from tkq.attention.wide.backward.plan import plan
    from tkq.attention.wide.backward.spec import WideBackwardSpec

    configs = tuple(dataclasses.replace(config, cluster=1, stages=9)
                    for config in plan(WideBackwardSpec("bf16", 320, right=True)))
    backward(configs, dim=320, rows=300)


def attention_packed():
    from tests.helpers.attention.varlen_inputs import compare, make

    num_sms(3)
    given = make([(513, 513), (64, 64), (1, 900), (0, 70), (113, 203), (300, 100), (2, 63)], 4, 2, 128)
    for _ in range(2):
        compare(*given, max_q=520, max_k=900, causal=True)


def attention_window():
    """A window on both sides: of a task's blocks some have a mask on the left alone."""
    from tests.helpers.attention.inputs import make

    num_sms(3)
    forward(*make(1, 1300, 1300, 6, 3, 128), None, left=575, right=0)


def backward(config, dim=128, causal=True, rows=641, few=True, **options):
    from tests.helpers.attention import gradients as cases
    from tkq.attention.arguments import Options
    from tkq.attention.backward import ops

    if few:
        num_sms(3)
    q, k, v, do = cases.make(2, rows, rows, 8, 2, dim, BF16)
    o, lse, _ = cases.forward(q, k, v, causal, dim ** -0.5, (-1, -1))
    given = do, q, k, v, o.to(BF16), lse.float(), None
    fixed = slice(0 if options else 1, 3)  # dq too, where it is asked for in a fixed order

    def again():
        found = [cases.poisoned(x) for x in (q, k, v)]
        ops.run(given, found, Options(causal), config=config, **options)
        return found[fixed]

    same_bits(lambda: cases.compare(q, k, v, do, causal, config=config, **options)[fixed], again)


def backward_helper_warps():
    from tkq.attention.backward.plan import _HELPER_WARPS

    backward(_HELPER_WARPS[128])


def backward_of_one_task():
    from tkq.attention.backward.plan import SINGLE

    backward(dataclasses.replace(SINGLE[128], store_from_registers=False), few=False)


def backward_wide():
    from tkq.attention.backward.plan import SINGLE

    backward(SINGLE[256], dim=256, rows=300, few=False)


def backward_wide_one_p():
    """One stage of P: with as many as Q has, those of Q hold the role up that writes P."""
    from tkq.attention.backward.plan import SINGLE

    backward(dataclasses.replace(SINGLE[256], p_stages=1), dim=256, rows=300, few=False)


def backward_first():
    from tkq.attention.backward.plan import _DQ_FIRST_STORE

    backward(_DQ_FIRST_STORE)


def backward_first_at_once():
    """All blocks of keys of a head at the same time at the same tile."""
    from tkq.attention.backward.plan import _DQ_FIRST_STORE

    backward(_DQ_FIRST_STORE, causal=False, few=False)


def backward_grouped():
    from tkq.attention.backward.plan import _GQA_SPLIT

    backward(_GQA_SPLIT)


def backward_grouped_at_once():
    """All parts of the query heads at the same time."""
    from tkq.attention.backward.plan import _GQA_SPLIT

    backward(_GQA_SPLIT, few=False)


def backward_in_order():
    from tkq.attention.backward.plan import SINGLE

    backward(SINGLE[128], few=False, deterministic=True)


def backward_ordered():
    """A buffer for each sender; causal: the last heads the other way round."""
    from tkq.attention.backward.plan import _DQ_ORDERED

    backward(_DQ_ORDERED[128], deterministic=True)


def backward_ordered_at_once():
    """All blocks of keys of a head at the same time at the same tile; one buffer goes from sender to sender."""
    from tkq.attention.backward.plan import _DQ_ORDERED

    backward(_DQ_ORDERED[64], dim=64, causal=False, few=False, deterministic=True)


def backward_ordered_wide():
    """From registers."""
    from tkq.attention.backward.plan import _DQ_ORDERED

    backward(_DQ_ORDERED[256], dim=256, deterministic=True)


def backward_ordered_wide_at_once():
    from tkq.attention.backward.plan import _DQ_ORDERED

    backward(_DQ_ORDERED[256], dim=256, causal=False, few=False, deterministic=True)


def backward_packed(config, lengths=None, causal=False):
    from tests.helpers.attention.varlen_gradients import MIXED, Problem
    from tkq.attention.arguments import Options

    problem = Problem(lengths or MIXED, 4, 4, 128, options=Options(causal))
    for _ in range(3):
        problem.judge(config=config)


def backward_chain():
    from tkq.attention.backward.plan import _DQ_SERIAL

    backward_packed(_DQ_SERIAL[128], ((512, 512), (300, 511), (70, 400), (512, 130)) * 6)


def backward_seamless():
    from tkq.attention.backward.plan import _HELPER_WARPS

    num_sms(3)
    backward_packed(dataclasses.replace(_HELPER_WARPS[128], fuse_preprocess=True), causal=True)


def split():
    """Segments of more chunks than stages: states alone, combined, and outputs, also of two heads a block; with
    transfers, which are matrices."""
    from tests.gpu.linear_attention import test_split as cases

    q, k, v, g = cases.make(1, 900, 1, 2, 64, 64, "token")
    plain = cases.Given(q, k, v, g, initial=cases.state_of(v), final=torch.float32)
    delta = cases.Given(q, k, v, g, cases.beta_of(v), cases.state_of(v), torch.float32)
    for given, more in ((plain, {}), (plain, dict(groups=2, heads=2)), (delta, {})):
        same_bits(lambda given=given, more=more: [x for x in cases.check(given, 2, **more) if x is not None])


def delta_blocks():
    """The delta rule's forward by blocks, and Kimi's of bounded gates: more chunks than stages."""
    import tkq
    from tests.gpu.linear_attention import test_blocks_on_gpu as cases
    from tests.gpu.linear_attention import test_bounded as bounded

    given, of_layer = cases.make(460, 64), bounded.make(460)
    cases.check(*given, torch.randn(1, 4, 64, 128, device="cuda"))
    bounded.judge(of_layer, -5.0)
    options = dict(bounded.OPTIONS, gate_lower_bound=-5.0, output_final_state=True)
    same_bits(lambda: (*tkq.gated_delta_rule(*given, None, None, True),
                       *tkq.gated_delta_rule(**of_layer, **options)))


def decode():
    """Few blocks, each with ends, whole tasks and beginnings; and all of them on one sequence."""
    from tests.helpers.attention.kv_cache import call, compare, make, queries

    for few, lengths in ((3, [700, 1, 0, 129, 3000]), (24, [20000])):
        num_sms(few)
        cache, q = make(lengths, 16, 2, 128), queries(len(lengths), 1, 8, 128)
        same_bits(functools.partial(compare, q, cache), functools.partial(call, q, cache))


def decode_float8():
    """As `decode`: producers that widen, and warps that read their own keys; scales of tokens."""
    from tests.helpers.attention.float8_cache import float8
    from tests.helpers.attention.kv_cache import call, compare, make, queries

    for few, lengths, rows in ((3, [700, 1, 0, 129, 3000], 3), (24, [20000], 3), (3, [700, 1, 0, 129, 3000], 1)):
        num_sms(few)
        cache, descales = float8(make(lengths, 16, 2, 128), "token")
        q = queries(len(lengths), rows, 8, 128)
        same_bits(functools.partial(compare, q, cache, **descales), functools.partial(call, q, cache, **descales))


def mla():
    """As `decode`, of latent rows: two tiles of rows that go together."""
    from tests.helpers.attention.kv_cache import queries
    from tests.helpers.attention.mla import call, compare, make

    for few, lengths in ((6, [700, 1, 0, 129, 3000]), (24, [20000])):
        num_sms(few)
        cache, q = make(lengths, 16), queries(len(lengths), 1, 80, 576)
        same_bits(functools.partial(compare, q, cache), functools.partial(call, q, cache))


def mla_sparse():
    """As `mla`, over lists of rows."""
    from tests.helpers.attention import mla_sparse
    from tests.helpers.attention.kv_cache import queries

    for few, batch, topk, ends in ((6, 5, 700, [0, 1, 129, 600, 700]), (24, 1, 9000, [9000, 4000])):
        num_sms(few)
        lists = mla_sparse.with_ends(mla_sparse.make(batch, 2, topk, 16, "queries"), ends)
        q = queries(batch, 2, 80, 576)
        same_bits(functools.partial(mla_sparse.compare, q, lists), functools.partial(mla_sparse.call, q, lists))


def mla_float8():
    """As `mla_sparse`, over float8 rows: producers that widen."""
    from tests.helpers.attention import mla_sparse
    from tests.helpers.attention.kv_cache import queries
    from tkq.reference.mla import packed

    num_sms(6)
    q, lists = queries(5, 2, 80, 576), mla_sparse.make(5, 2, 700, 16, "queries")
    lists = mla_sparse.with_ends(lists._replace(cache=packed(lists.cache)), [0, 1, 129, 600, 700])
    same_bits(functools.partial(mla_sparse.compare, q, lists), functools.partial(mla_sparse.call, q, lists))


CASES = (decode, decode_float8, mla, mla_sparse, mla_float8, split, delta_blocks, attention,
         attention_overlap_tasks, attention_cluster, attention_fp8, attention_fp8_parts, attention_wide,
         attention_wide_backward, attention_wide_cluster, attention_packed, attention_window,
         backward_helper_warps, backward_of_one_task, backward_wide, backward_wide_one_p, backward_first,
         backward_first_at_once, backward_grouped, backward_grouped_at_once, backward_in_order,
         backward_ordered, backward_ordered_at_once, backward_ordered_wide, backward_ordered_wide_at_once,
         backward_chain, backward_seamless)
