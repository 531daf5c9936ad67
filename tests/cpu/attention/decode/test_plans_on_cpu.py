"""What calls of CPU tensors and their plans say of each other: as on the GPU, NaN, and the plan says why."""
import pytest
import torch

import tkq
from tkq.attention.decode import words

BF16, I32 = torch.bfloat16, torch.int32
OTHER = "plan: was made for another call"


def ints(*numbers):
    return torch.tensor(numbers, dtype=I32)


def given(lengths=(5, 2), **changed):
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g).to(BF16)
    return dict(q=new(2, 1, 4, 64), k_cache=new(6, 4, 2, 64), v_cache=new(6, 4, 2, 64), cache_seqlens=ints(*lengths),
                block_table=torch.tensor([[0, 3], [5, 1]], dtype=I32), return_lse=True) | changed


def planned(lengths=(5, 2), **changed):
    return tkq.plan_decode(ints(*lengths), 4, 2, 64, **changed)


def nan_rows(found):
    """Of which sequences, or rows of ragged queries, are all numbers NaN? All others have none."""
    o, lse = found
    nan, lse = o.isnan().flatten(1), lse.mT if lse.dim() == 2 else lse
    assert torch.equal(nan.any(1), nan.all(1)) and torch.equal(nan.any(1), lse.isnan().flatten(1).all(1))
    return nan.any(1).tolist()


def check(plan, words):
    if words is None:
        tkq.check_plan(plan)
        return
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)


@pytest.mark.parametrize("way", [lambda q: q, lambda q: torch._neg_view(-q)])
@pytest.mark.parametrize("call, of, nan, said", [
    ({}, {}, [False, False], None), (dict(lengths=(6, 2)), {}, [True, False], "not the one planned for"),
    (dict(lengths=(5, 9)), dict(lengths=(5, 9)), [False, True], "beyond the cache"),
    (dict(lengths=(-3, 2)), dict(lengths=(-3, 2)), [True, False], "a length is negative"),
    (dict(block_table=torch.tensor([[0, 77], [-1, 77]], dtype=I32)), {}, [True, False], "block_table or indices"),
    (dict(window_size=(3, None)), {}, [True, True], OTHER), ({}, dict(window_size=(3, None)), [True, True], OTHER),
    ({}, dict(batch_invariant=True), [True, True], OTHER), ({}, None, [True, True], None)])
def test_a_plan_and_its_call(call, of, nan, said, way):
    plan = torch.zeros_like(planned()) if of is None else planned(**of)
    call = given(**call)
    call["q"] = way(call["q"])
    found = tkq.flash_attn_with_kvcache(**call, plan=plan)
    assert nan_rows(found) == nan
    if of is None:
        assert plan[words.OTHER_CALL] == 1
        return
    check(plan, said)
    if not any(nan):
        assert torch.equal(found[0], tkq.flash_attn_with_kvcache(**call)[0])


@pytest.mark.parametrize("lengths, starts, nan, said", [
    ((5, 2), (0, 2, 3), [False] * 3, None), ((5, 3), (0, 2, 3), [False, False, True], "not the one planned for"),
    ((5, 2), (0, 1, 3), [True, True, False], "not the one planned for"),
    ((5, 2), (0, 2, 2), [False, False, True], "not the one planned for")])
def test_a_plan_of_ragged_queries(lengths, starts, nan, said):
    plan = planned(cu_seqlens_q=ints(0, 2, 3), total_q=3)
    q = torch.randn(3, 4, 64).to(BF16)
    found = tkq.flash_attn_with_kvcache(**given(lengths, q=q, cu_seqlens_q=ints(*starts), plan=plan))
    assert nan_rows(found) == nan
    check(plan, said)


def test_a_plan_made_for_inference():
    """It is written to as by a launch: outside of inference mode too."""
    with torch.inference_mode():
        plan = planned()
    tkq.flash_attn_with_kvcache(**given((6, 2)), plan=plan)
    check(plan, "not the one planned for")


