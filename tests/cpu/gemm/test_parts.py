"""Which parts a GEMM's kernel is composed of: what its config says, and no more than one of a kind."""
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from tkq.gemm.dense.config import Config
from tkq.gemm.dense.kernel import DenseGemm
from tkq.gemm.dense.spec import GemmSpec
from tkq.gemm.fp8 import catalog, kernel
from tkq.gemm.fp8.kernel import Fp8Gemm, WithCounter
from tkq.gemm.fp8.plan import BLOCKS, FAST, PROMOTED, SMALL, configure, recipe_of
from tkq.gemm.fp8.spec import Fp8Spec
from tkq.gemm.grouped.kernel import GroupedGemm
from tkq.gemm.grouped.plan import FAST as GROUPED
from tkq.gemm.grouped.plan import PROMOTED as GROUPED_PROMOTED
from tkq.gemm.grouped.plan import fit_to_spec
from tkq.gemm.grouped.spec import GroupedSpec
from tkq.granularity import scales_of

ROW, BLOCK = Fp8Spec(**scales_of("row")), Fp8Spec(**scales_of("1x128_128x128"), promote=True)
BOTH = Fp8Spec(**scales_of("1x128_1x128"), promote=True)


@pytest.mark.parametrize("spec, tile, parts", (
    (ROW, FAST[0], "Producer OverlappedConsumer Mainloop"),
    (replace(ROW, out="fp32"), FAST[0], "Producer Consumer Mainloop"),
    (ROW, SMALL[0], "Producer Consumer Mainloop"),
    (ROW, replace(FAST[0], wave_sync=16), "WaveSync OverlappedConsumer Mainloop"),
    (replace(ROW, promote=True), PROMOTED[1], "Producer Consumer Promotion"),
    (BOTH, PROMOTED[1], "Producer Consumer Promotion"),
    (BLOCK, BLOCKS[0], "Producer OverlappedPromotionConsumer PipelinedPromotion"),
    (replace(BLOCK, store="direct"), BLOCKS[0], "Producer Consumer PipelinedPromotion"),
    (BLOCK, PROMOTED[3], "Producer Consumer Promotion"),
    (BLOCK, replace(PROMOTED[1], wave_sync=8), "WaveSync Consumer PipelinedPromotion")))
def test_parts_of_a_float8_config(spec, tile, parts):
    gemm = Fp8Gemm(spec, configure(tile, spec))
    assert gemm.block.parts == f"Matrices {parts}" and str(gemm) == f"tkqgemm Fp8Gemm Matrices {parts}"


@pytest.mark.parametrize("spec, tile, parts", (
    (GroupedSpec(), GROUPED[0], "Groups Producer OverlappedConsumer Mainloop"),
    (GroupedSpec(out="fp32"), GROUPED[0], "Groups Producer Consumer Mainloop"),
    (GroupedSpec("k", b_major="n"), GROUPED[1], "Groups Producer OverlappedConsumer Mainloop"),
    (GroupedSpec("m", "e4m3", "e4m3", "bf16", "1x128", "128x128"), GROUPED_PROMOTED[0],
     "Groups Producer Consumer Promotion"),
    (GroupedSpec("k", "e4m3", "e4m3", "fp32", "row", "row"), GROUPED[0], "MaskedGroups Producer Consumer Mainloop"),
    (GroupedSpec("k", "e4m3", "e4m3", "bf16", "1x128", "1x128"), GROUPED_PROMOTED[0],
     "MaskedGroups Producer Consumer Promotion")))
def test_parts_of_a_grouped_config(spec, tile, parts):
    assert GroupedGemm(spec, fit_to_spec(replace(tile, wave_sync=16), spec)).block.parts == parts


def test_parts_of_a_16_bit_config():
    names = [type(DenseGemm(GemmSpec(b_major="k"), config).producer).__name__ for config in (Config(),
                                                                                             Config(wave_sync=16))]
    assert names == ["Producer", "WaveSync"]


def test_parts_share_what_a_block_works_on():
    """One object of operands: producer and consumers take the same tiles."""
    for spec, tile in ((ROW, FAST[0]), (BLOCK, BLOCKS[0]), (BLOCK, PROMOTED[0])):
        block = Fp8Gemm(spec, configure(tile, spec)).block
        c = block.consumer
        assert all(part.operands is block.operands for part in (block.producer, c, c.mainloop, c.epilogue, c.stagger))


def test_a_counter_is_an_argument_where_blocks_keep_in_step(monkeypatch):
    monkeypatch.setattr(kernel, "operands", lambda spec: ())
    plain, synced = (recipe_of(ROW, replace(FAST[0], wave_sync=n)) for n in (0, 16))
    assert [recipe.builder for recipe in (plain, synced)] == ["tkq.gemm.fp8.kernel:Fp8Gemm",
                                                              "tkq.gemm.fp8.kernel:WithCounter"]
    assert len(WithCounter(*synced.args).fake_arguments()) == len(Fp8Gemm(*plain.args).fake_arguments()) + 1


def test_every_shipped_config_has_its_parts():
    """Sums are promoted where the spec says so; what is pipelined or overlapped is where the config says so."""
    for shipped in catalog.shipped():
        spec, config = shipped.recipe.args
        _, producer, consumer, mainloop = Fp8Gemm(spec, config).block.parts.split()
        assert (producer == "WaveSync") == (config.wave_sync > 0)
        assert ("Promotion" in mainloop) == spec.promote and ("Pipelined" in mainloop) == (config.promotion_unroll > 0)
        assert ("Overlapped" in consumer) == (config.overlap_epilogue > 0)
