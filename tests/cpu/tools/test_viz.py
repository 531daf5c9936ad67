"""tkq.viz: what its pictures show is what kernels have. Nothing is launched."""
import importlib
import json
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[3]
pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import BFloat16, Float8E4M3FN, Float32  # noqa: E402

import tkq.tile as tk  # noqa: E402
from tests.helpers.process.compiled_roles import compiled, shown  # noqa: E402
from tkq import viz  # noqa: E402
from tkq.attention.forward.kernel import AttentionForward  # noqa: E402
from tkq.attention.forward.plan import LENGTHS, plan  # noqa: E402
from tkq.attention.forward.spec import AttentionSpec  # noqa: E402
from tkq.convolution.fft.long.spec import size_of  # noqa: E402
from tkq.convolution.fft.plan import has_transform, transform_rows  # noqa: E402
from tkq.gemm.dense.config import Config  # noqa: E402
from tkq.gemm.dense.kernel import DenseGemm  # noqa: E402
from tkq.gemm.dense.spec import GemmSpec  # noqa: E402
from tkq.gemm.fp8.config import Fp8Config  # noqa: E402
from tkq.gemm.fp8.kernel import Fp8Gemm  # noqa: E402
from tkq.gemm.fp8.plan import PROMOTED  # noqa: E402
from tkq.gemm.fp8.spec import Fp8Spec  # noqa: E402
from tkq.linear_attention.config import LinearConfig  # noqa: E402
from tkq.linear_attention.launch import recipe as of_linear  # noqa: E402
from tkq.linear_attention.spec import LinearSpec  # noqa: E402
from tkq.reduction import geometry  # noqa: E402
from tkq.reduction_base import ReductionBase  # noqa: E402
from tkq.runtime.compile import sources  # noqa: E402
from tkq.runtime.compile.recipe import Recipe  # noqa: E402
from tkq.viz.layouts import traced  # noqa: E402
from tkq.viz.passes import Data  # noqa: E402


class Shared(ReductionBase):
    """Rows of a cluster."""

    def _set_cluster_n(self):
        self.cluster_n = geometry.cluster(self.N, self.dtype.width)


def boxes(picture):
    return re.findall(r'<rect x="', picture.svg())


# ---- thread-value layouts

@pytest.mark.parametrize("dtype, N, vector", [
    (BFloat16, 64, 8), (BFloat16, 1000, 8), (Float32, 4096, 4), (BFloat16, 999, 1)])
def test_a_thread_value_layout_covers_the_tile_once(dtype, N, vector):
    kernel = ReductionBase(dtype, N, stage=1)
    picture = viz.tv_layout(kernel)
    layout, tile = picture.layout, geometry.tile(
        N, vector, geometry.threads_per_row(N), geometry.num_threads(N), 1)
    assert (layout.rows, layout.cols, layout.threads, layout.vector) == (tile.rows, tile.cols, tile.threads, vector)
    owners = layout.owners()
    assert len(owners) == layout.threads * layout.values == layout.rows * layout.cols
    assert set(owners) == {(r, c) for r in range(tile.rows) for c in range(tile.cols)}


