# `make demo` runs the main job, `make test` the tests; both make the environment they need in .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all smoke test-aot bench-foreign lint format types docs bench lock clean

demo: $(VENV)/.installed  ## train a small GPT on 8 virtual devices
	$(BIN)/jscaler train --model gpt --size nano --plan data_parallel --devices 8 --platform cpu --steps 60

test: $(VENV)/.installed  ## the test suite with the day's share of its sweeps, a process per core
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(VENV)/.installed  ## the test suite with all cases of its sweeps
	JSCALER_SWEEPS=all $(BIN)/python -m pytest -n auto --dist worksteal

smoke: $(VENV)/.installed  ## the tests that guard against a new JAX
	$(BIN)/python -m pytest -m smoke -n auto --dist worksteal

test-aot:  ## the tests that compile for CUDA, on any machine; makes .venv-aot (1.7 GB)
	$(MAKE) VENV=.venv-aot EXTRAS=dev,aot .venv-aot/.installed
	.venv-aot/bin/python -m pytest -m aot -n auto --dist worksteal

bench-foreign:  ## foreign models under plans without arguments, `transformers`' among them; makes .venv-foreign
	$(MAKE) VENV=.venv-foreign EXTRAS=dev,foreign .venv-foreign/.installed
	.venv-foreign/bin/python -m bench.foreign

lint: $(VENV)/.installed  ## style, formatting and the order of packages, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed  ## rewrite files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed  ## static types
	$(BIN)/basedpyright

docs: $(VENV)/.docs  ## the documentation as a site, in build/docs; a dead link or a wrong docstring is an error
	$(BIN)/python -m sphinx -b html -E -q -W --keep-going docs build/docs
	@echo "open build/docs/index.html"

bench: $(VENV)/.installed  ## every benchmark, quick form
	for b in parity collectives overhead state planning programs redistribution search search_scale passes proofs pipeline schedules timeline same_programs fuzz reprs optimizers paper piper prices soak; do $(BIN)/python -m bench.$$b --quick || exit 1; done; $(BIN)/python -m bench.gpu --stored --quick

lock: $(VENV)/.installed  ## write down the versions that the tests ran with
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) .venv-aot .venv-foreign build dist *.egg-info

# CONSTRAINTS= (empty) takes the newest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'jscaler needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[$(EXTRAS)]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[docs]"
	touch $@
