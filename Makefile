# Every target makes .venv by itself and installs the pinned versions of constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test test-slow bench lint docs clean

demo: $(VENV)/.demo
	$(BIN)/tacit demo

test: $(VENV)/.test
	$(BIN)/pytest -m "not slow"

test-slow: $(VENV)/.test
	$(BIN)/pytest -m slow

bench: $(VENV)/.test
	$(BIN)/python benchmarks/run.py

lint: $(VENV)/.test $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test $(VENV)/.docs
	$(BIN)/mkdocs build --strict

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torchvision has no build for this torch; timm needs only its import, so both go in last and without their dependencies.
$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[test]'
	$(PIP) --no-deps torchvision==0.16.2 timm==1.0.30
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
