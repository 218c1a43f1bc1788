# The published settings are for runs ten times as long as the demo. Momentum 0.9 needs more outer steps than a short run has, and
# HALoS with the paper's H = 32 and K = 32 would report three times a region; H = 8 is its authors' script's. The report says what is
# changed. `make demo DEMO_ARGS=` has the published settings.
DEMO_ARGS = --set diloco.outer_momentum=0.5 --set async_local_sgd.outer_momentum=0.5 \
            --set halos.local_momentum=0.5 --set halos.accumulate=8 --set halos.inner_steps=8

# The Python that .venv is made with; 3.11 or newer.
PYTHON ?= python3

# How many processes run tests side by side.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

# Touched once .venv holds what pyproject.toml and constraints.txt ask for.
INSTALLED = .venv/.installed

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: bench bench-live check clean demo help install site test wan

install: $(INSTALLED) ## Make .venv with all that archipel needs

demo: $(INSTALLED) ## Compare the methods on a simulated archipelago; the report is in runs/demo
	.venv/bin/archipel compare --out runs/demo $(DEMO_ARGS)

# Tests that start Ray or read the machine's clock have the machine to themselves. Others run side by side, a file in one process.
test: check ## Run the checks, then all tests
	.venv/bin/python -m pytest -m 'not live' -n $(JOBS) --dist loadfile --durations=5
	.venv/bin/python -m pytest -m live --durations=10

check: $(INSTALLED) ## Lint, formatting and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

wan: $(INSTALLED) ## Test transport and live runs on slow links between network namespaces; needs root and iproute2
	ARCHIPEL_LONG=1 .venv/bin/python -m pytest tests/wan --durations=10 -rs

site: $(INSTALLED) ## Build the site of the docs in build/site
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet -f site/mkdocs.yml

bench: $(INSTALLED) ## Measure speed
	.venv/bin/python bench/bench.py

bench-live: $(INSTALLED) ## Measure what the live runtime costs
	.venv/bin/python bench/bench_live.py

clean: ## Remove .venv, caches, build outputs and runs/demo; other runs stay
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist runs/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@
