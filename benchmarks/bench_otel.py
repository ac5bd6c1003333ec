"""What OpenTelemetry costs: a collection, and the allocations beside it.

    python benchmarks/bench_otel.py

Prints figures beside their budgets and asserts nothing: they are the machine's as much as ours.
"""

from __future__ import annotations

import logging
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "exporters")]

from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402 - after the path
from opentelemetry.sdk.metrics.export import (  # noqa: E402
    ConsoleMetricExporter,
    InMemoryMetricReader,
    MetricExportResult,
)

from veloxquant_exporters.opentelemetry import OtlpPipeline, instrument_meter  # noqa: E402
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.telemetry import instrument  # noqa: E402

N_POOLS = 16
N_ALLOCATIONS = 100_000
N_PINGS = 400


def main() -> None:
    """Measure and print."""
    logging.disable(logging.ERROR)  # of a dead endpoint the SDK tells once a try
    pools = [BlockPoolAllocator(PoolConfig(n_blocks=256)) for _ in range(N_POOLS)]
    for n, pool in enumerate(pools):
        instrument(pool, name=f"bench-{n}")
        work(pool, 2000)
    collection(pools)
    allocation(pools[0])
    delay()


class InstantExporter(ConsoleMetricExporter):
    """Sends nothing."""

    def export(self, *_: Any, **__: Any) -> MetricExportResult:
        """At once."""
        return MetricExportResult.SUCCESS


def work(pool: BlockPoolAllocator, n: int) -> None:
    """Some traffic."""
    for owner in range(n):
        pool.allocate("k", 16, owner)
        pool.free_all(owner)


def collection(pools: list[BlockPoolAllocator]) -> None:
    """Seconds that a collection of all pools takes, histograms drained and built."""
    reader = InMemoryMetricReader()
    handle = instrument_meter(MeterProvider([reader], shutdown_on_exit=False))
    took, cpu = [], []
    for _ in range(50):
        work(pools[0], 200)
        began, cpu_began = time.perf_counter(), time.thread_time()
        reader.collect()
        took.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - cpu_began)
        handle.feed.settled.wait(10)
    handle.close()
    report(f"collection of {N_POOLS} pools, median", statistics.median(took) * 1e3, "ms", "40 ms")
    report("  of which CPU of its thread", statistics.median(cpu) * 1e3, "ms", "40 ms")
    report(f"collection of {N_POOLS} pools, worst", max(took) * 1e3, "ms", "40 ms")
    took.clear()
    pipeline = OtlpPipeline(exporter=InstantExporter(), interval_s=3600)
    for _ in range(50):
        work(pools[0], 200)
        began = time.perf_counter()
        pipeline.flush(10)
        took.append(time.perf_counter() - began)
    pipeline.close()
    report("  the same by our own pipeline, median", statistics.median(took) * 1e3, "ms", "40 ms")


def allocation(pool: BlockPoolAllocator) -> None:
    """Nanoseconds of an allocate, alone and beside exports that fail."""
    alone = quantiles(pool)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pipeline = OtlpPipeline(f"http://127.0.0.1:{port}", interval_s=1.0)
    pipeline.flush(0.2)
    dead = quantiles(pool)
    began = time.perf_counter()
    pipeline.close()
    closed = time.perf_counter() - began
    again = quantiles(pool)
    for name, (p50, p99) in {"no exporter": alone, "dead endpoint": dead, "after": again}.items():
        report(f"allocate, {name}, p50", p50, "ns", "unchanged")
        report(f"allocate, {name}, p99", p99, "ns", "unchanged")
    report("close with a dead endpoint", closed, "s", "5 s")


def quantiles(pool: BlockPoolAllocator) -> tuple[float, float]:
    """p50 and p99 of one-block allocations, in ns."""
    clock, allocate, free_all = time.perf_counter_ns, pool.allocate, pool.free_all
    took = []
    for _ in range(N_ALLOCATIONS):
        began = clock()
        allocate("k", 16, 1)
        took.append(clock() - began)
        free_all(1)
    took.sort()
    return took[len(took) // 2], took[len(took) * 99 // 100]


def delay() -> None:
    """How late a thread wakes that sleeps 1 ms, with and without a collection a 10 ms beside it."""
    reader = InMemoryMetricReader()
    handle = instrument_meter(MeterProvider([reader], shutdown_on_exit=False))
    alone = pings(lambda _: None)
    beside = pings(lambda _: reader.collect())
    handle.close()
    for name, late in (("alone", alone), ("beside collections", beside)):
        late.sort()
        report(f"a sleeper wakes late, {name}, p50", late[len(late) // 2] * 1e3, "ms", "+5 ms")
        report(
            f"a sleeper wakes late, {name}, p99", late[len(late) * 99 // 100] * 1e3, "ms", "+5 ms"
        )


def pings(between: Callable[[int], Any]) -> list[float]:
    """Seconds that a sleeper woke late, while this thread does `between` every 10 ms."""
    late: list[float] = []

    def sleeper() -> None:
        for _ in range(N_PINGS):
            began = time.perf_counter()
            time.sleep(0.001)
            late.append(time.perf_counter() - began - 0.001)

    thread = threading.Thread(target=sleeper)
    thread.start()
    n = 0
    while thread.is_alive():
        between(n)
        n += 1
        thread.join(0.01)
    return late


def report(what: str, value: float, unit: str, budget: str) -> None:
    """One line."""
    print(f"{what:<42} {value:10.3g} {unit:<3} (budget: {budget})")


if __name__ == "__main__":
    main()
