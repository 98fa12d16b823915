# Every target makes .venv by itself and installs the pinned versions of constraints.txt.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
CLUSTER := .venv-cluster
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo studies audit test test-slow test-cluster test-distributed bench bars lint docs diagram clean

demo: $(VENV)/.demo
	$(BIN)/tacit demo

# `make studies` lists the recipes of the laboratory; `make studies RECIPE=dp_tta/dp-tta.toml [OUT=folder]` runs one.
studies: $(VENV)/.test
ifdef RECIPE
	$(BIN)/python -m studies run $(RECIPE) $(if $(OUT),--out $(OUT))
else
	@$(BIN)/python -m studies list
endif

# Files in the order of their names: sorted by their number of tests, those with few and long ones would come last.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --durations 15 -m "not slow and not cluster"

test-slow: $(VENV)/.test test-cluster
	$(BIN)/pytest -m slow

# Several processes: ranks of a run (gloo on loopback), services that are killed and put under load, Ray Serve.
test-distributed: $(VENV)/.test test-cluster
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not cluster" tests/distributed tests/serve

test-cluster: $(CLUSTER)/.test
	$(CLUSTER)/bin/pytest -m cluster tests/tune/test_ray.py
	$(CLUSTER)/bin/pytest -m cluster tests/serve/test_cluster.py

# Every release of the package, attacked in full: some ten minutes of one core; after a kill it goes on where it was.
# `make test` has a quick version of it.
audit: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/tacit audit --keep .audit.json --out docs/audit.md --picture docs/pictures/audit.png

bench: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python benchmarks/run.py

# The table of bars at the head of docs/benchmarks.md, some 25 minutes on two idle cores; `make bars ROWS="vit-64 bert"`
# runs some of it. Rows are kept in .bars.json as they are finished, and after a kill the rest is run; remove that file
# to measure anew.
bars: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python benchmarks/bars.py --json .bars.json --page docs/benchmarks.md $(if $(ROWS),--row $(ROWS))

lint: $(VENV)/.test $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# The picture on docs/architecture.md, from the imports of the source.
diagram: | $(BIN)/python
	$(BIN)/python tools/package_graph.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torchvision has no build for this torch; timm needs only its import, so both go in last and without their dependencies.
$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[test]'
	$(PIP) --no-deps torchvision==0.16.2 timm==1.0.30
	touch $@

# Ray and Flower may ask for different versions of protobuf, so Ray has an environment of its own.
$(CLUSTER)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cluster,serve]' pytest
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) $(CLUSTER) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
