"""vLLM's backend against attention in float64 over a paged cache, on a stub of vLLM's interface."""
import importlib
import importlib.metadata
import itertools
import sys
import types

import pytest
import torch

from tests.helpers import vllm_stub
from tests.helpers.attention.interface import attended
from tkq.integrations import vllm as plugin

BF16 = torch.bfloat16
PAGE, HEADS, KV_HEADS, D = 4, 4, 2, 64


@pytest.fixture
def backend(monkeypatch):
    registered = {}
    for name, module in vllm_stub.modules(registered).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tkq.integrations.vllm_backend", raising=False)
    plugin.register()
    module, _, name = registered["TKQ"].rpartition(".")
    yield getattr(importlib.import_module(module), name)
    sys.modules.pop("tkq.integrations.vllm_backend", None)


def builder(backend, window=None, drafts=0):
    model = types.SimpleNamespace(get_num_attention_heads=lambda parallel: HEADS)
    config = types.SimpleNamespace(model_config=model, parallel_config=None, speculative_tokens=drafts)
    spec = types.SimpleNamespace(num_kv_heads=KV_HEADS, head_size=D, sliding_window=window)
    return backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))


class Batch:
    """Sequences with tokens before, and new ones, in pages of any order."""

    def __init__(self, before, new, padding=0, causal=True):
        g = torch.Generator().manual_seed(0)
        randn = lambda *shape: torch.randn(*shape, generator=g).to(BF16)
        self.before, self.new, total = before, new, [a + b for a, b in zip(before, new)]
        pages = torch.randperm(40, generator=g)
        self.table = pages[:len(new) * 6].view(-1, 6).int()
        self.cache = torch.full((40, KV_HEADS, PAGE, 2 * D), float("nan"), dtype=BF16)
        self.keys = [(randn(n, KV_HEADS, D), randn(n, KV_HEADS, D)) for n in total]
        slots = []
        for s, (k, v) in enumerate(self.keys):
            places = [(int(self.table[s, i // PAGE]), i % PAGE) for i in range(total[s])]
            for i in range(before[s]):
                page, row = places[i]
                self.cache[page, :, row] = torch.cat((k[i], v[i]), -1)
            slots += [page * PAGE + row for page, row in places[before[s]:]]
        self.q = randn(sum(new) + padding, HEADS, D)
        self.k, self.v = (torch.cat([kv[which][b:] for kv, b in zip(self.keys, before)]) for which in (0, 1))
        starts = [0, *itertools.accumulate(new)] + [sum(new)] * padding
        self.common = vllm_stub.Common(
            torch.tensor(starts, dtype=torch.int32), torch.tensor(total + [0] * padding, dtype=torch.int32),
            len(new) + padding, sum(new) + padding,
            torch.cat((self.table, torch.zeros(padding, 6, dtype=torch.int32))), torch.tensor(slots), causal)

    def wanted(self, window=None):
        found = []
        for q, (k, v) in zip(self.q.split([*self.new, len(self.q) - sum(self.new)]), self.keys):
            for i, row in enumerate(q):
                last = len(k) - len(q) + i if self.common.causal else len(k) - 1
                first = 0 if window is None else max(0, last - window + 1)
                found.append(attended(row[None], k[first:last + 1], v[first:last + 1], False))
        return torch.cat(found)


def run(backend, batch, made=None, **layer):
    made = made or builder(backend)
    metadata = made.build(0, batch.common)
    impl = backend.get_impl_cls()(HEADS, D, D ** -0.5, KV_HEADS, **layer)
    impl.do_kv_cache_update(None, torch.cat((batch.k, batch.k[:1])), torch.cat((batch.v, batch.v[:1])), batch.cache,
                            batch.common.slot_mapping)
    output = torch.full_like(batch.q, float("nan"))
    assert impl.forward(None, batch.q, batch.k, batch.v, batch.cache, metadata, output) is output
    return output, metadata


@pytest.mark.parametrize("before, new, launches", [
    ((5, 11, 0), (1, 1, 1), 1), ((5, 11, 0, 2), (1, 1, 9, 4), 2), ((3, 0), (5, 7), 1), ((6,), (1,), 1)])
def test_batches(backend, before, new, launches):
    batch = Batch(list(before), list(new))
    output, metadata = run(backend, batch)
    torch.testing.assert_close(output.double(), batch.wanted(), atol=0.02, rtol=0.02)
    assert len(metadata.launches) == launches


def test_drafts_are_one_launch(backend):
    batch = Batch([5, 2], [3, 3])
    output, metadata = run(backend, batch, builder(backend, drafts=2))
    torch.testing.assert_close(output.double(), batch.wanted(), atol=0.02, rtol=0.02)
    assert [one.queries for one in metadata.launches] == [3]


def test_padded_batches_keep_a_graphs_sizes(backend):
    batch = Batch([5, 2], [1, 1], padding=2)
    output, metadata = run(backend, batch)
    torch.testing.assert_close(output[:2].double(), batch.wanted(), atol=0.02, rtol=0.02)
    assert [one.sequences for one in metadata.launches] == [slice(0, 4)] and not output[2:].any()


@pytest.mark.parametrize("group", [None, 4])
def test_windows(backend, group):
    """Of the group, whose plan then counts, and of a layer alone."""
    batch = Batch([9, 7], [1, 1])
    output, _ = run(backend, batch, builder(backend, group), sliding_window=4)
    torch.testing.assert_close(output.double(), batch.wanted(4), atol=0.02, rtol=0.02)


def test_not_causal(backend):
    batch = Batch([3, 0], [4, 2], causal=False)
    torch.testing.assert_close(run(backend, batch)[0].double(), batch.wanted(), atol=0.02, rtol=0.02)


def test_plans_stay_where_they_are(backend):
    made, batch = builder(backend), Batch([5, 11], [1, 1])
    first = made.build(0, batch.common).launches[0].plan
    batch.common.seq_lens += 1
    assert made.build(0, batch.common).launches[0].plan.data_ptr() == first.data_ptr()


def test_what_vllm_asks(backend):
    from tests.helpers.vllm_stub import AttentionType

    assert backend.get_name() == "TKQ" and backend.supports_sink() and backend.supports_sliding_window()
    capability = types.SimpleNamespace
    assert backend.supports_compute_capability(capability(major=9, minor=0))
    assert not backend.supports_compute_capability(capability(major=10, minor=0))
    impl = backend.get_impl_cls()
    for given in (dict(alibi_slopes=[1.0]), dict(kv_cache_dtype="fp8"), dict(attn_type=AttentionType.ENCODER)):
        with pytest.raises(NotImplementedError, match=next(iter(given))):
            impl(HEADS, D, 1.0, KV_HEADS, **given)
    with pytest.raises(NotImplementedError, match="head_size is 80"):
        impl(HEADS, 80, 1.0, KV_HEADS)
    output = torch.ones(3, HEADS, D)
    assert not impl(HEADS, D, 1.0, KV_HEADS).forward(None, output, output, output, None, None, output).any()


def test_the_entry_point():
    found = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "tkq"]
    if not found:
        pytest.skip("tkq was installed before it had the entry point, or is not installed")
    assert found[0].load() is plugin.register


def test_plans_of_other_numbers_of_queries_lie_elsewhere(backend):
    made, lengths = builder(backend, drafts=3), torch.tensor([5, 9]).int()
    one, four, again = (made._plan(lengths, n, (None, None)) for n in (1, 4, 1))
    assert one is again and one is not four and one.data_ptr() != four.data_ptr()


def test_plans_of_other_windows_lie_elsewhere(backend):
    made, lengths = builder(backend, 4), torch.tensor([5, 9]).int()
    one, both = (made._plan(lengths, 1, window) for window in ((3, None), (3, 3)))
    assert one.data_ptr() != both.data_ptr()


def test_windows_count_the_query_itself(backend):
    of = sys.modules[backend.__module__].window_of
    assert (of(None, True), of(4, True), of(4, False)) == ((None, None), (3, None), (3, 3))


def test_sequences_without_tokens_in_a_batch_that_is_not_padded(backend):
    """There are no rows of queries for them."""
    batch = Batch([5, 2], [1, 1], padding=2)
    batch.common.num_actual_tokens = 2
    launches = builder(backend).build(0, batch.common).launches
    assert [(one.sequences, one.tokens) for one in launches] == [(slice(0, 2), slice(0, 2))]
