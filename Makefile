# `make` lists the targets. Every target sets up what it needs, once; a fresh machine needs only
# Python >= 3.11, make and git.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
BIN := $(VENV)/bin
READY := $(VENV)/.headway-ready
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONUNBUFFERED := 1
PYTEST_ARGS ?=

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## Create .venv with the pinned packages (the other targets do it for you)

# The stamp depends on the pins and on the entry points; the editable install follows the sources by itself.
$(READY): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Headway needs Python 3.11 or newer with the venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "==> Setting up $(VENV): about 3 GB to download (torch with its CUDA libraries is 2.6 GB of it), 6.5 GB on disk"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed -n '/^uv==/,/[^\\]$$/p' constraints.txt > $(VENV)/uv.txt
	@test -x $(BIN)/uv || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(VENV)/uv.txt
	@$(BIN)/uv pip install --python $(BIN)/python --no-deps --require-hashes -r constraints.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: demo
demo: $(READY) ## See a real model answer and the tuner at work on this machine
	@headway demo

.PHONY: test
test: $(READY) ## Run the whole test suite (builds a Kubernetes control plane the first time)
	@python tools/kube/build.py
	@python -m pytest $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: $(READY) ## Run the tests that need neither a control plane nor the real model
	@python -m pytest -m "not cluster and not model and not slow" $(PYTEST_ARGS)

.PHONY: check
check: $(READY) ## Lint, format, types, layers
	@ruff check .
	@ruff format --check .
	@mypy
	@lint-imports
	@python -m pytest -q tests/test_house.py

.PHONY: cluster
cluster: $(READY) ## Start a real control plane to play with; prints the kubeconfig
	@python tools/kube/build.py
	@python tools/kube/cluster.py

.PHONY: bench
bench: $(READY) ## Measure this machine: Headway beside its peers, a table for each workload
	@python bench/run.py

.PHONY: lock
lock: ## Resolve the pins anew into constraints.txt
	@uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --quiet --output-file constraints.txt $(LOCK_ARGS)

.PHONY: clean
clean: ## Remove the virtual environment and caches of this work tree
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .headway