def latent(**changed):
    call = dict(q=torch.randn(2, 2, 4, 576).to(BF16), kv_cache=torch.randn(6, 4, 576).to(BF16), softmax_scale=0.1,
                return_lse=True)
    return call | changed


def test_plans_of_mla():
    table = torch.tensor([[0, 3], [5, 1]], dtype=I32)
    made = lambda *lengths, **more: tkq.plan_decode(ints(*lengths), 4, 1, 576, head_dim_v=512, **more)
    pages = lambda *lengths, **more: latent(block_table=table, cache_seqlens=ints(*lengths)) | more
    lie = torch.tensor([[0, 6], [5, -2]], dtype=I32)
    for plan, call, nan, said in (
            (made(5, 3, max_seqlen_q=2), pages(5, 3), [False, False], None),
            (made(5, 3, max_seqlen_q=2), pages(5, 4), [False, True], "not the one planned for"),
            (made(5, 3, max_seqlen_q=2), pages(5, 3, block_table=lie), [True, False], "block_table or indices"),
            (made(5, 3, max_seqlen_q=2), pages(5, 3, batch_invariant=True), [True, True], OTHER)):
        assert nan_rows(tkq.mla_decode(**call, plan=plan)) == nan
        check(plan, said)


def test_plans_of_lists():
    made = lambda *lengths: tkq.plan_decode(ints(*lengths), 4, 1, 576, head_dim_v=512)
    rows = torch.randint(-1, 24, (2, 2, 3), dtype=I32)
    lengths = torch.tensor([[3, 1], [0, 2]], dtype=I32)
    lists = lambda rows, **more: latent(indices=rows) | more
    lie = rows.clone()
    lie[0, 1, 1:], lie[1, 1, 1] = 24, 99  # behind the end of the first list
    for plan, call, nan, said in (
            (made(3, 1, 0, 2), lists(rows, topk_length=lengths), [False] * 4, None),
            (made(3, 3, 3, 3), lists(rows), [False] * 4, None),
            (made(3, 1, 3, 3), lists(rows), [False, True, False, False], "not the one planned for"),
            (made(3, 1, 0, 2), lists(lie, topk_length=lengths), [False, False, False, True], "block_table or indices")):
        o, lse = tkq.mla_decode(**call, plan=plan)
        assert nan_rows((o.flatten(0, 1), lse.mT.flatten(0, 1).mT)) == nan
        check(plan, said)


@pytest.mark.parametrize("cascade", [False, True])
def test_plans_of_a_cascade(cascade):
    """Of both parts: lengths are the plan's own; a page that is not there, of the prefix and behind it."""
    table = torch.tensor([[0, 3], [0, 1]], dtype=I32)
    call = given(block_table=table, cache_seqlens=None)
    made = lambda: tkq.plan_cascade(ints(7, 6), 4, 2, 64, prefix_len=4, page_size=4, cascade=cascade)
    plan = made()
    assert nan_rows(tkq.cascade_attention(**call, plan=plan)) == [False, False]
    check(plan.plan, None)
    table[1, 1] = 6
    assert nan_rows(tkq.cascade_attention(**call, plan=plan)) == [False, True]
    check(plan.plan, "block_table or indices")
    plan, table[0, 0] = made(), 6
    assert nan_rows(tkq.cascade_attention(**call, plan=plan))[0]
    check(plan.prefix_plan if cascade else plan.plan, "block_table or indices")
    plan, table[0, 0], table[1] = made(), 0, ints(6, 1)  # in the second row: looked at where that is read
    assert nan_rows(tkq.cascade_attention(**call, plan=plan)) == [False, not cascade]
    table[1] = ints(0, 1)
    plan = tkq.plan_cascade(ints(7, 6), 4, 2, 64, prefix_len=4, page_size=4, cascade=cascade, batch_invariant=True)
    assert nan_rows(tkq.cascade_attention(**call, plan=plan)) == [True, True]
    check(plan.plan, OTHER)
