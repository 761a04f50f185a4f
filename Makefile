# Two commands matter: `make demo` runs the main job, `make test` passes the tests.
# Each sets up a local virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# A broken native backend must not pass for a missing compiler.
export LAPRUNE_REQUIRE_NATIVE ?= 1
# The versions that build the site are pinned; news about later ones is no concern of a build.
export NO_MKDOCS_2_WARNING = 1

.PHONY: demo test lint docs format clean

demo: $(VENV)/ready
	$(BIN)/laprune demo

test: $(VENV)/ready-test
	$(BIN)/pytest --numprocesses auto

lint: $(VENV)/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/ready-docs
	$(BIN)/mkdocs build --strict
	@echo open site/index.html

format: $(VENV)/ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and pinned: left to itself, pip may take a build with gigabytes of CUDA libraries.
$(VENV)/ready: pyproject.toml setup.py constraints.txt $(wildcard src/laprune/backends/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(PIP) torch
	$(PIP) --no-build-isolation --editable '.[studies,baselines]'
	touch $@

$(VENV)/ready-test: $(VENV)/ready
	$(PIP) --no-build-isolation --editable '.[test,lint]'
	touch $@

$(VENV)/ready-docs: $(VENV)/ready
	$(PIP) --no-build-isolation --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info src/laprune/backends/_native*.so
