# Every verb makes .venv when it is missing or older than what it is made from.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# How long `make soak` is; with SHORT=1 it shows within a quarter of an hour that all of it works.
SHORT ?=
ROUNDS ?= $(if $(SHORT),1,20)
STREAMS ?= $(if $(SHORT),100,1000)
HOLD_S ?= $(if $(SHORT),10,120)
REQUESTS ?= $(if $(SHORT),500,10000)
RUNS ?= $(if $(SHORT),1,3)
TURNS ?= $(if $(SHORT),40,200)
LOAD_S ?= $(if $(SHORT),20,120)
PIP_INSTALL := $(BIN)/pip install --quiet --no-deps --no-compile --disable-pip-version-check

.PHONY: help venv demo test check soak load bench clean

help: ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | column -t -s $$'\t'

# The constraints file is the complete tested set, so it is installed as it stands, without a resolver.
$(STAMP): pyproject.toml constraints-cpu.txt
	@echo "==> $(VENV): $$(grep -cv '^#' constraints-cpu.txt) pinned packages (a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -r constraints-cpu.txt || { \
		echo "==> if torch's CPU build was not found: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels"; exit 1; }
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

venv: $(STAMP) ## the environment alone

demo: $(STAMP) ## agent sessions on two paged replicas, with a check of every token
	@echo "==> wisp demo $(ARGS)"
	@$(BIN)/wisp demo $(ARGS)

test: $(STAMP) ## all tests that need no GPU
	@echo "==> pytest"
	@$(BIN)/pytest $(ARGS)

check: $(STAMP) ## format, lint, types, import rules, README's paths
	@echo "==> ruff, mypy, import-linter, project files"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/pytest -q tests/unit/test_project.py

soak: $(STAMP) ## faults, streams, broken requests, greedy tenants, Locust: two hours; SHORT=1, ROUNDS=2 and so on
	@failed=""; for run in "bench faults --rounds $(ROUNDS)" "bench streams --streams $(STREAMS) --hold-s $(HOLD_S)" \
		"bench malformed --requests $(REQUESTS)" "bench fairness --runs $(RUNS) --turns $(TURNS)" \
		"load --start --users 8 --run-time $(LOAD_S)s"; do \
		echo "==> wisp $$run"; $(BIN)/wisp $$run || failed="$$failed; wisp $$run"; \
	done; if [ -n "$$failed" ]; then echo "==> failed$$failed"; exit 1; fi

load: $(STAMP) ## Locust sessions against a service of its own, with the service's figures
	@echo "==> wisp load --start --users 8 --run-time 60s $(ARGS)"
	@$(BIN)/wisp load --start --users 8 --run-time 60s $(ARGS)

bench: $(STAMP) ## one benchmark, such as ARGS="fairness --runs 1"; without ARGS the list of them
	@echo "==> wisp bench $(or $(ARGS),--help)"
	@$(BIN)/wisp bench $(or $(ARGS),--help)

clean: ## the venv, caches and local state
	rm -rf $(VENV) .wisp .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
