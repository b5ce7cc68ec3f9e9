# `make` lists what there is.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
TORCH  := torch==2.13.0
WORKERS ?= 2
# Files go to workers whole, in the order in which tests/conftest.py puts them: long ones first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder

COUNTED := $(addprefix tests/,audit config core gateway membership parity planner traces wire)

SPELLED := docs examples deploy dashboards src console/src benchmarks .github $(wildcard *.md) glossary.toml mkdocs.yml Makefile

.DEFAULT_GOAL := help
.PHONY: help compiled gpu-kit install demo case-study test test-fast test-nightly coverage test-busy test-thrice check format lock clean console docs docs-version dist release

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(VENV)/.installed  ## make the local environment

# torch first and alone: the installer's own settings (find-links, extra indexes) choose the build,
# so a CPU build is taken where the package source offers one. It is the one package, with what it
# asks for at that moment, whose hash is not checked: every source has builds of its own. What it
# asks for is in the lock as well, and checked there.
$(VENV)/.installed: pyproject.toml requirements/lock.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --no-deps --require-hashes -r requirements/lock.txt
	$(PIP) install --quiet --no-deps -e .
	@touch $@

demo: install  ## two clusters of real vLLM engines, twelve requests, one table
	@$(BIN)/prfaas demo --engines vllm

case-study: install  ## the paper's case study, live with timing engines; root, ten minutes
	@$(BIN)/python -m benchmarks.case_study

gpu-kit: install  ## an archive that a bare machine with a GPU runs: dist/gpu-kit.tar.xz
	$(BIN)/python -m tests.gpu.kit.build

compiled: install  ## a wheel with core and simulator compiled, in dist/; needs a C compiler
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(PIP) wheel --quiet --no-deps --wheel-dir dist .

test: check  ## everything CI runs: checks, then all tests, real engines included
	$(PYTEST)

test-fast: install  ## tests that start no engine
	$(PYTEST) -m "not engine"

test-nightly: install coverage  ## what test leaves out: whole matrices, hours; and the coverage
	$(PYTEST) -m nightly

coverage: install  ## the coverage of src by tests that run it in their own process
	$(PYTEST) -m "not engine" --cov=prfaas --cov-report= $(COUNTED)
	@echo "coverage of src: $$($(BIN)/coverage report --format=total) % of its lines (by file: $(BIN)/coverage report)"

test-busy: install  ## all tests beside a busy loop on every core
	$(BIN)/python -m tests.busy $(PYTEST)

test-thrice: install  ## all tests three times in a row
	$(PYTEST) && $(PYTEST) && $(PYTEST)

check: install  ## formatter, linter, types, import contracts, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell $(SPELLED)

format: install  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

console: install  ## compute the explanation's data and build the console's pages (needs Node.js)
	$(BIN)/python -m benchmarks.explanation console/src/learn/data.json
	cd console && npm ci --no-audit --no-fund && npm run build

# Material for MkDocs tells of its successor at each start otherwise.
docs: export NO_MKDOCS_2_WARNING = 1
docs: install  ## the documentation as a site, in site/; fails at a warning
	$(BIN)/mkdocs build --quiet --clean

docs-version: export NO_MKDOCS_2_WARNING = 1
docs-version: install  ## a version of the site, on the branch gh-pages: VERSION=0.1
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/mike deploy --update-aliases $(VERSION) latest
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/mike set-default latest

dist: install  ## sdist, wheel and release notes, in dist/, checked
	$(BIN)/python .ci/release.py $(VERSION)

release: install  ## the same, and a tag: VERSION=0.1.0, of a clean tree
	$(BIN)/python .ci/release.py $(VERSION) --tag

lock: install  ## pin the dependencies anew, with their hashes
	requirements/lock.sh

clean:  ## remove what make and the demo made
	rm -rf $(VENV) site dist .state .mypy_cache .ruff_cache .pytest_cache .hypothesis
