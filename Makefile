# Every target sets up what it needs, on a machine where nothing has been installed but Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: demo test test-all cases costs test-gpu lint style types format docs dist lowest bench clean

demo: $(VENV)/scanl
	$(BIN)/scanl demo

# The types are checked beside the cases: it takes one core a minute.
test: style
	$(MAKE) --no-print-directory -j 2 types cases

cases: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# Every case, and every law over every sample: up to an hour.
test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --all

# What each law costs of each layer.
costs: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_layers.py tests/test_layer_robustness.py tests/test_nonfinite.py tests/layers --costs

# On a device the kernels are compiled, which takes most of the time: so a worker a core, the small files first, and wide
# memories with ALL=--all alone. Failures are in gpu-failures.txt at once.
test-gpu: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(or $(WORKERS),14) -p no:benchmark --failures gpu-failures.txt $(ALL) \
	tests/ops/_triton tests/ops/_compiler/cells/test_triton_kernels.py

lint: style types

style: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/dev
	$(BIN)/pyright

format: $(VENV)/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The pages and tables that come from the code, then the site in docs/_build. A warning is an error.
docs: $(VENV)/docs
	$(BIN)/python docs/write.py
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -n -j 2 -d docs/_build/trees docs docs/_build/html
	@echo "The site: docs/_build/html/index.html"

# The wheel and the sdist in dist/, and the workflow, checked. Then the wheel runs alone, outside of the checkout.
dist: $(VENV)/dist
	rm -rf dist build
	$(BIN)/python -m build -o dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/python tests/wheel.py try dist/*.whl

# The wheel with the oldest versions that pyproject.toml allows. They are downloaded.
lowest: dist
	$(PYTHON) -m venv --clear dist/lowest
	$(BIN)/python tests/wheel.py lowest > dist/lowest.txt
	dist/lowest/bin/python -m pip --disable-pip-version-check install -qq -c dist/lowest.txt "$$(ls dist/*.whl)[series]"
	dist/lowest/bin/python -I tests/smoke.py

bench: $(VENV)/bench
	$(BIN)/python benchmarks/speed/ops.py linear_scan

clean:
	rm -rf $(VENV)

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/scanl: $(VENV)/python pyproject.toml constraints.txt
	@echo "Installing scanl and what it needs into $(VENV) (torch is the largest) ..."
	$(PIP) -e .
	@touch $@

$(VENV)/docs: $(VENV)/scanl
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/dist: $(VENV)/scanl
	$(PIP) -e '.[dist,series]'
	@touch $@

$(VENV)/dev: $(VENV)/scanl
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/bench: $(VENV)/dev
	$(PIP) -e '.[bench]'
	@touch $@
