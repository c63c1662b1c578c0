# Every target sets up what it needs in .venv (tools/setup.sh) and can be repeated; `make help` lists them.

PYTHON ?=
TORCH ?=
TORCH_INDEX ?=
export PYTHON TORCH TORCH_INDEX

SHELL := /bin/bash
BIN = "$$(cd .venv/bin && pwd -P)"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo lint format test test-slow parts clean

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  PYTHON=python3.12    the Python to use (3.11 to 3.14); one that has torch>=2.11,<3 lends it'
	@echo '  TORCH=torch==2.13.0  the torch to install where there is none'
	@echo '  TORCH_INDEX=URL      where from: on a machine without a GPU name an index of CPU builds (0.2 GB, not 3)'
	@echo '  ARGS="..."           more arguments for the demo'

setup: ## .venv with torch and the package
	@bash tools/setup.sh run

setup-dev: ## the same, with what the tests need
	@bash tools/setup.sh dev

demo: setup ## watch a story form out of masks
	@$(BIN)/diladiff demo $(ARGS)

lint: setup-dev ## ruff, format, types
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

format: setup-dev ## let ruff mend what it can
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

test: lint ## lint and all fast tests
	@bash tools/tests.sh fast

test-slow: setup-dev ## kills, flips, resumes, several processes, debug trainings
	@bash tools/tests.sh slow

parts: setup ## download the pre-trained parts that some tests need
	@$(BIN)/python tools/parts.py

clean: ## remove .venv and what the tests wrote
	@if [ -d .venv ]; then rm -rf "$$(cd .venv && pwd -P)"; fi
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache outputs/tests
