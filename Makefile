# make demo | test | test-all | check | lint: each creates .venv and installs first, where that has not been done for
# these versions.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all check lint install

demo: $(INSTALLED)
	$(BIN)/unmask demo

# Tests that start processes of their own run two beside each other, so that one computes while the other waits.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(ROWS) -n auto --maxprocesses 4 --dist loadfile --ignore tests/parallel
	OMP_NUM_THREADS=1 $(BIN)/pytest $(ROWS) -n 2 --dist loadfile tests/parallel

# Also the rows of the matrices that show nothing of their own: some minutes more.
test-all:
	$(MAKE) test ROWS="-m 'full or not full'"

# For while one works, in less than two minutes: the linters, and what the rest stands on.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 tests/rows tests/blocks tests/objectives tests/attention tests/test_config.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
