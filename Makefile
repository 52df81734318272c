# Needs Python 3.11, 3.12 or 3.13, bash and nothing else; `make help` lists the targets.
# PYTHON=/path/to/python chooses the interpreter, REQUIREMENTS=file the set to install.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-cluster pytest attack lint bench docs format env dev clean docs

export PYTHON REQUIREMENTS
# Where this is set, every process compiles every library again: seconds each, minutes of the tests.
export PYTHONDONTWRITEBYTECODE :=
python := .venv/bin/python
PYTEST_ARGS ?=
BENCH ?= aligner

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

quickstart: env  ## train, evaluate and export the aligner, answer with CIRAG, on the built-in dataset
	@$(python) launch/quickstart.py $(ARGS)

# The types are checked beside the first tests, by one process.
test: dev  ## environment, lint, types and the fast tests, in minutes
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: dev
	@$(python) -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations 10 $(PYTEST_ARGS)

test-slow: dev  ## whole trainings, several processes, torch as an oracle, the built wheel
	@$(python) -m pytest -m slow -n 2 --dist loadscope --no-loadscope-reorder --durations 10 $(PYTEST_ARGS)

test-cluster: dev  ## a real Slurm (Debian, root) and a real Ray of this one machine, both installed by it
	@$(python) -m tests.cluster $(ARGS)

attack: dev  ## hostile input with new seeds, until one fails; ARGS="--minutes 30"
	@$(python) -m tests.attacks $(ARGS)

lint: dev  ## ruff and pyright
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@project=.venv/pyrightconfig.json; [[ -e $$project ]] || project=pyproject.toml; \
	  PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(python) -m pyright --project $$project --pythonpath $(python)

bench: dev  ## side by side with the usual libraries; BENCH=NAME of a file in experiments/benchmarks
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

env:  ## the virtual environment of the commands
	@.ci/environment run

dev:  ## the virtual environment of the checks
	@.ci/environment dev

clean:  ## remove the virtual environment and caches; runs/ stays
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
