# make demo       what tkq does: kernels run and timed on a Hopper GPU, or cross-compiled and inspected without one
# make test       the tests, with the kernels that stand for the others
# make test-all   with every kernel that tkq ships
# make test-oldest  few tests and the demo with the lowest DSL and tvm-ffi that pyproject.toml allows
# make test-matrix  the CPU tests with other versions of Python, torch, the DSL and tvm-ffi, where they can be had
# make docs       the docs as pages, in build/docs; fails on any warning
# make wheel      tkq as a package, in dist/
# make kernels-wheel  every kernel that tkq ships, compiled, as a package beside it: many minutes
# make hub        tkq as a kernel for the Hugging Face hub, in dist/hub
# make lint       ruff, the contracts of imports (import-linter), the spelling (codespell)
# make clean      removes .venv and what tools left
#
# The first of them makes .venv. To use an environment that has everything already:  make test PYTHON=python
# Tests run in two processes. In more:  make test JOBS=16

JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest test-matrix docs wheel kernels-wheel hub lint clean

ifndef PYTHON
PYTHON := .venv/bin/python
READY := .venv/.tkq-installed
endif

help:
	@sed -n 's/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST)) | head -n 14

# Made anew when what is to be installed changes.
.venv/.tkq-installed: pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tkq needs Python 3.10 or newer, python3 is " + sys.version.split()[0])'
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,cu13]'
	@touch $@

demo: $(READY)
	$(PYTHON) -m tkq demo

test: $(READY)
	$(PYTHON) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(READY)
	$(PYTHON) -m pytest -n $(JOBS) --dist worksteal --all-kernels $(ARGS)

test-oldest: $(READY)
	$(PYTHON) -m tests.matrix --here --smoke $(ARGS)

test-matrix: $(READY)
	$(PYTHON) -m tests.matrix --jobs $(JOBS) $(ARGS)

docs: $(READY)
	$(PYTHON) -m docs.tools --write
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

wheel: $(READY)
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

kernels-wheel: $(READY)
	$(PYTHON) -m tkq compile --all -j $(JOBS) --wheel dist

hub: $(READY)
	$(PYTHON) -m tkq.warmup.hub dist/hub

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m tests.helpers.lint
	$(PYTHON) -m codespell_lib

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
