# `make` lists the verbs. CI runs the same ones (.ci/run).
#
#   PYTHON=python3.12   the interpreter .venv is built on (default: the first that is new enough)
#   MLX=cuda            the MLX backend extra: apple, cpu, cuda or cuda12 (default: by platform)
#   DEMO_ARGS="..."     options of `vqmon demo`
#   TEST_ARGS="..."     options of pytest
#   BENCH_ARGS="..."    options of timeit

BIN := .venv/bin
export PYTHON MLX
# A test that hangs is a failure with a traceback, not a run without an end.
export PYTEST_TIMEOUT ?= 120

BENCH_SETUP := from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig; \
	pool = BlockPoolAllocator(PoolConfig(n_blocks=32768, separate_kv=False))

.DEFAULT_GOAL := help
.PHONY: help demo test fmt lint type bench pins wheel clean setup-run setup-dev

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

demo: setup-run ## run the demo: a pool under load, watched (DEMO_ARGS="...")
	@$(BIN)/vqmon demo $(DEMO_ARGS)

test: setup-dev ## run the tests (TEST_ARGS="...")
	@$(BIN)/python -m pytest -q $(TEST_ARGS)

fmt: setup-dev ## format the code, and mend what ruff can mend
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

lint: setup-dev ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: setup-dev ## check the types, with mypy and with pyright
	@$(BIN)/mypy
	@$(BIN)/pyright

bench: setup-dev ## run the benchmarks (BENCH_ARGS="...")
	@echo "allocate and free_all of 16,384 blocks:"
	@$(BIN)/python -m timeit -n 20 -s "$(BENCH_SETUP)" $(BENCH_ARGS) \
		"pool.allocate('kv', 16 * 16384, 1); pool.free_all(1)"

pins: ## move constraints.txt to the newest releases allowed
	@scripts/pin

wheel: setup-dev ## build the wheel and the sdist into dist/
	@$(BIN)/python -m hatchling build

clean: ## remove .venv and everything built
	@rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Both do nothing when .venv holds what pyproject.toml and constraints.txt ask for.
setup-run:
	@scripts/setup-venv run
setup-dev:
	@scripts/setup-venv dev
