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

.PHONY: demo test test-sae-lens test-dictionary-learning test-callbacks test-jaxopt lint docs format clean

demo: $(VENV)/ready
	$(BIN)/laprune demo

test: $(VENV)/ready-test
	$(BIN)/pytest --numprocesses auto

# The packages our adapters and callbacks serve are heavy: they have environments of their own.
test-sae-lens test-dictionary-learning: test-%: .venv-%/ready
	.venv-$*/bin/pytest -W default -o addopts=--doctest-modules \
		tests/test_$(subst -,_,$*).py src/laprune/sae/$(subst -,_,$*).py

test-callbacks: .venv-callbacks/ready
	.venv-callbacks/bin/pytest -W default -o addopts=--doctest-modules \
		tests/test_callbacks.py src/laprune/callbacks \
		'tests/test_docs.py::test_code_prints_what_the_page_shows[howto/annealing.md]'

test-jaxopt: .venv-jaxopt/ready
	.venv-jaxopt/bin/pytest tests/test_baselines.py tests/test_scaling.py -k 'box_section or missing'

lint: $(VENV)/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/ready-test
	$(BIN)/mkdocs build --strict
	@echo "$(BIN)/python -m http.server -d site, and open localhost:8000 (from disk, without search)"

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
	$(PIP) --no-build-isolation --editable '.[test,lint,docs]'
	touch $@

# dictionary_learning draws in a torchvision it does not use, built for another torch.
.venv-%/ready: pyproject.toml setup.py constraints.txt $(wildcard src/laprune/backends/native/*)
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --constraint constraints.txt setuptools wheel torch
	.venv-$*/bin/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test,$*]'
	.venv-$*/bin/pip uninstall --quiet --yes torchvision
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist site src/*.egg-info src/laprune/backends/_native*.so
