"""The chapters of "Write your own kernel": their pictures are drawn from the examples, and the kernels are as short as
they say."""
import ast
import io
import re
import tokenize
from types import SimpleNamespace

import pytest

from tests.helpers.process.compiled_roles import compiled, shown
from tests.helpers.process.markdown import ROOT, blocks

PAGES = [ROOT / "docs" / "write_your_own" / f"{name}.md" for name in ("reduction", "gemm", "flash_attention", "based")]


def test_each_page_shows_its_example():
    """That they are its lines is tested with all docs'."""
    for page in PAGES:
        said = [block.said for block in blocks(page) if block.language == "python"]
        assert said.count(f"excerpt: examples/write_a_{page.stem}.py") >= 5, page


def code_lines(path, *names):
    """Lines with code of the named classes and functions: no comments, docstrings or empty lines."""
    text = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tree, lines = ast.parse(text), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    found = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(found) == len(names)
    return sum(len(lines & set(range(node.lineno, node.end_lineno + 1))) for node in found)


def test_flash_attention_has_fewer_than_100_lines():
    path = ROOT / "examples" / "write_a_flash_attention.py"
    assert code_lines(path, "FlashAttention", "flash_attention") < 100


def test_the_gemm_has_fewer_than_50_lines():
    assert code_lines(ROOT / "examples" / "write_a_gemm.py", "Gemm", "gemm") < 50


def test_based_has_the_lines_that_its_page_says():
    """But for the imports, constants and the check."""
    path = ROOT / "examples" / "write_a_based.py"
    lines = code_lines(path, "Globals", "Shared", "weights", "features", "dot", "Based", "build", "based")
    assert lines <= 150 and f"{lines} lines" in (ROOT / "docs" / "write_your_own" / "based.md").read_text()


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from docs.tools import pictures

    return pictures


def test_the_pictures_are_those_that_are_drawn(pictures):
    drawn = pictures.pictures()
    for name, picture in drawn.items():
        assert (pictures.FOLDER / name).read_text() == picture.svg(), "python -m docs.tools.pictures"
    pages = *PAGES, ROOT / "docs" / "linear_attention.md", ROOT / "docs" / "fft_conv.md"
    on_pages = {name.rpartition("/")[2] for page in pages
                for name in re.findall(r"!\[[^]]+\]\((\S+)\)", page.read_text())}
    assert on_pages == set(drawn) == {path.name for path in pictures.FOLDER.glob("*.svg")}


def test_flash_attentions_picture_has_the_arrivals_and_registers_of_the_compiled_kernel(pictures, tmp_path):
    import write_a_flash_attention as example

    picture = pictures.flash_attention(example.FlashAttention(True))
    assert shown(picture) == compiled(example.RECIPES[True], tmp_path)


@pytest.mark.parametrize("shape", [(1, 1, 1), (129, 3, 2), (1000, 20, 4), (4096, 16, 4), (16384, 5, 3), (40000, 2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attentions_tasks_come_once_and_the_longest_of_some_heads_first(pictures, shape, causal):
    import write_a_flash_attention as example

    rows, heads, batches = shape
    tiles = -(-rows // 128)
    g = SimpleNamespace(o=SimpleNamespace(shape=(rows, 128, heads, batches)))
    found = [example.Globals.task(g, number, causal) for number in range(tiles * heads * batches)]
    assert sorted(found) == [(b, h, tile, tile + 1 if causal else tiles)
                             for b in range(batches) for h in range(heads) for tile in range(tiles)]
    together = max(256 // tiles, 1) * tiles
    for first in range(0, len(found), together):
        of_tiles = [task[2] for task in found[first:first + together]]
        assert of_tiles == sorted(of_tiles, reverse=True)