def test_places_are_those_of_the_dsl():
    kernel = ReductionBase(BFloat16, 1000, stage=1)
    pairs = [(0, 0), (1, 0), (0, 1), (31, 7), (32, 8), (127, 31)]

    def asked():
        kernel._set_cluster_n()
        (rows, _), tv = kernel._get_tv_layout()
        return [(int(cute.crd2idx(p, tv)) % rows, int(cute.crd2idx(p, tv)) // rows) for p in pairs]

    layout = viz.tv_layout(kernel).layout
    assert traced(asked) == [layout.place(*p) for p in pairs]


def test_what_a_picture_of_a_layout_shows():
    picture = viz.tv_layout(ReductionBase(BFloat16, 1000, stage=1), rows=3, columns=8)
    # 4 rows of 32 threads: rows 0, 1 and the last; accesses from the first on, from thread 0's second on, the last
    assert picture.rows == ("row 0", "row 1", "..", "row 3")
    assert picture.columns == ("0-7", "8-15", "16-23", "..", "256-263", "264-271", "272-279", "..", "1016-1023")
    assert len(picture.cells) == 3 * 7 == len(boxes(picture))
    assert picture.cells[0, 0].lines == ("T0", "V0-7") and picture.cells[0, 4].lines == ("T0", "V8-15")
    assert picture.cells[1, 0].lines == ("T32", "V0-7") and picture.cells[3, 8].lines == ("T127", "V24-31")
    assert [at for at, cell in picture.cells.items() if cell.colour is None] == [(0, 8), (1, 8), (3, 8)]  # past 1000
    assert "128 threads, 32 to a row" in picture.text() and "accesses past its end" in picture.text()
    assert picture.text().isascii()
    ET.fromstring(picture.svg())


def test_a_row_of_a_cluster():
    picture = viz.tv_layout(Shared(BFloat16, 65536, stage=1))
    assert "a cluster of 4 blocks, each of which has 16384 columns" in picture.text()
    assert picture.layout.rows * picture.layout.cols == 16384


def test_a_row_kernels_layout_is_its_plans(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    kernel = made(row_kernel(1024))
    layout, p = viz.tv_layout(kernel).layout, kernel.plan
    assert (layout.rows, layout.cols, layout.threads, layout.vector) == (p.groups, p.cols, p.threads, p.vector)


def test_a_kernel_without_a_layout():
    with pytest.raises(TypeError, match="kernel is 3"):
        viz.tv_layout(3)
    with pytest.raises(TypeError, match="tv_layout: kernel is .*Shared'>, allowed are instances of subclasses"):
        viz.tv_layout(Shared)


# ---- shared tiles

@pytest.mark.parametrize("dtype", [BFloat16, Float32, Float8E4M3FN])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_a_shared_tile_has_each_element_at_a_place_of_its_own(dtype, swizzle):
    tile = tk.st(64, 256 * 8 // dtype.width, dtype, swizzle)
    at = viz.shared_tile(tile).addresses
    found = {at(r, c) for r in range(tile.rows) for c in range(tile.cols)}
    assert found == set(range(0, tile.bytes, dtype.width // 8))
    eight = [at(r, 0) for r in range(8)]
    assert viz.tiles.passes(eight) == 1 and viz.tiles.passes([at.plain(r, 0) for r in range(8)]) == swizzle // 16


def test_what_a_picture_of_a_shared_tile_shows():
    picture = viz.shared_tile(tk.st(64, 64))
    assert len(picture.cells) == 64 == len(boxes(picture))
    assert len(picture.columns) == 8 and picture.columns[0] == "banks 0-3" and picture.rows[7] == "byte 896"
    for (line, place), cell in picture.cells.items():  # the 128-byte swizzle in one line: unit u of row r is at u ^ r
        unit = place ^ line
        assert cell.lines == (f"r{line}", f"c{8 * unit}-{8 * unit + 7}") and cell.colour == unit
    assert "1 pass through the banks, 8 without" in picture.text()
    ET.fromstring(picture.svg())
    assert "2 panels of 64 columns, each of 16384 bytes" in viz.shared_tile(tk.st(128, 128)).text()
    with pytest.raises(TypeError, match="tile is 64"):
        viz.shared_tile(64)


# ---- roles and pipes

def attention(length, **spec):
    spec = AttentionSpec("bf16", 128, lse=False, **spec)
    return AttentionForward(spec, plan(spec, length))


def made(recipe):
    module, _, name = recipe.builder.partition(":")
    return getattr(importlib.import_module(module), name)(*recipe.args)[0]


def row_kernel(N):
    """The recipe of a backward: nothing is computed."""
    import write_a_row_kernel as example

    x, w, r = torch.empty(2, N, dtype=torch.bfloat16), torch.empty(N, dtype=torch.bfloat16), torch.empty(2)
    return example.SiluNormBackward.recipe(dy=x, x=x, weight=w, rstd=r, dx=x, dweight=w)


@pytest.mark.parametrize("recipe", [
    Recipe("tkq.attention.forward.kernel:AttentionForward",
           (AttentionSpec("bf16", 128), plan(AttentionSpec("bf16", 128), "long"))),
    Recipe("tkq.gemm.dense.kernel:DenseGemm", (GemmSpec(b_major="k"), Config())),
    Recipe("tkq.gemm.fp8.kernel:Fp8Gemm",
           (Fp8Spec(scale_a="1x128", scale_b="128x128", promote=True), Fp8Config(m=128, n=128, stagger_stages=0))),
    Recipe("tkq.gemm.fp8.kernel:WithCounter",
           (Fp8Spec(scale_a="1x128", scale_b="128x128", promote=True), replace(PROMOTED[1], wave_sync=8))),
    Recipe("tkq.linear_attention.engine.kernel:LinearAttention",
           (LinearSpec("bf16", 32, 64, gate="token", delta="bf16"), LinearConfig(groups=1))),
    Recipe("tkq.linear_attention.engine.kernel:LinearAttention",
           (LinearSpec("bf16", 32, 64, gate="token", dot=True, second="query", reverse=True), LinearConfig(groups=1))),
    of_linear(LinearSpec("bf16", 128, 64, gate="token")),
    of_linear(LinearSpec("bf16", 64, 64, gate="token"), heads=2),
    of_linear(LinearSpec("bf16", 64, 64, gate="token", final="fp32", part="states"), heads=2),
    Recipe("write_a_gemm:build"), 4096, 32768,
], ids=["attention", "gemm", "fp8", "fp8 that keeps pace", "delta rule", "two queries", "ping-pong",
        "two heads", "states alone", "lcf", "rows", "rows of clusters"])
def test_arrivals_and_registers_are_those_of_the_compiled_kernel(recipe, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    recipe = recipe if isinstance(recipe, Recipe) else row_kernel(recipe)
    assert shown(viz.pipeline(recipe)) == compiled(recipe, tmp_path)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_picture_of_attention_agrees_with_its_config(length, causal):
    kernel = attention(length, causal=causal)
    c, picture = kernel.config, viz.pipeline(kernel)
    q, k, v = picture.pipes
    assert (q.stages, q.copies, k.stages, v.stages) == (c.q_stages, c.consumers, c.stages, c.stages)
    assert q.bytes == 64 * 128 * 2 and k.bytes == v.bytes == c.kv * 128 * 2
    assert q.empty == 4 and k.empty == v.empty == 4 * c.consumers * c.cluster
    assert len(boxes(picture)) == 2 + q.stages + k.stages + v.stages  # and the two roles'
    text = picture.text()
    assert text.count("full:") == 3 and "[K 0][K 1]" in text and f"{c.consumers} warpgroups" in text
    assert ("take turns" in text) == c.ping_pong and ("next task's first S" in text) == c.overlap_tasks
    ET.fromstring(picture.svg())


@pytest.mark.parametrize("config", [
    Config(), Config(cluster=1), Config(n=128, stages=6), Config(m=64, n=128, stages=8, cluster=1)])
def test_a_picture_of_a_gemm_agrees_with_its_config(config):
    picture = viz.pipeline(DenseGemm(GemmSpec(b_major="k"), config))
    (stage,) = picture.pipes
    assert stage.stages == config.stages and stage.bytes == (config.m + config.n) * 64 * 2
    assert stage.empty == 4 * config.m // 64 * config.cluster and stage.full == 1
    assert len(boxes(picture)) == 2 + config.stages
    assert ("part of B for all" in picture.text()) == (config.cluster > 1)
    assert "round of tiles" not in picture.text()


def test_pictures_of_kernels_that_keep_pace_say_so():
    block = Fp8Spec(scale_a="1x128", scale_b="128x128", promote=True)
    for kernel in (DenseGemm(GemmSpec(b_major="k"), Config(overlap_epilogue=1, wave_sync=16)),
                   Fp8Gemm(block, replace(PROMOTED[1], wave_sync=8))):
        picture = viz.pipeline(kernel)
        assert type(kernel).__name__ in picture.title and len(picture.pipes) == 1
        assert f"behind 1 / {kernel.config.wave_sync} of its own: wait until all" in picture.producer.steps[-1]
        assert "in global memory" in picture.notes[-1] and "wait until all blocks" in picture.svg()


def test_more_stages_than_there_is_room_for():
    role = viz.Role("r", "warp 0", 24, ("works",))
    picture = viz.Pipeline("many", role, role, (viz.Pipe("x", "one tile", 12, 0, 4, "one a warp"),))
    assert len(boxes(picture)) == 2 + 8 and "x 11" in picture.svg() and ".." in picture.svg()
    assert picture.arrivals() == {1: 12, 4: 12}


def test_a_kernel_that_describes_itself():
    class Own:
        def describe(self):
            return "a picture"

    assert viz.pipeline(Own()) == "a picture"
    with pytest.raises(NotImplementedError, match="kernel is a int, supported are AttentionForward, DenseGemm, Fp8"):
        viz.pipeline(3)
    with pytest.raises(TypeError, match="pipeline: kernel is the class Own, allowed are its instances and recipes"):
        viz.pipeline(Own)


# ---- passes

@pytest.mark.parametrize("precision", ["half", "split"])
@pytest.mark.parametrize("tokens, causal", [
    (1, True), (1000, True), (4096, False), (1100, False), (20000, True), (40000, True), (70000, False), (2**22, True),
    (2**22, False)])
def test_passes_of_a_long_convolution(tokens, causal, precision):
    """Sizes between passes multiply to the points; each launch reads what the one before wrote."""
    picture = viz.fft_passes(tokens, causal, precision)
    text, split = str(picture), precision == "split"
    direct = causal or has_transform(tokens)
    two = not direct and 2 * tokens > 2**22
    points = tokens if direct or two else 2 * tokens
    assert f"{tokens} tokens" in text and ("One of two" in text) == two
    assert ("written twice" in text) == (not direct and not two)
    assert ("the sum of two fp16 numbers" in text) == split
    rows = transform_rows(points, causal or not direct, split)
    kinds = [type(part).__name__ for part in picture.parts]
    if rows is not None:
        of = "32768 points as 32 x 32 x 32" if points > 16384 else f"{64 * rows} points as {rows} x 64"
        assert kinds == ["Data", "Pass", "Data"] and of in text
        assert picture.bytes == 4
    else:
        size = size_of(points, split)
        assert kinds == ["Data", "Pass", "Pass", "Data", "Pass", "Data", "Pass", "Data"]
        held = [tuple(map(int, re.match(r"(\d+) x (\d+)", part.holds).groups())) for part in picture.parts
                if isinstance(part, Data)]
        assert all(a * b == size.points >= points for a, b in held)
        assert picture.bytes == 6 + 2 * two + (32 if split else 16) and f"{picture.bytes} bytes are moved" in text
        before = None
        for part in picture.parts:
            if isinstance(part, Data):
                assert before is None or before.writes == part.bytes
                data = part
            else:
                assert part.reads == data.bytes
                before = part
    ET.fromstring(picture.svg())
    assert len(boxes(picture)) == len(picture.parts)


def test_passes_that_there_are_not():
    for words, call in (("tokens is 0, allowed are 1 to 4194304", (0,)),
                        ("tokens is 4194305, allowed are 1 to 4194304", (2**22 + 1, False)),
                        ("precision: got 'fp32', allowed are 'half', 'split'", (64, True, "fp32"))):
        with pytest.raises(ValueError, match=f"fft_passes: {words}"):
            viz.fft_passes(*call)


# ---- files, imports, keys

def test_saving(tmp_path, monkeypatch):
    picture = viz.shared_tile(tk.st(8, 16))
    picture.save(tmp_path / "a.svg")
    picture.save(tmp_path / "a.txt")
    assert (tmp_path / "a.svg").read_text() == picture.svg() == picture._repr_svg_()
    assert (tmp_path / "a.txt").read_text() == f"{picture}\n"
    with pytest.raises(ValueError, match=".svg, .txt and .png"):
        picture.save("a.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        picture.save(tmp_path / "a.png")


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    for i, picture in enumerate((viz.shared_tile(tk.st(8, 16)), viz.pipeline(attention("short")))):
        picture.save(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG")


def test_importing_viz_brings_neither_torch_nor_the_dsl():
    program = "import json, sys, tkq; tkq.viz; print(json.dumps(sorted({'torch', 'cutlass'} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [], done.stderr


def test_no_kernels_code_depends_on_its_picture():
    for module in ("tkq.attention.forward.kernel", "tkq.gemm.dense.kernel", "tkq.norms.forward.row_norm"):
        assert not any(".viz" in name or name.endswith(".roles") for name in sources.reached((module,)))


@pytest.mark.parametrize("call, error, words", [
    (lambda: viz.fft_passes(1.5), TypeError, "fft_passes: tokens: got 1.5"),
    (lambda: viz.fft_passes(0), ValueError, "fft_passes: tokens is 0"),
    (lambda: viz.fft_passes(64, causal="no"), TypeError, "fft_passes: causal: got 'no'"),
    (lambda: viz.shared_tile(tk.st(64, 64), lines=0), ValueError, "shared_tile: lines is 0"),
    (lambda: viz.tv_layout(ReductionBase(BFloat16, 1000, stage=1), copy_bits=7), ValueError,
     "tv_layout: copy_bits is 7"),
    (lambda: viz.tv_layout(ReductionBase(BFloat16, 1000, stage=1), rows=-1), ValueError, "tv_layout: rows is -1")])
def test_numbers_that_nothing_can_be_drawn_of(call, error, words):
    with pytest.raises(error, match=words):
        call()
