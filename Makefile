# Needs only Python 3.11, 3.12 or 3.13 and bash. `make help` lists the targets.
# PYTHON=/path/to/python selects the interpreter, REQUIREMENTS=file the packages.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-cluster test-gpu pytest attack lint bench docs format env dev clean docs

export PYTHON REQUIREMENTS
# If this were set, every process would compile every library again.
export PYTHONDONTWRITEBYTECODE :=
python := .venv/bin/python
PYTEST_ARGS ?=
BENCH ?= aligner

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

quickstart: env  ## train, evaluate and export the aligner, answer with CIRAG, on the built-in dataset
	@$(python) launch/quickstart.py $(ARGS)

# One process checks the types while others run the first tests.
test: dev  ## environment, linter, types and the fast tests, in minutes
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: dev
	@$(python) -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations 10 $(PYTEST_ARGS)

test-slow: dev  ## whole trainings, several processes, comparisons with torch, the built wheel
	@$(python) -m pytest -m slow -n 2 --dist loadscope --no-loadscope-reorder --durations 10 $(PYTEST_ARGS)

test-cluster: dev  ## installs Slurm (Debian, as root) and Ray on this machine, and tests with both
	@$(python) -m tests.cluster $(ARGS)

# Empty JAX_PLATFORMS: JAX uses a GPU if there is one. -rs lists what was skipped.
test-gpu: dev  ## compare attention, training and the engine on 1 and 2 NVIDIA GPUs; skipped without
	@JAX_PLATFORMS= JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(python) -m pytest -m gpu -rs tests/gpu $(PYTEST_ARGS)

attack: dev  ## hostile input with new seeds, until a case fails; ARGS="--minutes 30"
	@$(python) -m tests.attacks $(ARGS)

lint: dev  ## ruff and pyright
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@project=.venv/pyrightconfig.json; [[ -e $$project ]] || project=pyproject.toml; \
	  PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(python) -m pyright --project $$project --pythonpath $(python)

bench: dev  ## compare speed with the usual libraries; BENCH=NAME of a file in experiments/benchmarks
	@$(python) experiments/benchmarks/$(BENCH).py $(ARGS)

format: dev  ## reformat the code
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

docs: env  ## the documentation site, in build/site; dead links fail
	@$(python) -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@rm -rf build/docs build/site && mkdir -p build/docs
	@for name in *.md LICENSE CITATION.cff docs examples experiments cirag_jax configs launch tests; do \
	  ln -s "$(CURDIR)/$$name" build/docs/; done
	@$(python) -m mkdocs build

env:  ## virtual environment for the commands
	@.ci/environment run

dev:  ## virtual environment for tests and checks
	@.ci/environment dev

clean:  ## remove the virtual environment and caches; runs/ stays
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
