# make help lists the targets. VENV=path uses another virtual environment.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install install-kernels quickstart test test-slow test-soak lint format clean

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

# Tests use no network, and threads would fight over the cores that several ranks already share.
test test-slow test-soak lint: export OMP_NUM_THREADS := 1
test test-slow test-soak lint: export TOKENIZERS_PARALLELISM := false
test test-slow test-soak lint: export HF_HUB_OFFLINE := 1
test test-slow test-soak lint: export TRANSFORMERS_OFFLINE := 1
test test-slow test-soak lint: export VLLM_NO_USAGE_STATS := 1
test test-slow test-soak lint: export DO_NOT_TRACK := 1
# pyright's wrapper would ask for a newer release.
test test-slow test-soak lint: export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

install: ## the virtual environment with the locked packages and this project
	@scripts/install.sh "$(VENV)"

install-kernels: ## install, and on top what only tests and benchmarks need
	@scripts/install.sh "$(VENV)" kernels

quickstart: install ## a small run on this machine; ARGS="section.key=value" overrides settings
	$(BIN)/tba launch configs/quickstart.yaml $(ARGS)

test: lint ## all checks and the fast tests
	$(BIN)/python -m pytest $(ARGS)

test-slow: install-kernels ## the slow tests: several processes, real engines
	$(BIN)/python -m pytest -m 'slow and not gpu' $(ARGS)

test-soak: install-kernels ## half an hour of a whole run: does any process grow? TBA_SOAK_MINUTES=3 for a short one
	$(BIN)/python -m pytest -m soak -o faulthandler_timeout=0 $(ARGS)

lint: install-kernels ## style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: install ## fix formatting and what ruff can fix itself
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean: ## build outputs and caches; never runs/ nor the virtual environment
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find tba_megatron megatron_patches tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
