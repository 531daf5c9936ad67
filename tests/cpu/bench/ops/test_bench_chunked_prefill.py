"""The study of chunked prefill: what its candidates launch."""
import torch

from bench.studies import chunked_prefill
from tests.helpers.emulation import fake_gpu
from tkq.attention.decode.chunked.spec import CacheSpec


def test_candidates(monkeypatch):
    monkeypatch.setattr(chunked_prefill, "randn", lambda i, *shape: torch.zeros(*shape, dtype=torch.bfloat16))
    pages = 16, 64, 256
    given = chunked_prefill.inputs(0, 2048, 2304, (8, 2), pages)
    caches = {"unpaged": CacheSpec(False, False, 128)}
    for page in pages:
        for ragged in (False, True):
            caches[f"page {page}{', ragged' * ragged}"] = CacheSpec(True, ragged, min(page, 128), page < 128)
    found = chunked_prefill.candidates(pages, False)
    assert list(found) == ["flash_attn", *caches]
    for name, call in found.items():
        for first in (True, False):  # with its plan, and without
            with fake_gpu.launches() as seen:
                call(*given)
            builders = [recipe.builder.split(":")[1] for recipe, _ in seen]
            plans = ["Lister"] * name.endswith("ragged") + ["Planner"]
            assert builders == (["AttentionForward"] if name == "flash_attn" else
                                plans * first + ["ChunkedPrefill"])
            assert name == "flash_attn" or seen[-1][0].args[1] == caches[name]
    order = given[7][0].long()
    assert torch.equal(given[5][order].flatten(0, 1), given[1][0]) and order.tolist() != sorted(order.tolist())


def test_peers_are_asked_for():
    assert list(chunked_prefill.candidates((16,), True)) == ["flash_attn", "unpaged", "page 16", "page 16, ragged",
                                                              "page 16, FA3"]


def test_without_a_gpu(capsys):
    assert torch.cuda.is_available() or chunked_prefill.main([]) == 2
