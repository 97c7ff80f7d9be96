# Two commands for a newcomer: `make demo`, then `make test`. Needs Python >= 3.11, git and make; everything else goes into .venv.
#
#   PYTHON=python3.12        the interpreter that .venv is made with
#   INDEX=URL                package index for pip (PIP_INDEX_URL and the machine's pip configuration work as well)
#   TORCH_INDEX=URL          extra index for torch alone, e.g. https://download.pytorch.org/whl/cpu for a CPU build where pip offers none
#   PYTHON_GPU=python3       interpreter of `make test-gpu`: any that has torch with CUDA, FLA, Lightning and pytest; nothing is installed
#   RECIPE=recipes/x.yaml    what `make demo` compares
#   WORKERS=2                test processes; each uses one thread

PYTHON ?= python3
PYTHON_GPU ?= python3
INDEX ?=
TORCH_INDEX ?=
RECIPE ?= recipes/demo_cpu.yaml
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt $(if $(INDEX),--index-url $(INDEX))

.PHONY: help venv demo test test-gpu lint format wheel-check clean

help:
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))

## venv         make .venv with the pinned set and the package in editable mode
venv: $(STAMP)

# torch goes first and in a call of its own: pip then takes the CPU build where one is offered, and no dependency pulls in a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python >= 3.11 is needed, {sys.executable} is {sys.version.split()[0]}: make venv PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP_INSTALL) --editable '.[dev]'
	$(BIN)/python -m pip check --disable-pip-version-check
	@touch $@

## demo         train the demo model once per memory configuration on two CPU cores and compare
demo: $(STAMP)
	$(BIN)/lightning-gdn compare $(RECIPE)
	@echo "The table, its Markdown, the PNG and one JSON record per arm and round are in the run folder named above (under runs/)."

## test         every test that needs no GPU; GPU tests are listed as skipped with the reason
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -rs

## test-gpu     the GPU tests, with PYTHON_GPU and without installing anything; fails where there is no GPU
test-gpu:
	PYTHONPATH=. $(PYTHON_GPU) -m pytest tests/gpu --require-gpu -p no:cacheprovider -rs

## lint         ruff (rules and format) and mypy
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## format       let ruff fix and format
format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## wheel-check  build sdist and wheel, install in an empty environment outside the tree, and use it there
wheel-check: $(STAMP)
	$(BIN)/python tests/contracts/wheel_check.py

## clean        remove .venv, build products, caches and run folders' leftovers (runs/ stays)
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
