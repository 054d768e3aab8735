# Two commands: `make demo` and `make test`. Both build .venv on first use and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench sweep clean

demo: $(INSTALLED)
	$(BIN)/distca train examples/demo.toml

test: $(INSTALLED) lint
	$(BIN)/python -m pytest

sweep: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planner.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"distca needs Python 3.11 or newer, found {v[0]}.{v[1]}; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,plot,dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
