"""Pages that are written by hand, and have a form: the glossary, and what was tried."""
import re

import pytest

from tests.helpers.process.markdown import ROOT

ATTEMPTS = sorted((ROOT / "docs" / "attempts").glob("*.md"))
MOST_WORDS = 2000  # of a page on one family of kernels; raw figures belong to bench/results/h100/tuning


def test_the_glossary_is_sorted_and_has_each_term_once():
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[2:]
    terms = [term for term, _ in rows]
    assert len(terms) > 80
    assert terms == sorted(set(terms), key=str.lower)
    assert not [term for term, meaning in rows if "|" in meaning or not meaning.strip()]


@pytest.mark.parametrize("page", ATTEMPTS, ids=lambda page: page.stem)
def test_a_family_has_one_short_page(page):
    assert len(page.read_text().split()) <= MOST_WORDS
    assert f"(attempts/{page.name})" in (ROOT / "docs" / "attempts.md").read_text()


def test_files_of_results_that_pages_name_are_there():
    names = {name for page in (*ATTEMPTS, ROOT / "docs" / "attempts.md")
             for name in re.findall(r"`(?:bench/results/h100/(?:tuning/)?)?(\w+\.(?:json|md))`", page.read_text())}
    results = ROOT / "bench" / "results" / "h100"
    assert names and not [name for name in names
                          if not (results / name).is_file() and not (results / "tuning" / name).is_file()]
