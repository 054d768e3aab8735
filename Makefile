# Two commands: `make demo` and `make test`. Both build .venv on first use and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Two files of tests at a time, a thread each: threads that spin for the same core take ten times as long.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test check lint site calculator bench paper sweep torchtitan clean

demo: $(INSTALLED)
	$(BIN)/distca train examples/demo.toml

test: $(INSTALLED) lint
	$(PYTEST)

check: $(INSTALLED) lint
	$(PYTEST) -m 'not slow and not multiprocess and not browser' tests/workload tests/corpus tests/cost tests/planning \
	  tests/report tests/test_api.py tests/test_baselines.py tests/test_dispatch.py tests/test_docs.py tests/test_imports.py \
	  tests/test_models.py tests/test_spec.py tests/test_validation.py

# Floats are compared here. As on CPUs without AVX2 and without AVX-512, with two threads and with one; then as it is.
ROUNDING := tests/kernels tests/runtime tests/cost tests/planning tests/simulate tests/integrations tests/train
AVX512 := X86_V4 AVX512_ICL AVX512_SPR
SEED := $(shell date +%s)
SHUFFLED := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --shuffle $(SEED) --hypothesis-profile sweep \
  --hypothesis-seed $(SEED)

sweep: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt nixl
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
	  NPY_DISABLE_CPU_FEATURES='X86_V3 $(AVX512)' OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
	  $(SHUFFLED) -m 'not slow and not multiprocess' $(ROUNDING)
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  NPY_DISABLE_CPU_FEATURES='$(AVX512)' OMP_NUM_THREADS=1 \
	  $(SHUFFLED) -m 'not slow and not multiprocess' $(ROUNDING)
	OMP_NUM_THREADS=1 $(SHUFFLED)
	$(PYTEST) -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Into site/, without a network; with --strict a link that leads nowhere is an error.
site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'open site/index.html, or with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site'

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planner.py

# Options after ARGS, as in `make paper ARGS='--quick'`.
paper: $(INSTALLED)
	$(BIN)/python benchmarks/check_paper.py $(ARGS)

# The page that plans in a browser, as static files; its Python comes from npm once, and is then kept in build/.
calculator: $(INSTALLED)
	$(BIN)/python docs/calculator/build.py build/calculator
	@echo 'open it with: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/calculator'

torchtitan:
	test -x $(VENV)-torchtitan/bin/python || $(PYTHON) -m venv $(VENV)-torchtitan
	$(VENV)-torchtitan/bin/python -m pip install --quiet --editable '.[train,torchtitan]' hypothesis pytest pytest-timeout transformers
	$(VENV)-torchtitan/bin/python -m pytest tests/integrations/test_torchtitan*.py tests/integrations/test_versions.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"distca needs Python 3.11 or newer, found {v[0]}.{v[1]}; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,plot,site,dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) $(VENV)-torchtitan build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
