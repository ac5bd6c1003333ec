"""The same numbers by both routes: what goes out over OTLP is what a scrape shows."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing")
pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.otlp_receiver import OtlpReceiver, values
from veloxquant_exporters.opentelemetry import OtlpPipeline
from veloxquant_exporters.opentelemetry.bridge import translated
from veloxquant_exporters.prometheus import PoolCollector
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import CATALOGUE, Metric, instrument, uninstrument

Labels = frozenset[tuple[str, str]]
# What moves by itself, or by the looking.
RESTLESS = {
    "veloxquant_block_pool_oldest_active_owner_age_seconds",
    "veloxquant_telemetry_overhead_seconds_total",
    "veloxquant_process_resident_memory_bytes",
    "veloxquant_process_unaccounted_bytes",
    "veloxquant_exporter_collect_errors_total",
    "veloxquant_exporter_dropped_events_total",
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not cost a cycle."""
    monkeypatch.setattr("veloxquant_exporters.opentelemetry.feed.MAX_WAIT_S", 30.0)


def scraped() -> dict[tuple[str, Labels], float]:
    """Every sample of the page."""
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def as_samples(row: Metric, attributes: Labels, value: Any) -> dict[tuple[str, Labels], float]:
    """What a Prometheus makes of a point, under the catalogue's name."""
    labels = frozenset(
        (key, text) for key, text in attributes if key not in row.attributes
    )  # fmt: skip
    if row.instrument != "histogram":
        return {(row.name, labels): value}
    bounds, counts, total = value
    found = {(f"{row.name}_count", labels): float(sum(counts)), (f"{row.name}_sum", labels): total}
    below = 0
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        below += count
        le = "+Inf" if bound == math.inf else str(float(bound))
        found[f"{row.name}_bucket", labels | {("le", le)}] = float(below)
    return found


def test_values_over_otlp_equal_values_scraped() -> None:
    """Counters, gauges and histograms of a quiesced pool, names and labels included."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool, name="both")
    for owner in range(3000):
        pool.allocate("k", 40, owner)
        if owner >= 3:
            pool.free_all(owner - 3)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("v", 16 * 999, "greedy")
    with (
        OtlpReceiver() as receiver,
        OtlpPipeline(receiver.url, interval_s=3600, attributes="prometheus") as pipeline,
    ):
        assert pipeline.flush(20)
        batch = values(receiver.metrics[-1])
        page = scraped()
    uninstrument(pool)
    over_otlp: dict[tuple[str, Labels], float] = {}
    for (name, attributes), value in batch.items():
        rows = [r for r in CATALOGUE if r.otel == name and r.attributes.items() <= attributes]
        for row in rows:
            over_otlp |= as_samples(row, attributes, value)
    over_otlp = {key: value for key, value in over_otlp.items() if key[0] not in RESTLESS}
    assert len(over_otlp) > 150
    for key, value in over_otlp.items():
        assert page[key] == pytest.approx(value), key
    # And the other way round: nothing of the pool is missing that has an OTLP name.
    named = {row.name for row in CATALOGUE if row.otel} - RESTLESS
    for key, value in page.items():
        family = key[0].removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        if (key[0] in named or family in named) and ("pool", "both") in key[1]:
            assert math.isinf(value) or key in over_otlp, key
    # Counters and histograms need no bridge to get there.
    for row in CATALOGUE:
        bridged = "occupancy" in row.name or str(row.otel).startswith("gen_ai.")
        if row.instrument in {"counter", "histogram"} and not bridged:
            assert translated(row) == row.name
