"""The docs: they build without a warning, their links lead somewhere, their code runs, and what is made agrees."""
import ast
import functools
import html.parser
import importlib.util
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import tkq
from docs.tools import api, commands, docstrings, numerics, support
from tests.cpu.tools.test_doctor import GOOD, WRONG
from tests.helpers.ops.every_op import FUNCTIONS
from tests.helpers.process.markdown import PAGES, ROOT, blocks, is_excerpt
from tkq.cli import doctor
from tkq.warmup import precompile

PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python"]
ON_CPU = [block for block in PYTHON if block.said == "runs on the CPU"]
EXCERPTS = [block for block in PYTHON if block.said.startswith("excerpt: ")]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


# ---- the site ----------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """ids: what links can lead to. links: where the page's own lead. loads: what a browser fetches for it."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.update(filter(None, (attrs.get("id"), attrs.get("name"))))
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        stylesheet = tag == "link" and attrs.get("rel") not in ("canonical", "next", "prev")
        if tag in ("img", "script") or stylesheet:
            self.loads += filter(None, (attrs.get("src"), attrs.get("href")))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{path: Page} of the site, built here; mkdocs ends the build at the first warning."""
    if "CI" not in os.environ:
        pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # of the theme, about its future
    from mkdocs.commands import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
    config.plugins.run_event("startup", command="build", dirty=False)
    build.build(config)
    return {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_links_and_anchors_lead_somewhere(site):
    wrong, resolved = [], functools.cache(Path.resolve)
    for path, page in site.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", target):
                continue
            to = resolved(path.parent / target) if target else path
            if not to.is_file() or (anchor and to in site and anchor not in site[to].ids | {"__top"}):
                wrong.append(f"{path.name}: {link}")
    assert not wrong
    assert len(site) > 40


def test_the_site_loads_nothing_from_elsewhere(site):
    loads = {load for page in site.values() for load in page.loads}
    assert loads and not [load for load in loads if re.match(r"\w*:?//", load)]


# The theme's search worker in the shim's frame, as a browser has it that opens a page from the disk; a query's pages.
SEARCH = """
const fs = require("fs"), vm = require("vm"), { fileURLToPath } = require("url");
const [site, page, worker, query] = process.argv.slice(1);
function realm(extra) {
  const events = new EventTarget();
  const names = { console, URL, Event, EventTarget, MessageEvent, ...extra };
  for (const name of ["addEventListener", "dispatchEvent"]) names[name] = events[name].bind(events);
  names.self = names.window = names;
  vm.createContext(names);
  names.JSON = vm.runInContext("JSON", names);
  return names;
}
function frame() {
  const inside = realm({});
  const run = script => { vm.runInContext(fs.readFileSync(fileURLToPath(script.src)), inside); script.onload(); };
  inside.document = { open() {}, write() {}, close() {}, createElement: () => ({}), body: { appendChild: run } };
  return { contentWindow: inside };
}
const location = new URL(page);
const outer = realm({ location, document: { baseURI: page, createElement: frame, body: { appendChild() {} } } });
for (const file of ["style/iframe-worker.js", "search/search_index.js"])
  vm.runInContext(fs.readFileSync(site + "/" + file, "utf8").replace("var __index", "this.__index"), outer);
