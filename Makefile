# Everything a contributor runs. Each target makes its own environment, so a fresh clone needs nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOWEST := .venv-lowest
LOWEST_TESTS := tests/trainer tests/tools/test_trace.py tests/dataset tests/reading tests/resume tests/cache tests/storage tests/examples

DIST_VENV := .venv-dist
LOCK_VENV := .venv-lock
SBOM_VENV := .venv-sbom
DEMO_VENV := .venv-demo
# The lock that environments are made of; CONSTRAINTS=/dev/null installs the newest of everything.
CONSTRAINTS ?= constraints.txt
COMPILE = UV_CUSTOM_COMPILE_COMMAND="make lock" UV_PYTHON_DOWNLOADS=never $(LOCK_VENV)/bin/uv pip compile --quiet \
	--universal --python-version 3.10 --upgrade --no-annotate

PEERS_VENV := .venv-peers
PEERS ?= $(PEERS_VENV)/bin/python
PEERS_READY := $(if $(filter $(PEERS_VENV)/%,$(PEERS)),$(PEERS_VENV)/.ready)

.PHONY: help demo docs test test-all test-fast coverage mutants test-lowest test-peers check format bench bench-peers dist sbom docs-versions lock clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(DEMO_VENV)/.ready  ## Train on two weighted streams, kill -9 mid-epoch, resume, and prove that no sample was lost
	@$(DEMO_VENV)/bin/python examples/demo.py --out demo_output

docs: $(READY)  ## Make the documentation site in build/docs; a link that leads nowhere is an error
	$(BIN)/python -m sphinx -b html -E -W --keep-going -j 2 docs build/docs

test: $(READY)  ## Run the tests: every behaviour, and a rotation of the slow cases
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 20 --durations-min 5

test-all: $(READY)  ## Run every case of every test, as before a release
	$(BIN)/python -m pytest -n 2 --dist worksteal --all -o timeout=900

test-fast: $(READY)  ## Run those that start no process, no trainer and no store
	$(BIN)/python -m pytest -n 2 --dist worksteal -m fast

coverage: $(READY)  ## Say which lines the tests of the tools and the fast ones run, and fail below the floor in pyproject.toml
	$(BIN)/python -m pytest -n 2 --dist worksteal -m fast --cov --cov-report= --cov-fail-under=0
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/tools --cov --cov-append --cov-report=term:skip-covered

mutants: $(READY)  ## Make sixty single mistakes, one after another, and say which of them the tests notice
	$(BIN)/python -m tests.mutants

test-lowest: $(LOWEST)/.ready  ## Run the tests that depend on Lightning and stores, on the lowest versions we support
	$(LOWEST)/bin/python -m pytest -n 2 --dist worksteal $(LOWEST_TESTS)

test-peers: $(READY) $(PEERS_READY)  ## Run the guides from other libraries with these, in .venv-peers or with PEERS=/path/to/python
	PEERS=$(abspath $(PEERS)) $(BIN)/python -m pytest --all -rs tests/docs/test_migration_guides.py

check: $(READY)  ## Lint, format, words and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.voice
	$(BIN)/mypy

format: $(READY)  ## Fix what the linter can fix, and lower the counts of words to avoid
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.voice --write

bench: $(READY)  ## Measure how fast local data is read, beside what this machine can do
	$(BIN)/python -m benchmarks.reading

bench-peers: $(READY) $(PEERS_READY)  ## The same beside other libraries, in .venv-peers or with PEERS=/path/to/python
	$(BIN)/python -m benchmarks.reading --peers $(PEERS)

dist: $(DIST_VENV)/.ready  ## Make the wheel and the sdist of a release in dist/, and check how an index would show them
	rm -rf dist
	PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) $(DIST_VENV)/bin/python -m build
	$(DIST_VENV)/bin/twine check --strict dist/*

sbom: $(DIST_VENV)/.ready  ## List what an install of the wheel in dist/ brings, as a CycloneDX file in sbom/
	rm -rf $(SBOM_VENV) sbom
	$(PYTHON) -m venv --without-pip $(SBOM_VENV)
	$(DIST_VENV)/bin/pip --python $(SBOM_VENV)/bin/python install --quiet --constraint $(CONSTRAINTS) torch
	$(DIST_VENV)/bin/pip --python $(SBOM_VENV)/bin/python install --quiet --constraint $(CONSTRAINTS) dist/*.whl
	mkdir sbom
	$(DIST_VENV)/bin/cyclonedx-py environment --output-reproducible $(SBOM_VENV)/bin/python \
		--output-file sbom/$(notdir $(patsubst %-py3-none-any.whl,%,$(wildcard dist/*.whl))).cdx.json

docs-versions: $(READY)  ## Make the site of this commit in build/docs, and that of each released version in build/docs/VERSION
	$(BIN)/python -m docs._ext.versions build/docs

lock: $(LOCK_VENV)/.ready  ## Renew constraints.txt and constraints-lowest.txt with the newest versions
	$(COMPILE) --extra check --output-file constraints.txt pyproject.toml constraints.in
	$(COMPILE) --extra test --constraint constraints.in --constraint constraints-lowest.in \
		--output-file constraints-lowest.txt pyproject.toml

clean:  ## Remove the environments and everything the targets above made
	rm -rf $(VENV) $(LOWEST) $(PEERS_VENV) $(DIST_VENV) $(LOCK_VENV) $(SBOM_VENV) $(DEMO_VENV) dist sbom build/docs build/lib build/bdist.* build/bench_reading.json build/reading_*.png
	rm -rf *.egg-info demo_output .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[check]'
	touch $@

$(DEMO_VENV)/.ready: pyproject.toml constraints.txt
	@echo "Set up $(DEMO_VENV), which the demo runs in (once; 'make clean' removes it)"
	@echo "[1/3] Create the environment"
	@$(PYTHON) -m venv $(DEMO_VENV)
	@echo "[2/3] Install PyTorch: 200 MB to download as a CPU build, 3 GB with CUDA"
	@$(DEMO_VENV)/bin/pip install --constraint $(CONSTRAINTS) torch
	@echo "[3/3] Install lightning_streaming with what the demo needs: 100 MB to download"
	@$(DEMO_VENV)/bin/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[zstd,plot]'
	@touch $@

$(LOWEST)/.ready: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --constraint constraints-lowest.txt torch
	$(LOWEST)/bin/pip install --quiet --constraint constraints-lowest.txt --editable '.[test]'
	touch $@

# The peers need older releases of much, so only the pins with a reason hold.
$(PEERS_VENV)/.ready: constraints.in benchmarks/reading/peers.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/pip install --quiet --constraint constraints.in torch
	$(PEERS_VENV)/bin/pip install --quiet --constraint constraints.in --requirement benchmarks/reading/peers.txt
	$(PEERS_VENV)/bin/pip uninstall --quiet --yes torchvision  # benchmarks/reading/stubs stands in
	touch $@

$(DIST_VENV)/.ready: constraints.txt
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/pip install --quiet --constraint $(CONSTRAINTS) build twine cyclonedx-bom
	touch $@

$(LOCK_VENV)/.ready:
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/pip install --quiet uv
	touch $@
