"""Finished metrics: made of readings, bounded, and added to what a program exports itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing")

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

from tests.otlp_receiver import OtlpReceiver, values
from veloxquant_exporters.opentelemetry import BucketExporter, OtlpPipeline, instrument_meter
from veloxquant_exporters.opentelemetry import points as points_module
from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.maker import MetricMaker
from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, OBSERVABLES
from veloxquant_exporters.opentelemetry.points import Remembered
from veloxquant_exporters.sources import LiveSource, Reading
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import CATALOGUE, instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

P = "veloxquant.block_pool."
ROWS = {**OBSERVABLES, **{str(row.otel): (row,) for row in HISTOGRAMS}}
DELTA: dict[type, AggregationTemporality] = {
    sdk.ObservableCounter: AggregationTemporality.DELTA,
    sdk.Histogram: AggregationTemporality.DELTA,
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not cost a cycle."""
    monkeypatch.setattr("veloxquant_exporters.opentelemetry.feed.MAX_WAIT_S", 30.0)


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """A watched pool that has worked."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool, name="buckets")
    for owner in range(500):
        pool.allocate("k", 40, owner)
        pool.free_all(owner)
    yield pool
    uninstrument(pool)


def reading(**changes: Any) -> Reading:
    """The pool now, with changes."""
    process = take_snapshot()
    (snapshot,) = [p for p in process.pools if p.name == "buckets"]
    return Reading((replace(process, pools=(replace(snapshot, **changes),)),), {"": 1})


def made(maker: MetricMaker, shown: Reading | None, feed: Feed) -> dict[str, Any]:
    """Metrics by name."""
    metrics = maker.make(shown, feed, "semantic")
    assert len({m.name for m in metrics}) == len(metrics)
    return {m.name: m for m in metrics}


def test_a_foreign_reader_exports_whole_buckets(pool: BlockPoolAllocator) -> None:
    """The SDK's own reader and the program's own provider, which has metrics of its own."""
    with OtlpReceiver() as receiver:
        exporter = BucketExporter(OTLPMetricExporter(receiver.url + "/v1/metrics"))
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
        provider = MeterProvider([reader], shutdown_on_exit=False)
        provider.get_meter("theirs").create_counter("requests").add(3)
        handle = instrument_meter(provider, buckets=exporter)
        provider.force_flush(20_000)
        got = values(receiver.metrics[-1])
        truth = reading().processes[0].pools[0].lock_wait
        key = (P + "lock.wait", frozenset({(P + "name", "buckets")}))
        assert got[key] == (truth.bounds, truth.counts, pytest.approx(truth.total))
        assert got["requests", frozenset()] == 3
        handle.close()
        provider.force_flush(20_000)
        after = values(receiver.metrics[-1])
        assert key not in after and after["requests", frozenset()] == 3
        provider.shutdown(5_000)


def test_others_on_our_provider_are_exported_too(pool: BlockPoolAllocator) -> None:
    """`OtlpPipeline.provider` is a provider like any other."""
    with OtlpReceiver() as receiver, OtlpPipeline(receiver.url, interval_s=3600) as pipeline:
        pipeline.provider.get_meter("theirs").create_counter("requests").add(3)
        assert pipeline.flush(20)
        (batch,) = receiver.metrics
        names = {m.name for r in batch.resource_metrics for s in r.scope_metrics for m in s.metrics}
        assert {"requests", P + "allocations", P + "lock.wait"} <= names


@pytest.mark.timeout(60)
def test_a_locked_pool_costs_its_own_cycle_only(pool: BlockPoolAllocator) -> None:
    """The pipeline exports what it can, counts the cycle, and has everything in the next."""
    skipped = frozenset({("veloxquant.exporter.reason", "otel_skipped")})
    with OtlpReceiver() as receiver, OtlpPipeline(receiver.url, interval_s=3600) as pipeline:
        pipeline._feed._max_wait_s = 0.05
        with pool._lock:
            assert pipeline.flush(20)
        got = values(receiver.metrics[-1])
        assert got["veloxquant.exporter.collect_errors", skipped] == 1
        assert P + "allocations" not in {name for name, _ in got}
        pipeline._feed._max_wait_s = 20
        assert pipeline.flush(20)
        assert P + "allocations" in {name for name, _ in values(receiver.metrics[-1])}


def test_both_temporalities_count_the_same_and_never_step_back(pool: BlockPoolAllocator) -> None:
    """Delta points add up to the cumulative one; a count that steps back stands still."""
    feed = Feed(LiveSource())
    cumulative, delta = MetricMaker(ROWS, None), MetricMaker(ROWS, DELTA)
    shown = [reading(n_allocations=n) for n in (5, 9, 3, 4, 12)]
    name = P + "allocations"
    totals, gains = [], []
    for one in shown:
        total, gain = made(cumulative, one, feed)[name].data, made(delta, one, feed)[name].data
        assert total.is_monotonic and gain.is_monotonic
        assert total.aggregation_temporality is AggregationTemporality.CUMULATIVE
        assert gain.aggregation_temporality is AggregationTemporality.DELTA
        totals.append(total.data_points[0].value)
        gains.append(gain.data_points[0].value)
    assert totals == [5, 9, 9, 9, 12]
    assert gains == [5, 4, 0, 0, 3] and sum(gains) == totals[-1]


def test_a_restarted_worker_counts_from_zero(pool: BlockPoolAllocator) -> None:
    """Its label is that of the one that ended: the count begins anew, and says when."""
    feed = Feed(LiveSource())
    cumulative, delta = MetricMaker(ROWS, None), MetricMaker(ROWS, DELTA)
    name = P + "allocations"
    totals, gains = [], []
    for n in (5, 9, 3, 4):
        one = reading(n_allocations=n)
        one = Reading(tuple(replace(p, process="worker-0") for p in one.processes), {"worker-0": 1})
        totals.append(made(cumulative, one, feed)[name].data.data_points[0])
        gains.append(made(delta, one, feed)[name].data.data_points[0].value)
    assert [point.value for point in totals] == [5, 9, 3, 4]
    starts = [point.start_time_unix_nano for point in totals]
    assert starts[0] == starts[1] < starts[2] == starts[3]
    assert gains == [5, 4, 3, 1]


def test_a_delta_histogram_that_steps_back_is_left_out_once(pool: BlockPoolAllocator) -> None:
    """No bucket is ever negative; the next cycle counts from there."""
    feed, delta = Feed(LiveSource()), MetricMaker(ROWS, DELTA)
    shapes = [(4, 2), (5, 2), (1, 2), (3, 2)]
    seen = []
    for shape in shapes:
        value = HistogramSnapshot((1.0,), shape, float(sum(shape)))
        metric = made(delta, reading(lock_wait=value), feed).get(P + "lock.wait")
        seen.append(None if metric is None else metric.data.data_points[0].bucket_counts)
    assert seen == [(4, 2), (1, 0), None, (2, 0)]


def test_kinds_and_units_are_the_catalogues(pool: BlockPoolAllocator) -> None:
    """As an SDK would have made them."""
    found = made(MetricMaker(ROWS, None), reading(), Feed(LiveSource()))
    by_name = {row.otel: row for row in CATALOGUE if row.otel}
    for name, metric in found.items():
        row = by_name[name]
        assert metric.unit == row.ucum and row.help in metric.description
        expected = {"gauge": "Gauge", "histogram": "Histogram"}.get(row.instrument or "", "Sum")
        assert type(metric.data).__name__ == expected
        if expected == "Sum":
            assert metric.data.is_monotonic is (row.instrument == "counter")


def test_a_broken_row_is_counted_and_costs_itself_only(pool: BlockPoolAllocator) -> None:
    """A counter and a histogram that cannot be read."""
    feed = Feed(LiveSource())
    found = made(MetricMaker(ROWS, None), reading(calls=None, lock_wait=None), feed)
    assert P + "operations" not in found and P + "lock.wait" not in found
    assert P + "allocations" in found and P + "block.idle" in found
    assert feed.errors["otel_row"] >= 2


def test_a_skipped_cycle_still_tells_of_itself() -> None:
    """Without a reading there are the exporter's own counters."""
    feed = Feed(LiveSource())
    feed.count("otel_skipped")
    found = made(MetricMaker(ROWS, None, lambda: {"span_events": 2}), None, feed)
    assert set(found) == {
        "veloxquant.exporter.collect_errors",
        "veloxquant.exporter.dropped_events",
    }
    (dropped,) = found["veloxquant.exporter.dropped_events"].data.data_points
    assert dropped.value == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of series that come and go, the latest ones."""
    monkeypatch.setattr(points_module, "MAX_REMEMBERED", 3)
    row, kept = CATALOGUE[0], Remembered[int]()
    for n in range(5):
        assert kept.swap(row, (str(n),), n) is None
    assert kept.swap(row, ("4",), 40) == 4
    assert kept.swap(row, ("0",), 0) is None  # had been forgotten
    assert len(kept._values) == 3


class Failing(MetricExporter):
    """Raises, then works."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[MetricsData] = []
        self.n_calls = 0

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """See above."""
        self.n_calls += 1
        if self.n_calls == 1:
            raise OSError("the first time")
        self.batches.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing waits."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Nothing to do."""


def test_an_exporter_that_raises_does_not_end_the_pipeline(
    pool: BlockPoolAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and counted, and the next round runs."""
    exporter = Failing()
    with OtlpPipeline(exporter=exporter, interval_s=3600) as pipeline:
        assert not pipeline.flush(20)
        assert pipeline.flush(20)
        assert pipeline.n_failed == 1
    assert "the first time" in caplog.text
    assert len(exporter.batches) == 2  # the second flush, and the close
