# make demo | test | lint: each creates .venv and installs first, where that has not been done for these versions.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint install

demo: $(INSTALLED)
	$(BIN)/unmask demo

# Tests that start processes of their own need every core; the others run beside one another.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --ignore tests/parallel
	$(BIN)/pytest tests/parallel

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
