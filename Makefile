# The same verbs for people and for CI. Each makes .venv first, if it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin

# How many at once on two cores. Unit tests compute. Tests with real processes mostly wait for them. So do tests with
# real hosts, for time limits, and each lab has a network of its own; but they count seconds, so nothing that computes
# for long runs beside them: the story of a job on real hosts is with the tests with real ranks, of which a file runs
# beside another one. Of both, the longest files begin first (LONG in their conftest.py).
# Hundreds of short commands: what was compiled once is kept, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

BY_FILE := --dist loadfile --no-loadscope-reorder --rotate -m "not slow"
STORY := tests/lab/test_story.py

# What `make test` leaves to a verb of its own, for it is to take 15 minutes; CI runs them all (docs/decisions/0049).
PREPARE := tests/process/prepare tests/process/agent/prepare $(wildcard tests/lab/test_prepare*.py)
LAUNCHERS := $(addprefix tests/process/launch/test_,started_by_others.py other_launchers.py) \
	$(addprefix tests/lab/test_,mpirun.py own_launch_commands.py started_by_deepspeed.py)
TRACKERS := tests/process/test_real_trackers.py
RAY := tests/process/launch/test_ray_contract.py tests/lab/test_ray.py
METHODS := $(addprefix tests/train/test_,adam8.py adapter_options.py adapters.py architecture.py compiled.py nf4.py optimizers.py \
	recipes.py spikes.py)
USE := $(addprefix tests/train/test_,evaluate.py export.py generate.py gguf.py merge.py notebook.py publish.py recorded_export.py serving.py stages.py) \
	tests/lab/test_serve_hosts.py
MEASURE := $(addprefix tests/train/test_,bench_collective.py benchmark.py calibrate.py closed_form.py scaling.py \
	prometheus_scrape.py stragglers.py trace.py) tests/lab/test_bench.py tests/process/test_gpu_kit.py
KERNELS := tests/train/test_kernels.py
CONTAINERS := tests/lab/test_containers.py
STRATEGIES := $(addprefix tests/train/test_,fsdp.py local_sgd.py pipeline.py story_parts.py story_rounds.py \
	tensor_parallel.py zero.py)
APART := $(addprefix --ignore=,$(PREPARE) $(LAUNCHERS) $(RAY) $(STRATEGIES) $(METHODS) $(USE) $(MEASURE) $(KERNELS) $(CONTAINERS) $(TRACKERS))

.DEFAULT_GOAL := help
.PHONY: help demo test prepare launchers ray strategies methods use measure kernels containers trackers browser lab slurm bare versions processors lint format bench clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

demo: .venv/train.stamp ## the whole story on this computer: train, stop, resume, tune, export, generate
	$(BIN)/gangline demo

test: .venv/dev.stamp ## unit tests, tests with real processes, with real hosts (the quick ones) and with real ranks; the verbs below have the rest
ifdef TESTS
	$(BIN)/python -m pytest -m "not (lab and slow)" $(TESTS)
else
	@status=0; \
	$(BIN)/python -m pytest -n 2 tests/unit || status=1; \
	$(BIN)/python -m pytest -n 6 tests/process $(APART) || status=1; \
	$(BIN)/python -m pytest -n 4 $(BY_FILE) tests/lab --ignore=$(STORY) $(APART) || status=1; \
	$(BIN)/python -m pytest -n 2 $(BY_FILE) $(STORY) tests/train $(APART) || status=1; \
	exit $$status
endif

prepare: .venv/dev.stamp ## tests of `gangline prepare`: what it changes on real hosts, and that it is undone
	$(BIN)/python -m pytest -n 4 -m "not slow" $(PREPARE)

launchers: .venv/dev.stamp ## tests of other launchers, started by us or starting us: OpenMPI, MPICH, DeepSpeed, accelerate, torchrun
	$(BIN)/python -m pytest -n 4 -m "not slow" $(LAUNCHERS)

ray: .venv/dev.stamp .ray/stamp ## tests of the backend ray with a real Ray, which gets an environment of its own: .ray
	$(BIN)/python -m pytest -n 3 -m "not slow" $(RAY)

