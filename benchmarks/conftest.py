"""Common to the suites: what a round is, the work it must have done, and what refuses to be timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, uninstrument

__all__ = ["Measure"]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run where nothing would be measured: that must not look like a pass."""
    workers = getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput")
    if workers:
        raise pytest.UsageError("benchmarks share no cores: run them without pytest-xdist")
    if getattr(config.option, "benchmark_disable", False):
        raise pytest.UsageError("--benchmark-disable runs benchmarks without measuring them")
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("pytest-benchmark is missing: it is in the dependency group bench")


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Leave out what names the host, add what explains a number."""
    for name in ("node", "release"):
        machine_info.pop(name, None)
    machine_info["cpus"] = os.cpu_count()
    machine_info["load"] = list(os.getloadavg())


class Measure(Protocol):
    """What the fixture `measure` gives."""

    def __call__(
        self,
        call: Callable[..., Any],
        *,
        setup: Callable[[], Any] | None = None,
        check: Callable[[], bool],
        n_blocks: int,
        calls: int = 1,
        rounds: int = 15,
    ) -> None:
        """Time `call` in rounds of one."""


@pytest.fixture
def measure(benchmark: Any) -> Measure:
    """Time a call: setup, one timed round, check; the report says blocks a call and calls a round."""

    def run(
        call: Callable[..., Any],
        *,
        setup: Callable[[], Any] | None = None,
        check: Callable[[], bool],
        n_blocks: int,
        calls: int = 1,
        rounds: int = 15,
    ) -> None:
        def teardown(*_: object) -> None:
            assert check(), "the round did not do its work"

        benchmark.extra_info.update(n_blocks=n_blocks, calls=calls)
        benchmark.pedantic(call, setup=setup, teardown=teardown, rounds=rounds, warmup_rounds=2)
        per_block = benchmark.stats.stats.min / calls / max(n_blocks, 1)
        benchmark.extra_info["ns_per_block"] = round(per_block * 1e9, 2)

    return run


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Under pytest-benchmark's table: what one round was, and the time of one block."""
    session = getattr(config, "_benchmarksession", None)
    timed = [bench for bench in getattr(session, "benchmarks", []) if "calls" in bench.extra_info]
    if not timed:
        return
    terminalreporter.section("what a round was")
    for bench in timed:
        info = bench.extra_info
        terminalreporter.write_line(
            f"{bench.name:44} {info['n_blocks']:>7,} blocks a call, {info['calls']:>5,} calls a "
            f"round{_per_block(info)} (minimum of {bench.stats.rounds})"
        )


def _per_block(info: dict[str, Any]) -> str:
    if not info["n_blocks"] or "ns_per_block" not in info:
        return ""
    return f", {info['ns_per_block']:,.2f} ns a block"


@pytest.fixture(params=(1, 16))
def pools(request: Any) -> Iterator[list[BlockPoolAllocator]]:
    """Watched pools, each with a history of calls."""
    found = [BlockPoolAllocator(PoolConfig(16, 1024)) for _ in range(request.param)]
    for pool in found:
        instrument(pool)
        for owner in range(200):
            pool.allocate("k", 40, owner)
            pool.free_all(owner)
    yield found
    for pool in found:
        uninstrument(pool)
