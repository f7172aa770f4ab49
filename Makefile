# `make demo` and `make test` need Python 3.10 or newer with venv, git and make; the rest they set up in .venv.
# PYTHON=python3.12 picks another interpreter for a new .venv; PIP_FLAGS reaches every pip line.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install $(PIP_FLAGS) -c constraints.txt
STAMP := $(VENV)/installed.stamp
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs wheel bench-smoke clean

help:
	@echo "make demo         kill a training run again and again, compare it with one that was never killed"
	@echo "make test         the tests (JOBS=$(JOBS) processes)"
	@echo "make lint         ruff and mypy"
	@echo "make docs         build the documentation into site/"
	@echo "make wheel        build the wheel and import it from outside the checkout"
	@echo "make bench-smoke  run each benchmark at toy size"
	@echo "make clean        remove what the targets above made, .venv included"

# Everything is installed anew only when one of these files changed, or when an earlier try failed.
$(STAMP): pyproject.toml constraints.txt
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(VENV)/bin/resumable-data demo

test: $(STAMP)
	$(PY) -m pytest -n $(JOBS)

lint: $(STAMP)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

wheel: $(STAMP)
	$(PY) scripts/check_wheel.py

bench-smoke: $(STAMP)
	set -e; for script in benchmarks/[!_]*.py; do \
	  if test -e "$$script"; then echo "== $$script"; $(PY) "$$script" --quick; fi; \
	done

clean:
	rm -rf $(VENV) build dist site demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