const found = new outer.Worker(worker);
found.addEventListener("message", ({ data }) => {
  if (data.type === 1) found.postMessage({ type: 2, data: query });
  else console.log(JSON.stringify(data.data.items.map(group => group[0].location)));
});
found.postMessage({ type: 0, data: { ...outer.__index, options: { suggest: false } } });
"""


def test_the_search_works_from_the_disk(site):
    """The index is a script that each page finds, and what stands for a Worker there is the site's own."""
    home = next(path for path in site if path.name == "index.html" and path.parent.name != "api")
    for path, page in site.items():
        assert any(Path(os.path.normpath(path.parent / load)) == home.parent / "style" / "iframe-worker.js"
                   for load in page.loads if not re.match(r"\w+:", load)), path
    index = (home.parent / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = {") and "api/flash_attn.html" in index
    if shutil.which("node") is None:
        pytest.skip("node is not installed: the index and the shim are there, no query was made")
    worker = re.search(r'"search": "([^"]+)"', (home.parent / "api" / "gemm.html").read_text())[1]
    for query, wanted in (("flash_attn deterministic", "api/flash_attn.html"), ("nvdisasm", "install.html")):
        done = subprocess.run(["node", "-e", SEARCH, str(home.parent), (home.parent / "api" / "gemm.html").as_uri(),
                               worker, query], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert any(found.partition("#")[0] == wanted for found in json.loads(done.stdout)), done.stdout


def test_each_function_has_a_page_with_its_signature(site):
    there = {path.stem for path in site if path.parent.name == "api"}
    assert {name for name in tkq.__all__ if inspect.isfunction(getattr(tkq, name))} <= there
    assert set(api.MODULES) <= there


# ---- code ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_says_what_is_tested(block):
    if block in EXCERPTS or (not block.said and any(is_excerpt(block.code, path.read_text()) for path in EXAMPLES)):
        return  # lines of a file that compiles
    ast.parse(textwrap.dedent(block.code))
    first_of_readme = block.page == "README.md" and not block.said  # tests/cpu/docs/test_readme.py runs it
    assert block in ON_CPU or block.said.startswith("compiles only: ") or first_of_readme, (
        "say above it: <!-- runs on the CPU -->, <!-- compiles only: why --> or <!-- excerpt: FILE -->")


@pytest.mark.parametrize("block", ON_CPU, ids=str)
def test_python_runs(block, tmp_path):
    small = textwrap.dedent(block.code)
    for large, less in (('"cuda"', '"cpu"'), ("4096", "32"), ("8192", "64"), ("32000", "320")):
        small = small.replace(large, less)
    (tmp_path / "block.py").write_text(small)
    names = runpy.run_path(str(tmp_path / "block.py"))
    made = [value for value in names.values() if isinstance(value, torch.Tensor)]
    assert made and all(torch.isfinite(t.float()).all() for t in made)


@pytest.mark.parametrize("block", EXCERPTS, ids=str)
def test_excerpts_are_lines_of_their_files(block):
    assert is_excerpt(block.code, (ROOT / block.said.removeprefix("excerpt: ")).read_text())


def test_there_are_blocks_of_each_kind():
    assert len(ON_CPU) >= 4 and len(EXCERPTS) >= 3 and len(PYTHON) > len(ON_CPU) + len(EXCERPTS)


def test_the_words_that_mark_blocks_are_no_others():
    known = re.compile(r"runs on the CPU|excerpt: \S+|compiles only: .+|made: \w+|python -m .+|"
                       r"(speed|features|chapters|figures): .+")
    for page in PAGES:
        said = re.findall(r"^<!-- (.*?) -->$", page.read_text(), re.MULTILINE)
        assert all(known.fullmatch(words) for words in said), (page, said)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT], ids=lambda page: page.name)
def test_links_of_pages_at_the_root(page):
    """As they are on GitHub; those of docs/ are checked in the site."""
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
        assert (ROOT / target).exists(), target


# ---- what is made --------------------------------------------------------------------------------------------------


def test_the_page_of_what_is_supported_is_what_specs_and_plans_say():
    assert (ROOT / "docs" / "support.md").read_text() == support.page(), "python -m docs.tools --write"


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
def test_calls_take_the_types_of_the_page(case):
    types, _ = support.types()[case.function]
    if "e4m3" in types or not {*types} & {*DTYPES}:  # float8 and integers are not what the list's inputs are made in
        case.call(*case.inputs().values())
        return
    for name, dtype in DTYPES.items():
        inputs = case.inputs(dtype=dtype).values()
        if name in types:
            case.call(*inputs)
        else:
            with pytest.raises((TypeError, NotImplementedError)):
                case.call(*inputs)


def test_every_function_is_on_the_page():
    assert set(support.types()) == {case.function for case in FUNCTIONS}


def test_a_value_that_a_spec_refuses_is_not_on_the_page():
    def make(value):
        if value == 3:
            raise NotImplementedError
    assert support.taken(make, (1, 3, 5)) == [1, 5]


def test_install_explains_each_finding_of_doctor():
    text = (ROOT / "docs" / "install.md").read_text().partition("## What doctor says")[2]
    rows = [row for row in re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE) if row not in ("message", "---")]
    patterns = {row: re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", row)))) for row in rows}
    said = [f.text for change, *_ in WRONG for f in doctor.diagnose(replace(GOOD, **change))]
    said += ["The cache cannot be used: ", "A folder of TKQ_CACHE_DIR is passed over: "]
    for words in said:
        assert any(pattern.search(words) for pattern in patterns.values()), words
    for row, pattern in patterns.items():
        assert any(pattern.search(words) for words in said), row


DOC = """Head, `code_x` and 2 * x < 3.

Args:
    x, y: first,
        and more.
    z: "a"  one thing.

Raises:
    TypeError: this. ValueError: that,
    too.

Before::

    f(1)

Then:

  a   drawing
  of  two lines

- a point
  on two lines
"""


def test_docstrings_become_markdown():
    assert docstrings.markdown(DOC) == """Head, `code_x` and 2 \\* x \\< 3.

**Args**

- `x`, `y`: first, and more.
- `z`: "a"  one thing.

**Raises**

- `TypeError`: this.
- `ValueError`: that, too.

Before:

```python
f(1)
```

Then:

```text
a   drawing
of  two lines
```

- a point on two lines"""


def test_fields_of_a_dataclass_become_a_list():
    assert docstrings.markdown("What it is.\n\nrows: of a tile,\n    at most.\ncols: likewise.", ("rows", "cols")) == (
        "What it is.\n\n- `rows`: of a tile, at most.\n- `cols`: likewise.")


def test_no_page_of_the_api_has_a_section_that_was_not_understood():
    for name, text in api.pages().items():
        assert not re.search(r"^(Args|Returns|Raises|Attributes):$", text, re.MULTILINE), name


def test_pages_have_what_kernels_of_your_own_take():
    """The runtime's modules, and of base classes what a subclass calls and overrides."""
    pages = api.pages()
    for said in ("tkq.runtime.compile.fake.tensor(dtype_name, shape", "tkq.runtime.compile.fake.sym(",
                 "tkq.runtime.device.arch.num_sms(",
                 "tkq.runtime.call.counters.counter(", "tkq.runtime.call.counters.workspace("):
        assert said in pages["api/runtime.md"], said
    for said in ("ReductionBase._set_cluster_n(self)", "ReductionBase._calculate_threads_per_row(self)",
                 "ReductionBase._get_num_threads(self)", "ReductionBase._get_tv_layout(self",
                 "ReductionBase._initialize_cluster(self", "### OnePassRows", "OnePassRows.layout(self)",
                 "tkq.reduction.geometry.cluster("):
        assert said in pages["api/kernels.md"], said
    assert "_whole" not in pages["api/tile.md"] and "__init__" not in pages["api/kernels.md"]


def test_the_page_of_the_tile_layer_says_which_threads_call():
    """As the modules' docstrings do for all their functions."""
    page = api.pages()["api/tile.md"]
    for said in ("A warpgroup's 128 threads", "each call, which nothing here elects", "Scope: the warpgroup's threads"):
        assert said in page


def test_the_help_of_commands_is_what_they_print():
    text = commands.helps()
    assert "--bundle" in text.partition("## bench")[0] and "usage: python -m" in text.partition("## bench")[2]


def test_numerics_say_what_was_not_measured(tmp_path):
    def case(op, ours, **errors):
        timings = [dict(name=name, error=error) for name, error in dict(tkq=ours, **errors).items()]
        return dict(op=op, section="s", ours="tkq", comparison=dict(timings=timings))
    cases = [case("f", 2e-3, QuACK=1e-3, copy=None), case("f", 1e-3, QuACK=1e-3), case("g", None, QuACK=1e-3),
             case("softmax_backward", 1e-3), case("softmax_backward", None), case("h", None, QuACK=None)]
    (tmp_path / "one.json").write_text(json.dumps(dict(cases=cases, environment=dict(date="2026-11-21T10:00:00"))))
    (tmp_path / "other.json").write_text("{}")
    text = numerics.tables(tmp_path)
    assert "### one\n\nMeasured 2026-11-21." in text and "other" not in text
    assert "| `f` | 2 of 2 | 1.0e-03 to 2.0e-03 | QuACK 1.0e-03 | 1.00 to 2.00 |" in text
    assert "| `g` | 0 of 1 | not measured | QuACK 1.0e-03 | not measured |" in text
    assert "| `softmax`, backward | 1 of 2 | 1.0e-03 | not measured | not measured |" in text and "`h`" not in text


def test_the_numbers_that_numerics_calculates():
    """Of attention's backward with some intermediates in bf16: relative to all of them in float64."""
    torch.manual_seed(0)
    low = lambda x: x.bfloat16().double()
    q, k, v, do = (low(torch.randn(700, 128)) for _ in range(4))
    p = torch.softmax(q @ k.T * 128**-0.5, -1)
    dp = do @ v.T
    less = dp - (p @ v * do).sum(-1, keepdim=True)
    s = low(low(q @ k.T) * 128**-0.5)
    p_low = low(torch.softmax(s, -1))
    less_low = low(low(dp) - low((low(p_low @ v) * do).sum(-1, keepdim=True)))
    forms = dict(shipped=p * less, p=low(p) * less, difference=low(p) * low(less), everything=p_low * less_low)

    def error(ds):
        pairs = ((low(ds) @ k, (p * less) @ k), (low(ds).T @ q, (p * less).T @ q))
        return max((found - wanted).norm().item() / wanted.norm().item() for found, wanted in pairs)

    said = dict(zip(forms, map(float, re.findall(r"\d\.\de-03", (ROOT / "docs" / "numerics.md").read_text()))))
    for name, ds in forms.items():
        assert error(ds) == pytest.approx(said[name], rel=0.02), name


def test_commands_on_pages_are_there():
    """Modules and targets exist, and `compile` takes these arguments; tests/cpu/bench/test_bench_front.py has
    `bench`."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line.partition(" #")[0].split() for page in PAGES for block in blocks(page) if block.language == "sh"
             for line in block.code.splitlines()]
    modules = [line[2:] for line in lines if line[:2] == ["python", "-m"]]
    assert len(modules) > 10 and all(importlib.util.find_spec(name) for name, *_ in modules)
    assert {line[1] for line in lines if line[:1] == ["make"]} <= targets
    for words in (words for name, *words in modules if name == "tkq" and words[0] == "compile"):
        precompile.parsed(words[1:])
