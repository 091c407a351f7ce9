# Each target builds the virtual environment it needs, once; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/pip install --disable-pip-version-check -q -c constraints.txt
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all drill lint format bench bench-look-up figures results docs notebooks wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/dev  ## the virtual environment with everything a contributor needs

demo: $(VENV)/user  ## train five small language models, pack the best one's table, compare (a few minutes)
	$(VENV)/bin/torchdefine demo

test: $(VENV)/dev  ## the test suite, without the slow and the GPU part
	$(VENV)/bin/pytest -n $(WORKERS) -m "not slow"

test-all: $(VENV)/dev  ## every test, the slow ones too; the GPU ones where there is a GPU
	$(VENV)/bin/pytest -n $(WORKERS)

drill: $(VENV)/dev  ## damage, kills, odd inputs, full disks and limits, at length: half an hour of CPU time
	$(VENV)/bin/python -m tests.drill --workers $(WORKERS) --out results/drill
	$(VENV)/bin/python docs/make_safety_table.py

lint: $(VENV)/dev  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/dev  ## let ruff put the style right
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/dev  ## ours beside the alternatives in one run: a small CPU version, a few minutes
	$(VENV)/bin/python -m benchmarks --small --device cpu

bench-look-up: $(VENV)/dev  ## look-ups, a loop of one's own and large tables in full, on an idle CPU
	$(VENV)/bin/python -m benchmarks look-up own-loop large-tables --device cpu
	$(VENV)/bin/python -m benchmarks unit --device cpu --only "64 tokens in inference"

figures: $(VENV)/dev  ## draw the pictures of the docs anew
	$(VENV)/bin/python docs/draw_figures.py

results: $(VENV)/user  ## write the tables of results/ anew from its JSON files
	$(VENV)/bin/python results/make_tables.py
	PYTHONPATH=. $(VENV)/bin/python results/leaderboard_tables.py
	$(VENV)/bin/python results/shrink_tables.py
	$(VENV)/bin/python results/benchmark_tables.py
	$(VENV)/bin/python results/own_loop_table.py
	$(VENV)/bin/python results/click_table.py
	$(VENV)/bin/python results/masked_tables.py

docs: $(VENV)/dev  ## the documentation site, in build/site
	$(VENV)/bin/python docs/build_site.py
	$(VENV)/bin/zensical build --strict
	$(VENV)/bin/python docs/check_site.py

notebooks: $(VENV)/dev  ## execute the notebooks anew, with their pictures (a few minutes)
	$(VENV)/bin/python notebooks/execute_notebooks.py

wheel: $(VENV)/dev  ## the wheel and the sdist, in dist/; the wheel is tried in an environment of its own
	rm -rf dist
	$(VENV)/bin/python -m build -q --installer pip
	PYTHON=$(PYTHON) tests/wheel.sh dist/*.whl constraints.txt

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "torchdefine needs Python 3.11 or newer, and $(PYTHON) is older: set PYTHON=/path/to/python3.11."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/user: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(PIP) -e '.[plot]'
	@touch $@

$(VENV)/dev: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $(VENV)/user $@
