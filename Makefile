# The same verbs for people and for CI. Each makes .venv first, if it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin

# Unit tests mostly wait, so four at once; a file of tests with real ranks beside another one; those with real hosts
# have the cores for themselves, because they count seconds.
# Hundreds of short commands: what was compiled once is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lab lint format bench clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

demo: .venv/train.stamp ## the whole story on this computer: train, stop, resume, tune, export, generate
	$(BIN)/gangline demo

test: .venv/dev.stamp ## unit tests, the quick lab tests with real hosts, and training tests with real ranks
ifdef TESTS
	$(BIN)/python -m pytest -m "not (lab and slow)" $(TESTS)
else
	@status=0; \
	$(BIN)/python -m pytest -n 4 tests/unit || status=1; \
	$(BIN)/python -m pytest -m "not slow" tests/lab || status=1; \
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/train || status=1; \
	exit $$status
endif

lab: .venv/dev.stamp ## all tests with real hosts in namespaces, the slow ones too, see docs/lab.md
	$(BIN)/python -m pytest tests/lab

lint: .venv/dev.stamp ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev.stamp ## put the style right
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: .venv/dev.stamp ## our loop against others on the same model, data and threads
	$(BIN)/python -m benchmarks

clean: ## remove .venv and the caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist

# pip comes last into a new .venv: an interrupted one is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"{sys.executable} is Python {sys.version.split()[0]}; gangline needs 3.10 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

# torch first and alone: the largest download is not repeated when a later row fails to install.
.venv/train.stamp: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[train]"
	@touch $@

.venv/dev.stamp: .venv/train.stamp
	$(BIN)/python -m pip install -c constraints.txt -e ".[train,dev]"
	@touch $@
