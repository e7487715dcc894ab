# Every target is one command on a fresh clone: what it needs is installed into .venv first, at the versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
MODEL ?=
PROMPT ?= What is the capital of France?
ARGS ?=
BENCH_DATA ?= $(or $(PANDO_BENCH_DATA),$(wildcard ../shared/data))

.DEFAULT_GOAL := help
.PHONY: help serve chat run test check bench dev format clean

help:
	@echo "make serve              serve the default model to OpenAI clients (MODEL=... for another, ARGS=... for options of 'pando serve')"
	@echo "make chat               talk to the default model (MODEL=... for another, ARGS=... for options of 'pando chat')"
	@echo "make run PROMPT='...'   answer one prompt"
	@echo "make check test         what must pass before every commit"
	@echo "make check              ruff, mypy, and who may import whom"
	@echo "make test               every test (ARGS=... goes to pytest)"
	@echo "make bench              the published numbers, beside transformers in the same run (ARGS=... goes to 'pando bench')"
	@echo "make format             let ruff format and fix what it can"
	@echo "make dev                only install what developing needs"
	@echo "make clean              remove .venv and every build output; models that were pulled stay"

serve: .venv/.serve
	@$(BIN)/pando serve $(MODEL) $(ARGS)

chat: .venv/.core
	@$(BIN)/pando chat $(MODEL) $(ARGS)

# The prompt travels in the environment: quotes and dollars in it are nobody's syntax.
run: export PANDO_MAKE_PROMPT := $(value PROMPT)
run: .venv/.core
	@$(BIN)/pando run $(ARGS) -- $(MODEL) "$$PANDO_MAKE_PROMPT"

# What was compiled of Python is kept, whatever the environment says: every worker and every process of a test would do it again.
test check: export PYTHONDONTWRITEBYTECODE :=

# In the order of folders and names: those with few tests, which xdist would begin last, are among the longest, and one worker would wait.
test: .venv/.dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

bench: .venv/.bench
	@$(if $(BENCH_DATA),PANDO_BENCH_DATA='$(BENCH_DATA)' )$(BIN)/pando bench $(ARGS)

dev: .venv/.dev

format: .venv/.dev
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find pando tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Pando needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11")'
	@echo "Making .venv"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.core: EXTRAS :=
.venv/.serve: EXTRAS := [serve]
.venv/.dev: EXTRAS := [dev,serve,bench]
.venv/.bench: EXTRAS := [bench,serve]
.venv/.core .venv/.serve .venv/.dev .venv/.bench: .venv/.made pyproject.toml constraints.txt
	@echo "Installing pando-llm$(EXTRAS) into .venv (once; a few minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.$(EXTRAS)'
	@touch .venv/.core $@