strategies: .venv/dev.stamp ## tests of single strategies, beyond the contract of all, which `make test` has
	$(BIN)/python -m pytest -n 2 $(BY_FILE) $(STRATEGIES)

methods: .venv/dev.stamp ## tests of what is trained how: adapters, optimizers, 4 and 8 bits, recipes
	$(BIN)/python -m pytest -n 2 $(BY_FILE) $(METHODS)

use: .venv/dev.stamp ## tests of what is done with a trained model: export, evaluate, generate, serve, notebooks
	$(BIN)/python -m pytest -n 2 $(BY_FILE) $(USE)

measure: .venv/dev.stamp ## tests of what measures and predicts: memory traces, calibration, scaling, stragglers, the kit for GPUs
	$(BIN)/python -m pytest -n 2 $(BY_FILE) $(MEASURE)

kernels: .venv/kernels.stamp ## tests of the kernels of `kernels: auto`, by Triton's interpreter; installs triton first, 200 MB
	$(BIN)/python -m pytest -n 2 $(KERNELS)

containers: .venv/dev.stamp ## a script in containers of a real podman on lab hosts; its image is made of this machine's Python
	$(BIN)/python -m pytest $(CONTAINERS)

trackers: .venv/dev.stamp .trackers/stamp ## what W&B, MLflow and Trackio hold of a run; they get an environment of their own: .trackers
	$(BIN)/python -m pytest -n 2 $(TRACKERS)

browser: .venv/browser.stamp ## the page of `gangline ui` in a headless Chromium: clicks, keys, screenshots, accessibility
	$(BIN)/python -m pytest -m page tests/browser

lab: .venv/dev.stamp ## all tests with real hosts in namespaces, the slow ones too, see docs/lab.md
	$(BIN)/python -m pytest tests/lab

slurm: .venv/dev.stamp ## tests on a real Slurm cluster of lab hosts, the short ones; ALL=1: all of them
	$(BIN)/python -m pytest -n 2 $(if $(ALL),,-m "not slow") tests/slurm

bare: .venv/dev.stamp ## tests on bare lab hosts below a real systemd, with firewalls, the short ones; ALL=1: all of them
	$(BIN)/python -m pytest -n 2 $(if $(ALL),,-m "not slow") tests/bare

versions: .venv/dev.stamp ## a short set of tests with the lowest and with the newest versions of the tested range
	$(BIN)/python -m benchmarks.versions

# PyTorch's kernels and oneDNN's, as on processors without AVX, with AVX2, and with AVX-512.
PROCESSORS := default-SSE41 avx2-AVX2 avx512-AVX512_CORE_BF16

processors: .venv/dev.stamp ## every test with a tolerance, with the kernels for three kinds of processors: an hour
	@status=0; \
	for kinds in $(PROCESSORS); do \
		echo "== kernels for $$kinds"; \
		ATEN_CPU_CAPABILITY=$${kinds%-*} ONEDNN_MAX_CPU_ISA=$${kinds#*-} GANGLINE_TURN=all $(BIN)/python -m pytest -n 2 \
			$(BY_FILE) $$(grep -l tests.train.tolerances tests/train/test_*.py) || status=1; \
	done; \
	exit $$status

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
	rm -rf .venv .ray .trackers .versions .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist

# 80 MB that nothing of gangline imports: hosts have it in their own Python, tests in this one.
.ray/stamp:
	$(PYTHON) -m venv .ray
	.ray/bin/python -m pip install "ray==2.60.0"
	@touch $@

# 900 MB that nothing of gangline imports: rank 0 of a run has them in its own Python, tests of trackers in this one.
.trackers/stamp:
	$(PYTHON) -m venv .trackers
	.trackers/bin/python -m pip install "wandb==0.31.0" "mlflow==3.17.2" "trackio==0.43.0"
	@touch $@

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
	$(BIN)/python -m pip install -c constraints.txt -e ".[train,deepspeed,optuna,top,serve,ui,evaluate,dev]"
	@touch $@

.venv/kernels.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install -c constraints.txt -e ".[kernels]"
	@touch $@

.venv/browser.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install -c constraints.txt -e ".[browser]"
	@touch $@
