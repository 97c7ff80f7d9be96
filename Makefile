# Two commands for a newcomer: `make demo`, then `make test`. Needs Python >= 3.11, git and make; everything else goes into .venv.
#
#   PYTHON=python3.12        the interpreter that .venv is made with
#   INDEX=URL                package index for pip (PIP_INDEX_URL and the machine's pip configuration work as well)
#   TORCH_INDEX=URL          extra index for torch alone, e.g. https://download.pytorch.org/whl/cpu for a CPU build where pip offers none
#   PYTHON_GPU=python3       interpreter of `make test-gpu`: any that has torch with CUDA, FLA, Lightning and pytest; nothing is installed
#   RECIPE=recipes/x.yaml    what `make demo` compares
#   WORKERS=2                test processes; each uses one thread
#   MATRIX="5.17.0 5.24.0"   transformers versions of `make test-matrix`, an environment each

PYTHON ?= python3
PYTHON_GPU ?= python3
INDEX ?=
TORCH_INDEX ?=
RECIPE ?= recipes/demo_cpu.yaml
WORKERS ?= 2
MATRIX ?= 5.17.0 5.24.0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# Pins that a transformers version needs besides its own; every other package stays at what constraints.txt says.
FORCED_5.24.0 := huggingface_hub==2.4.0 httpcore2==2.16.2 httpx2==2.16.2 truststore==0.10.5
# What reads transformers' model code: bit-equality, adapters, and taking over a model.
MATRIX_TESTS := tests/parity tests/unit/test_adapter_*.py tests/unit/test_apply.py tests/unit/test_takeover.py tests/unit/test_kernels.py

.PHONY: help venv demo test test-gpu test-matrix $(MATRIX:%=test-tf%) lint format wheel-check clean

# $(call make-venv,FOLDER,CONSTRAINTS): an environment with the package in editable mode.
# torch goes first and in a call of its own: pip then takes the CPU build where one is offered, and no dependency pulls in a CUDA build.
pip-install = $(1)/bin/python -m pip install --disable-pip-version-check --quiet --constraint $(2) $(if $(INDEX),--index-url $(INDEX))
define make-venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python >= 3.11 is needed, {sys.executable} is {sys.version.split()[0]}: make venv PYTHON=...")'
	$(PYTHON) -m venv $(1)
	$(call pip-install,$(1),$(2)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(call pip-install,$(1),$(2)) --editable '.[dev]'
	$(1)/bin/python -m pip check --disable-pip-version-check
	@touch $(1)/.stamp
endef

help:
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))

## venv         make .venv with the pinned set and the package in editable mode
venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(call make-venv,$(VENV),constraints.txt)

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

## test-matrix  parity, adapters and takeover with the oldest and the newest supported transformers, same torch (-k goes on after a failure)
test-matrix: $(MATRIX:%=test-tf%)

$(MATRIX:%=test-tf%): test-tf%: .venv-tf%/.stamp
	@$(<D)/bin/python -c 'import torch, transformers as t; t.__version__ == "$*" or exit(f"{t.__version__}, not $*"); print("== transformers $*, torch", torch.__version__)'
	OMP_NUM_THREADS=1 $(<D)/bin/python -m pytest -n $(WORKERS) --dist worksteal -rs $(MATRIX_TESTS)

$(MATRIX:%=.venv-tf%/.stamp): .venv-tf%/.stamp: pyproject.toml constraints.txt Makefile
	@mkdir -p $(@D)
	@sed $(foreach pin,transformers $(FORCED_$*),-e '/^$(firstword $(subst ==, ,$(pin)))==/d') constraints.txt > $(@D)/constraints.txt
	@printf '%s\n' transformers==$* $(FORCED_$*) >> $(@D)/constraints.txt
	$(call make-venv,$(@D),$(@D)/constraints.txt)

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

## clean        remove every environment, build products and caches (runs/ stays)
clean:
	rm -rf $(VENV) .venv-tf* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
