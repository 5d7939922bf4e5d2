# Everything a contributor runs. Each target makes its own environment, so a fresh clone needs nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOWEST := .venv-lowest
LOWEST_TESTS := tests/trainer tests/tools/test_trace.py tests/loading tests/cache tests/storage tests/examples

.PHONY: help demo test test-lowest check format clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## Train on two weighted streams, kill -9 mid-epoch, resume, and prove that no sample was lost
	$(BIN)/python examples/demo.py --out demo_output

test: $(READY)  ## Run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-lowest: $(LOWEST)/.ready  ## Run the tests that depend on Lightning and stores, on the lowest versions we support
	$(LOWEST)/bin/python -m pytest -n 2 --dist worksteal $(LOWEST_TESTS)

check: $(READY)  ## Lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and everything the targets above made
	rm -rf $(VENV) $(LOWEST) demo_output .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[check]'
	touch $@

$(LOWEST)/.ready: pyproject.toml constraints.txt constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --constraint constraints.txt torch
	$(LOWEST)/bin/pip install --quiet --constraint constraints.txt --constraint constraints-lowest.txt --editable '.[test]'
	touch $@
