"""A real Prometheus scrapes a live process, and what it stored is what the pools did."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` brings it")
pytest.importorskip("h11", reason="the extra `prometheus` brings it")

from prometheus_client import CollectorRegistry, Gauge

from tests.metrics_pages import CONTRACT, P
from tests.real_prometheus import Prometheus, running_prometheus, until
from veloxquant_exporters.prometheus import start_http_server
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, uninstrument
from veloxquant_mlx.telemetry import registry as watched

pytestmark = pytest.mark.timeout(90)

N_SCRAPES = 6


@pytest.fixture(autouse=True)
def _nothing_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with a process that watches no pool and remembers none."""
    monkeypatch.setattr(watched, "_registry", watched.Registry())


def storage_of(pool: BlockPoolAllocator) -> Any:
    """A storage for the pool, None where MLX is not installed."""
    try:
        from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage
    except ImportError:
        return None
    return MLXBlockStorage(pool, head_dim=8)


def target_of(prometheus: Prometheus, address: str) -> dict[str, Any]:
    """What Prometheus says of one of its targets."""
    (found,) = (
        target
        for target in prometheus.api("targets")["activeTargets"]
        if target["labels"]["instance"] == address
    )
    return dict(found)


def test_pools_come_and_go_while_prometheus_scrapes(tmp_path: Path) -> None:
    """Pools, storages and owners are made and dropped all the time, and no scrape fails.

    A second target whose page is bad shows that a failed scrape would be seen.
    """
    steady = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(steady, name="steady")
    bad = CollectorRegistry()
    Gauge("a", "A.", ["b"], registry=bad).labels("x").set(1)
    with start_http_server(0) as good, start_http_server(0, registry=bad) as other:
        other._routes["/metrics"] = other._routes["/"]  # a page of HTML
        here, there = (server.url.removeprefix("http://") for server in (good, other))
        with running_prometheus(tmp_path, here, there) as prometheus:
            scrapes = f'count_over_time(up{{instance="{here}"}}[1m])'
            made = 0
            while (prometheus.value(scrapes) or 0) < N_SCRAPES:
                for _ in range(20):
                    made += 1
                    churn(steady, f"churn-{made % 100}", made)
            assert made > 100
            # Without the one that may be going on, in which a counter has moved since.
            up = f'min_over_time(up{{instance="{here}"}}[1m])'
            took = f'max_over_time(scrape_duration_seconds{{instance="{here}"}}[1m])'
            # On a machine that is short of time a scrape may run into its second.
            assert prometheus.value(up) == 1 or (prometheus.value(took) or 0) >= 1
            assert prometheus.value(up.replace(here, there)) == 0
            assert target_of(prometheus, here)["lastError"] == ""
            assert target_of(prometheus, there)["lastError"] != ""
            errors = "max(max_over_time(veloxquant_exporter_collect_errors_total[1m]))"
            assert prometheus.value(errors) == 0
            assert prometheus.value("min(min_over_time(veloxquant_exporter_up[1m]))") == 1
            # Counters of a name never fall, whatever became of its pools.
            assert max(prometheus.values(f"resets({P}allocations_total[1m])")) == 0
            assert steady.stats.n_allocations >= made


def churn(steady: BlockPoolAllocator, name: str, owner: int) -> None:
    """A pool with a storage lives and dies; owners come and go in one that stays."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    storage = storage_of(pool)
    instrument(pool, name=name, storage=storage)
    pool.allocate("k", 40, owner)
    steady.allocate("v", 16, owner)
    steady.free_all(owner)
    if owner % 2:
        uninstrument(pool)
    elif owner % 10 == 0:
        del pool, storage
        gc.collect()


def test_what_is_stored_is_what_the_pool_did(tmp_path: Path) -> None:
    """The contract's series, their types and help, and the exemplar of a refused request."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    instrument(pool, name="a")
    with start_http_server(0) as server:
        address = server.url.removeprefix("http://")
        with running_prometheus(tmp_path, address) as prometheus:
            until(lambda: prometheus.value(f"{P}exhausted_total") == 0)
            pool.allocate("k", 40, "one")
            with pytest.raises(BlockPoolExhaustedError):
                pool.allocate("k", 4_000, "two")
            until(lambda: prometheus.value(f"{P}exhausted_total") == 1)
            stored = {name: prometheus.value(f'{name}{{pool="a"}}') for name in CONTRACT}
            assert prometheus.value(f"increase({P}exhausted_total[1m])") != 0
            told = prometheus.api("targets/metadata", match_target='{job="veloxquant"}')
            (exemplars,) = prometheus.api(
                "query_exemplars",
                query=f"{P}exhausted_total",
                start=str(int(time.time()) - 60),
                end=str(int(time.time()) + 60),
            )
    stats = pool.stats.snapshot()
    assert stored == {
        P + "blocks_in_use": stats.blocks_in_use(),
        P + "blocks_total": stats.n_blocks,
        P + "fragmentation": stats.fragmentation(),
        P + "peak_blocks_in_use": stats.peak_blocks_in_use,
        P + "allocations_total": stats.n_allocations,
        P + "frees_total": stats.n_frees,
        P + "reused_total": stats.n_reused,
        P + "exhausted_total": stats.n_exhausted,
        P + "grown_total": stats.n_grown,
        P + "retired_total": stats.n_retired,
    }
    assert exemplars["exemplars"][0]["labels"] == {"owner": "two"}
    kinds = {item["metric"]: item["type"] for item in told}
    assert kinds[P + "blocks_in_use"] == "gauge"
    # Under OpenMetrics, which Prometheus asks for, a counter's family goes without its suffix.
    assert kinds[P + "exhausted"] == "counter"
    assert kinds[P + "operation_duration_seconds"] == "histogram"
    assert all(item["help"] for item in told)
