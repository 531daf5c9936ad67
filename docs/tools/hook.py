"""What mkdocs calls while it builds: pages that are made, not written, and links that lead out of docs/.

Made are the API, the tables between ``<!-- made: NAME -->`` markers, and a page for each file of the repository that a
page links to (an example, a test), so that the site leads nowhere else.
"""
from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.tools import api, commands, numerics  # noqa: E402  (the repository is on the path from here on)

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_MADE = re.compile(r"<!-- made: (\w+) -->")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_AT_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}  # page -> file of the repository
_KINDS = {".py": "python", ".json": "json", ".md": "markdown", ".toml": "toml", ".txt": "text"}
MADE = {"numerics": numerics.tables, "commands": commands.helps}


def on_config(config):
    """The API's pages follow its index."""
    for entry in config.nav:
        for name, pages in entry.items():
            if pages == ["api/index.md"]:
                entry[name] = api.navigation()
    return config


def on_files(files, config):
    """Adds what is made."""
    made = {**api.pages(), **{page: (ROOT / path).read_text() for page, path in _AT_ROOT.items()}}
    texts = {f.src_uri: f.content_string for f in files.documentation_pages()} | made
    linked = {path for page, text in texts.items() for path in _links_out(page, text)}
    made |= {_page_of(path): _source_page(path) for path in sorted(linked)}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Tables put in, links to the repository's files turned to their pages."""
    uri = page.file.src_uri
    made = _MADE.sub(lambda match: MADE[match[1]](), markdown)
    return _outside_code(made, lambda text: _LINK.sub(lambda match: turned_part(uri, match), text))


def repository_path(uri: str, target: str) -> str:
    """Where a link on a page leads, as a path in the repository."""
    home = posixpath.dirname(_AT_ROOT[uri]) if uri in _AT_ROOT else posixpath.join("docs", posixpath.dirname(uri))
    return posixpath.normpath(posixpath.join(home, target))


def _links_out(uri, text):
    """The repository's files outside docs/ that a page links to."""
    found = []
    _outside_code(text, lambda part: found.extend(match[1] for match in _LINK.finditer(part)) or part)
    paths = {repository_path(uri, target) for target in found}
    return {path for path in paths if _page_inside(path) is None and (ROOT / path).is_file()}


def _page_inside(path):
    """The page of a file of the repository that is a page by itself; None for others."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    at_root = {file: page for page, file in _AT_ROOT.items()} | {"README.md": "index.md"}
    return at_root.get(path)


def turned_part(uri, match):
    path = repository_path(uri, match[1])
    if not (ROOT / path).is_file():  # a made page, or nothing: mkdocs says which
        return match[0]
    return posixpath.relpath(_page_inside(path) or _page_of(path), posixpath.dirname(uri) or ".") + (match[2] or "")


def _page_of(path):
    return f"source/{path}.md"


def _source_page(path):
    fence = "`" * 5
    text = (ROOT / path).read_text().rstrip()
    return f"# {path}\n\n{fence}{_KINDS.get(Path(path).suffix, 'text')}\n{text}\n{fence}\n"


def _outside_code(text, change):
    parts = _FENCE.split(text)
    parts[::2] = map(change, parts[::2])
    return "".join(parts)
