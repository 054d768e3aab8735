# Two commands: `make demo` and `make test`. Both build .venv on first use and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Two files of tests at a time, a thread each: threads that spin for the same core take ten times as long.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test check lint bench sweep torchtitan clean

demo: $(INSTALLED)
	$(BIN)/distca train examples/demo.toml

test: $(INSTALLED) lint
	$(PYTEST)

check: $(INSTALLED) lint
	$(PYTEST) -m 'not slow and not multiprocess and not browser' tests/workload tests/cost tests/planning \
	  tests/dispatch tests/baselines tests/report tests/test_docs.py tests/test_imports.py tests/test_models.py \
	  tests/test_spec.py tests/test_validation.py

sweep: $(INSTALLED)
	$(PYTEST) -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planner.py

torchtitan:
	test -x $(VENV)-torchtitan/bin/python || $(PYTHON) -m venv $(VENV)-torchtitan
	$(VENV)-torchtitan/bin/python -m pip install --quiet --editable '.[train,torchtitan]' hypothesis pytest pytest-timeout transformers
	$(VENV)-torchtitan/bin/python -m pytest tests/integrations/test_torchtitan*.py tests/integrations/test_versions.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"distca needs Python 3.11 or newer, found {v[0]}.{v[1]}; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,plot,dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) $(VENV)-torchtitan build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
