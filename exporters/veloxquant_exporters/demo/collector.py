"""The ten metrics of `AllocationStats.to_prometheus`, with a label for the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from veloxquant_exporters.sources import SnapshotSource
from veloxquant_mlx.telemetry import PoolSnapshot

__all__ = ["PoolCollector"]

PREFIX: Final = "veloxquant_block_pool"
READ: Final[dict[str, tuple[str, Callable[[PoolSnapshot], float]]]] = {
    "blocks_in_use": ("Blocks held now.", lambda pool: pool.blocks_in_use),
    "blocks_total": ("Blocks managed now.", lambda pool: pool.n_blocks),
    "fragmentation": ("Partly filled blocks over managed ones.", lambda pool: pool.fragmentation),
    "peak_blocks_in_use": ("Most blocks held at one time.", lambda pool: pool.peak_blocks_in_use),
    "allocations_total": ("Blocks handed out.", lambda pool: pool.n_allocations),
    "frees_total": ("Blocks given back.", lambda pool: pool.n_frees),
    "reused_total": ("Blocks handed out anew.", lambda pool: pool.n_reused),
    "exhausted_total": ("Allocations refused for want of blocks.", lambda pool: pool.n_exhausted),
    "grown_total": ("Blocks added by growth.", lambda pool: pool.n_grown),
    "retired_total": ("Blocks removed by shrink.", lambda pool: pool.n_retired),
}
GAUGES: Final = frozenset({"blocks_in_use", "blocks_total", "fragmentation", "peak_blocks_in_use"})


class PoolCollector(Collector):
    """Reads the pools of a source at each scrape."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """One family a metric, one sample a pool."""
        pools = [pool for process in self._source.read().processes for pool in process.pools]
        for name, (text, read) in READ.items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            metric = family(f"{PREFIX}_{name}", text, labels=["pool"])
            for pool in pools:
                metric.add_metric([pool.name], read(pool))
            yield metric
