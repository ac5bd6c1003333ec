# `make` lists the verbs. CI runs the same ones (.ci/run).
#
#   PYTHON=python3.12   the interpreter .venv is built on (default: the first that is new enough)
#   MLX=cuda            the MLX backend extra: apple, cpu, cuda or cuda12 (default: by platform)
#   DEMO_ARGS="..."     options of `vqmon demo`
#   DRILL_ARGS="..."    options of the drill, or names of incidents
#   TEST_ARGS="..."     options of pytest
#   BENCH_ARGS="..."    options of pytest for `make bench`, of the tool for the others
#   BASE=rev            what `make bench-compare` compares with

BIN := .venv/bin
export PYTHON MLX
# A test that hangs is a failure with a traceback, not a run without an end.
export PYTEST_TIMEOUT ?= 120

# Runs, tables and pictures of the benchmarks.
BENCH_OUT := build/bench

.DEFAULT_GOAL := help
.PHONY: help demo test fmt lint type bench bench-guard bench-compare bench-peer pins dash docs docs-generated drill wheel test-wheel clean setup-run setup-dev

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: setup-run ## run the demo: a pool under load, watched (DEMO_ARGS="...")
	@$(BIN)/vqmon demo $(DEMO_ARGS)

test: setup-dev ## run the tests (TEST_ARGS="...")
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile $(TEST_ARGS)

fmt: setup-dev ## format the code, and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

lint: setup-dev ## check style, formatting and spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell

type: setup-dev ## check the types, with mypy and with pyright
	@$(BIN)/mypy
	@$(BIN)/pyright

bench: setup-dev ## run all benchmark suites, and profile the slowest guarded call (BENCH_ARGS="...")
	@mkdir -p $(BENCH_OUT)
	@$(BIN)/python -m pytest -q benchmarks -o "python_files=bench_*.py" -p no:timeout \
		--benchmark-json=$(BENCH_OUT)/suite.json --benchmark-columns=min,median,iqr,rounds $(BENCH_ARGS)
	@$(BIN)/python -m benchmarks.guard.suite $(BENCH_OUT)/suite.json
	@test ! -f $(BENCH_OUT)/guard.json || \
		$(BIN)/python -m benchmarks.guard.flame $(BENCH_OUT)/guard.json --out $(BENCH_OUT)/flame.html

bench-guard: setup-dev ## fail when a call of the allocator grows as it should not (BENCH_ARGS="...")
	@$(BIN)/python -m benchmarks.guard --out $(BENCH_OUT) $(BENCH_ARGS)
	@$(BIN)/python -m benchmarks.guard.publish $(BENCH_OUT)/guard.json --textfile $(BENCH_OUT)/bench.prom

bench-compare: setup-dev ## compare this commit with another one (BASE=rev BENCH_ARGS="...")
	@test -n "$(BASE)" || { echo "say what to compare with: make bench-compare BASE=rev" >&2; exit 2; }
	@$(BIN)/python -m benchmarks.guard.compare commits --base "$(BASE)" --out $(BENCH_OUT) $(BENCH_ARGS)

bench-peer: setup-dev ## compare the allocator with the package of the same API (BENCH_ARGS="...")
	@$(BIN)/python benchmarks/against_peer.py --plot $(BENCH_OUT)/against_peer $(BENCH_ARGS)

pins: ## move constraints.txt to the newest releases allowed
	@scripts/pin

dash: setup-dev ## build the Grafana boards from dashboards/source
	@$(BIN)/python dashboards/build.py

docs: setup-dev ## build the documentation site into build/site, strictly
	@$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/site
	@echo "build/site/index.html"

docs-generated: setup-dev ## write the pages and rules that are made from the code
	@$(BIN)/python -m veloxquant_mlx.telemetry.reference docs/metrics.md
	@scripts/bridge

drill: setup-dev ## act out incidents, and see that the right alerts fire (DRILL_ARGS="...")
	@$(BIN)/python -m dashboards.drill $(DRILL_ARGS)

wheel: setup-dev ## build the wheel and the sdist into dist/
	@$(BIN)/python -m hatchling build

test-wheel: setup-dev ## build wheel and sdist, and try them outside of the checkout (PYTHONS="3.11 3.13")
	@scripts/test-wheel

clean: ## remove .venv and everything built
	@rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Both do nothing when .venv holds what pyproject.toml and constraints.txt ask for.
setup-run:
	@scripts/setup-venv run
setup-dev:
	@scripts/setup-venv dev
