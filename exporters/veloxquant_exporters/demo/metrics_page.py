"""The page for Prometheus: the ten metrics of `AllocationStats.to_prometheus`, by pool."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from click import ClickException
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from veloxquant_mlx.memory.allocation_stats import AllocationStats
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["MetricsPage"]

HOST = "127.0.0.1"
PREFIX = "veloxquant_block_pool"


class MetricsPage:
    """Serves `/metrics` on 127.0.0.1 from a thread of its own, until it is closed.

    Args:
        port: 0 takes a free one.

    Raises:
        ClickException: The port cannot be had.
    """

    def __init__(self, port: int) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        try:
            self._server, self._thread = start_http_server(port, HOST, self._registry)
        except OSError as error:
            raise ClickException(_refusal(port, error)) from error
        self.url = f"http://{HOST}:{self._server.server_port}/metrics"

    def show(self, pool: BlockPoolAllocator, name: str) -> None:
        """Serve the metrics of a pool under this name."""
        self._registry.register(_SimpleCollector(pool, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _refusal(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {HOST} is taken; choose another with --port, or any with --port 0"
    if error.errno == errno.EACCES:
        return f"port {port} is not allowed for this user; choose one above 1023 with --port"
    return f"cannot serve on port {port} of {HOST}: {error}"


class _SimpleCollector(Collector):
    def __init__(self, pool: BlockPoolAllocator, name: str) -> None:
        self._pool = pool
        self._name = name

    def collect(self) -> Iterator[Metric]:
        stats = self._pool.stats.snapshot()
        for name, value, text in _gauges(stats):
            gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["pool"])
            gauge.add_metric([self._name], value)
            yield gauge
        for name, value, text in _counters(stats):
            counter = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["pool"])
            counter.add_metric([self._name], value)
            yield counter


def _gauges(stats: AllocationStats) -> tuple[tuple[str, float, str], ...]:
    return (
        ("blocks_in_use", stats.blocks_in_use(), "Blocks held now."),
        ("blocks_total", stats.n_blocks, "Blocks managed now."),
        ("fragmentation", stats.fragmentation(), "Partly filled blocks over blocks managed."),
        ("peak_blocks_in_use", stats.peak_blocks_in_use, "Most blocks held at one time."),
    )


def _counters(stats: AllocationStats) -> tuple[tuple[str, float, str], ...]:
    return (
        ("allocations_total", stats.n_allocations, "Blocks handed out."),
        ("frees_total", stats.n_frees, "Blocks given back."),
        ("reused_total", stats.n_reused, "Blocks handed out that had been handed out before."),
        ("exhausted_total", stats.n_exhausted, "Allocations refused for want of free blocks."),
        ("grown_total", stats.n_grown, "Blocks added by growth."),
        ("retired_total", stats.n_retired, "Blocks removed by shrink."),
    )
