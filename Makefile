PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup lint test demo bench docs clean

setup: $(STAMP)

# One stamp per set of requirements: a second run installs nothing.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

demo: setup
	$(BIN)/ertacache demo

bench: setup
	$(BIN)/python benchmarks/flows.py
	$(BIN)/python benchmarks/frontier.py
	$(BIN)/python benchmarks/fidelity.py emoji-flux

docs: setup
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site dist build
