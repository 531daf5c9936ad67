"""The README's table of features says what the libraries' sources show."""
import importlib.util

import pytest

from bench.report import features


@pytest.mark.parametrize("column", features.COLUMNS)
def test_what_a_column_says_is_in_the_sources(column):
    if not features.installed(column):
        pytest.skip(f"{' '.join(features.READ[column])} is not installed")
    assert features.wrong(column) == []


def test_every_cell_is_of_a_column_and_yes_has_evidence():
    for name, cells in features.FEATURES.items():
        assert "tkq" in cells and set(cells) <= set(features.COLUMNS), name
        for column, cell in cells.items():
            claimed = cell.text in ("yes", "no") and column == "tkq"
            assert cell.text and (cell.evidence or not claimed), (name, column)


@pytest.mark.parametrize("claim, right", (
    ("made_up.part:thing(a, b)", True), ("made_up.part:thing(c)", False), ("!made_up.part:thing(c)", True),
    ("made_up.part:other", False), ("made_up.part:NAME", True), ("made_up.part:path", True), ("made_up.part", True),
    ("made_up:top", True), ("!made_up.part:thing", False), ("!made_up.gone:thing", False), ("made_up.gone", False),
    ("!made_up.part:gone(c)", False)))
def test_evidence_is_looked_up_in_the_text(claim, right, tmp_path, monkeypatch):
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").write_text("raise ImportError('never imported')\ndef top(): ...\n")
    (tmp_path / "made_up" / "part.py").write_text("from os import path\nNAME = 1\ndef thing(a, *, b=1): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(features, "FEATURES", {"x": {"tkq": features.Cell("yes", (claim,))}})
    assert features.wrong("tkq") == ([] if right else [claim])
