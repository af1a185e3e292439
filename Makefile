PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SITE := $(VENV)/.site-ready
ENGINES := .venv-engines
ALONE := tests/contracts tests/chaos tests/golden tests/papers tests/unit
# start processes of their own, which are forked: apart from tests that start threads, two at a time on any machine
PROCESSES := $(addprefix tests/contracts/,test_every_scheme_in_processes.py test_every_collective.py test_added_launcher.py)
PAIRS := -n 2 --dist worksteal
QUICK := "not long and not matrix"
LONG := "long and not matrix"
SEEDS ?= 1000
SEED ?= 0
SECONDS ?= 60
RUNS ?= 1000000

.PHONY: setup demo test test-long test-all matrix test-engines chaos chaos-sim check size bench docs docs-serve figures clean help

help:          ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## the virtual environment, made once

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "paceline needs Python 3.11 or newer; point PYTHON= at one (make PYTHON=python3.12 …)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $(READY)

demo: $(READY) ## AGN on real MNIST: two workers and a server, one process each
	$(BIN)/paceline train mnist-mlp --scheme agn --workers 2 --servers 1 --steps 3000 --every 500 lr=0.3 window=10
	@echo
	@echo "Next: kill -9 a worker while it trains, or see a straggler under three schemes: $(BIN)/python examples/straggler.py"

test: $(READY) ## every unit, paper and golden test, most contracts, and a few system tests of each world: minutes
	$(BIN)/python -m pytest -n auto $(ALONE) $(addprefix --ignore=,$(PROCESSES)) -m $(QUICK)
	$(BIN)/python -m pytest $(PAIRS) tests/system $(PROCESSES) -m $(QUICK)

test-long: $(READY) ## the other contracts and system tests: kills, power cuts, Slurm, MPI, SSH, cables; 25 minutes
	$(BIN)/python -m pytest -n auto tests/contracts $(addprefix --ignore=,$(PROCESSES)) -m $(LONG)
	$(BIN)/python -m pytest $(PAIRS) tests/system $(PROCESSES) -m $(LONG)

test-all: test test-long ## both

matrix: $(READY) ## every update rule under every scheme, and every scheme in tests of which the others have a sample; hours
	$(BIN)/python -m pytest -n auto tests/matrix
	$(BIN)/python -m pytest $(PAIRS) tests/system $(PROCESSES) -m matrix

chaos-sim: $(READY) ## random faults in virtual time, over SEEDS= seeds from SEED= on
	$(BIN)/python tests/chaos/simulated.py --seeds $(SEEDS) --seed $(SEED)

test-engines: $(ENGINES)/.ready ## real Ray, Spark (needs Java 17), Jupyter, W&B, MLflow, Keras and JAX, in an environment of their own
	$(ENGINES)/bin/python -m pytest tests/engines tests/unit/test_launch_kubernetes.py tests/unit/test_kubernetes_template.py tests/unit/test_result.py tests/unit/test_hook_trackers.py --durations=0
	for backend in jax torch; do \
	  KERAS_BACKEND=$$backend $(ENGINES)/bin/python -m pytest tests/engines/test_keras_task.py -k "not every_scheme" && \
	  KERAS_BACKEND=$$backend $(ENGINES)/bin/python -m pytest tests/engines/test_every_scheme_of_frameworks.py -k keras \
	  || exit 1; done

$(ENGINES)/.ready: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --editable '.[engines]'
	@touch $@

chaos: $(READY) ## random kills, stops and signals over every scheme, and what must hold after each run: SECONDS= SEED= RUNS=
	$(BIN)/python tests/chaos/chaos.py --seconds $(SECONDS) --seed $(SEED) --runs $(RUNS)

check: $(READY) ## format, lint, types, and that the generated docs are true
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

bench: $(READY) ## paceline beside other libraries on this machine, in under 15 minutes: docs/benchmarks.md
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || \
	  $(BIN)/pip install --quiet --editable '.[bench]' || echo "without matplotlib: no figure"
	$(BIN)/python benchmarks/bench.py

docs: $(SITE) ## write the generated parts of docs/ anew, and the site of the docs to site/: open site/index.html
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(SITE) ## the site on a local port, built anew at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

figures: $(READY) ## the figures of the docs, from runs of paceline compare: some minutes
	$(BIN)/python docs/figures.py

$(SITE): $(READY)
	$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $@

size: $(READY) ## lines per file, largest first
	@git ls-files '*.py' | xargs wc -l | sort -rn

clean:         ## remove the virtual environment and caches
	rm -rf $(VENV) $(ENGINES) .mypy_cache .ruff_cache .pytest_cache .hypothesis site *.egg-info
