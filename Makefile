# `make demo` and `make test` need only a Python (3.10 or later) and a package index; all else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Our folder kernels/ must not shadow the Hugging Face package of that name when the root is the working directory.
export PYTHONSAFEPATH := 1
# Tests never use the network.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
SOURCES := $(shell find convert uptrain eval kernels recipes scripts -type f -not -path '*/__pycache__/*')

.PHONY: demo test test-all lint types clean

demo: $(VENV)/.installed
	$(BIN)/headfold run quickstart

test: $(VENV)/.installed-dev
	$(OFFLINE) $(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.installed-dev
	$(OFFLINE) $(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy -p headfold.kernels -p headfold.convert -p headfold.uptrain -p headfold.eval -p headfold.recipes -p headfold.scripts

$(VENV)/.dependencies: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt .
	touch $@

$(VENV)/.dependencies-dev: $(VENV)/.dependencies
	$(BIN)/python -m pip install --quiet --constraint constraints.txt '.[dev]'
	touch $@

# An installed copy, which is what users get. build/ would bring back files that have since been deleted.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.dependencies-dev $(VENV)/.installed
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
