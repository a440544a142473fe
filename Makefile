# Needs Python 3.11 or newer and make; everything else is installed into $(VENV).
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint types unit format wheel clean

demo: $(READY)  ## pretrain with and without decay on embedded images, write demo/report.html
	$(BIN)/residua demo --out demo

test: lint types unit  ## everything that must hold before a change lands

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: export OMP_NUM_THREADS ?= 1
unit: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	$(BIN)/python -m build --wheel

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist demo
