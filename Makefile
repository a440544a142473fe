# Needs Python 3.11 or newer and make; everything else is installed into $(VENV).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_TO_TEST := $(VENV)/.ready-to-test
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint types unit slow format wheel clean

demo: $(READY)  ## train small networks on embedded images and show what is inside: demo/report.html
	$(BIN)/residua demo --out demo

test: lint types unit  ## everything that must hold before a change lands

lint: $(READY_TO_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY_TO_TEST)
	$(BIN)/mypy

unit: export OMP_NUM_THREADS ?= 1
unit: $(READY_TO_TEST)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

slow: $(READY_TO_TEST)  ## tests that train or look at long lists of models
	$(BIN)/python -m pytest -m slow

format: $(READY_TO_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY_TO_TEST)
	$(BIN)/python -m build --wheel

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(READY_TO_TEST): $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist demo
