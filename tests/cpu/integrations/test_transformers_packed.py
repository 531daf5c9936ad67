"""Rows of a transformers model that hold several sequences, by their positions alone: each is computed as if it came by
itself, whatever a call says of its cache, or the call is refused."""
import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="transformers is not installed")

from transformers import StaticCache

import tkq.integrations.transformers as tkq_transformers
from tests.cpu.integrations.test_transformers_cpu import MORE, model, quiet  # noqa: F401  a fixture
from tkq.integrations import transformers_packed as packed

LENGTHS = ((3, 6, 1, 2), (12,)), ((5, 7), (1, 11))
BF16, FP32 = torch.bfloat16, torch.float32


def rows(lengths):
    """(tokens, their positions) of a batch."""
    ids = torch.randint(1, 96, (len(lengths), 12), generator=torch.Generator().manual_seed(1))
    return ids, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def one_by_one(m, ids, lengths):
    """Logits of each sequence alone, by torch's attention."""
    before = m.config._attn_implementation
    m.set_attn_implementation("eager")
    with torch.no_grad():
        found = [torch.cat([m(part[None], use_cache=False).logits[0] for part in row.split(list(n))])
                 for row, n in zip(ids, lengths)]
    m.set_attn_implementation(before)
    return torch.stack(found)


def error(found, wanted):
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("patched", [False, True])
def test_each_sequence_is_by_itself(name, patched, train):
    """In training, too, a call that does not say otherwise makes a cache."""
    m = model(name, BF16, "tkq").train(train)
    if patched:
        tkq_transformers.patch(m)
    for lengths in LENGTHS:
        ids, places = rows(lengths)
        wanted = one_by_one(m, ids, lengths)
        for more in ({}, dict(use_cache=True), dict(use_cache=False), dict(attention_mask=torch.ones_like(ids))):
            found = m(ids, position_ids=places, **more).logits
            assert error(found, wanted) < 0.02, (lengths, more)
    assert error(m(ids).logits, wanted) > 0.1, "as one sequence it is another result"


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
def test_in_float32(name):
    """By transformers' attention, whose mask says so."""
    m = model(name, FP32, "tkq")
    for lengths in LENGTHS:
        ids, places = rows(lengths)
        wanted = one_by_one(m, ids, lengths)
        for more in ({}, dict(use_cache=False), dict(attention_mask=torch.ones_like(ids))):
            torch.testing.assert_close(m(ids, position_ids=places, **more).logits, wanted, rtol=1e-4, atol=1e-4)


def test_the_gradients_are_of_each_sequence():
    """With the loss of `patch`, in one row, which transformers unsqueezes and does not expand."""
    m, (ids, places) = model("Llama", BF16, "tkq").train(), rows(((3, 9),))
    tkq_transformers.patch(m)
    labels = ids.clone()
    labels[0, 3] = -100  # of no sequence's last token
    found = []
    for more in ({}, dict(use_cache=False)):
        m.zero_grad()
        m(ids, labels=labels, position_ids=places, **more).loss.backward()
        found.append([p.grad.clone() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_positions_that_change_in_place_are_looked_at_again():
    m, (ids, places) = model("Llama", BF16, "tkq"), rows(((5, 7),))
    wanted = one_by_one(m, ids, ((5, 7),))
    whole = m(ids).logits
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            now = torch.arange(12)[None]
            assert error(m(ids, position_ids=now).logits, whole) < 0.02
            now.copy_(places)
            assert error(m(ids, position_ids=now).logits, wanted) < 0.02
            now.copy_(torch.arange(12)[None])
            assert error(m(ids, position_ids=now).logits, whole) < 0.02


def test_keys_from_before_are_refused():
    """They are of one sequence, and a call does not say of which."""
    ids, places = rows(((5, 7),))
    for dtype in (BF16, FP32):
        m = model("Llama", dtype, "tkq")
        for cache in (None, StaticCache(m.config, max_cache_len=40)):
            before = getattr(m(ids, use_cache=True, **{CACHE: cache}), CACHE)
            with pytest.raises(NotImplementedError, match="position_ids.*keys from before.*static cache"):
                m(ids, position_ids=places, **{CACHE: before})


def test_a_static_cache_that_is_empty():
    ids, places = rows(((5, 7),))
    m = model("Llama", BF16, "tkq")
    try:
        found = m(ids, position_ids=places, **{CACHE: StaticCache(m.config, max_cache_len=20)}).logits
    except NotImplementedError as refused:  # its length is a tensor, which is not asked for
        assert "position_ids" in str(refused)
    else:
        assert error(found, one_by_one(m, ids, ((5, 7),))) < 0.02


CACHE = "cache" if "cache" in tkq_transformers.modules.CausalLMOutputWithPast.__dataclass_fields__ else (
    "past_key_values")


def test_positions_behind_padding_and_further_on_are_of_one_sequence():
    """As generate has them: those of padding are anything, and a chunk begins where the last one ended."""
    m, ids = model("Llama", BF16, "tkq"), rows(((12,), (12,)))[0]
    keep = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
    places = (keep.cumsum(1) - 1).clamp(min=0)
    wanted = m(ids, attention_mask=keep, position_ids=places).logits
    for make in (lambda: None, lambda: StaticCache(m.config, max_cache_len=20)):
        cache, found = make(), []
        for a, b in ((0, 7), (7, 10), (10, 12)):
            out = m(ids[:, a:b], attention_mask=keep[:, :b], position_ids=places[:, a:b], use_cache=True,
                    **{CACHE: cache})
            found.append(out.logits)
            cache = getattr(out, CACHE)
        assert error(torch.cat(found, 1)[keep.bool()], wanted[keep.bool()]) < 0.02


def test_a_mask_that_is_given_is_not_touched():
    """4-D: to its caller positions may mean something else."""
    for dtype in (BF16, FP32):
        m, (ids, places) = model("Llama", dtype, "tkq"), rows(((5, 7),))
        mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
        m.set_attn_implementation("sdpa")
        wanted = m(ids, attention_mask=mask, position_ids=places).logits
        m.set_attn_implementation("tkq")
        assert error(m(ids, attention_mask=mask, position_ids=places).logits, wanted) < 0.02


def test_a_call_is_looked_at_once(monkeypatch):
    """Its layers share what the first one found: each look waits for the GPU."""
    m, (ids, places) = model("Llama", BF16, "tkq"), rows(((5, 7),))
    looked, found = [], packed._found
    monkeypatch.setattr(packed, "_found", lambda *given: looked.append(given) or found(*given))
    m(ids, position_ids=places)
    assert len(looked) == 1
    m(ids, position_ids=places)
    assert len(looked) == 2
    m(ids[:, :1], position_ids=places[:, :1])
    assert len(looked) == 2, "one token is one sequence"
