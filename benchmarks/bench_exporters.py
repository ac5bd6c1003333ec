"""Exporters: what a scrape and an OTLP collection cost, by pools.

CPU time of this thread; the OTLP collection is read on a thread of its own, so that one is wall time.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra prometheus")
pytest.importorskip("opentelemetry.sdk", reason="the extra otel")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from veloxquant_exporters.opentelemetry import instrument_meter
from veloxquant_exporters.prometheus import PoolCollector
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator


@pytest.mark.benchmark(group="exporters: collect", timer=time.thread_time)
def test_collect(measure: Any, pools: list[BlockPoolAllocator]) -> None:
    """The families of a scrape, without their text."""
    collector, seen = PoolCollector(), []

    def collect() -> None:
        families = {family.name: family for family in collector.collect()}
        seen.append(len(families["veloxquant_block_pool_blocks_managed"].samples))

    measure(collect, check=lambda: seen[-1] == len(pools), n_blocks=0, rounds=20)


@pytest.mark.benchmark(group="exporters: render", timer=time.thread_time)
def test_render(measure: Any, pools: list[BlockPoolAllocator]) -> None:
    """A whole page by prometheus-client."""
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    seen: list[bytes] = []
    measure(
        lambda: seen.append(generate_latest(registry)),
        check=lambda: seen[-1].count(b"\nveloxquant_block_pool_blocks_managed{") == len(pools),
        n_blocks=0,
        rounds=20,
    )


@pytest.mark.benchmark(group="exporters: OTLP collect", timer=time.perf_counter)
def test_otlp_collect(measure: Any, pools: list[BlockPoolAllocator]) -> None:
    """A collection by the SDK."""
    reader = InMemoryMetricReader()
    handle = instrument_meter(MeterProvider([reader], shutdown_on_exit=False))

    def points() -> int:
        data = reader.get_metrics_data()
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
        by_name = {metric.name: metric for metric in metrics}
        return len(by_name["veloxquant.block_pool.block.committed"].data.data_points)

    seen: list[int] = []
    try:
        measure(
            lambda: seen.append(points()),
            check=lambda: seen[-1] == len(pools),
            n_blocks=0,
            rounds=15,
        )
    finally:
        handle.close()
