"""BucketExporter: an exporter that adds our histograms, bucket by bucket, to what it passes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    ScopeMetrics,
)

from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, SCOPE, Style
from veloxquant_exporters.opentelemetry.points import Series, points
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.catalogue import Metric as Row
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["BucketExporter"]


class BucketExporter(MetricExporter):
    """Passes metrics on to `inner`, with our histograms added to those of our scope.

    Give it to the reader in place of `inner`, and to `instrument_meter(..., buckets=...)`. Nothing
    is sampled and no record is made: the points are the buckets that the hooks filled.

    Args:
        inner: The exporter that sends; it also says which temporality it prefers.
    """

    def __init__(self, inner: MetricExporter) -> None:
        super().__init__(
            preferred_temporality=inner._preferred_temporality,  # noqa: SLF001 - as SDK readers do
            preferred_aggregation=inner._preferred_aggregation,  # noqa: SLF001
        )
        self._inner = inner
        self._feed: Feed | None = None
        self._style: Style = "semantic"
        self._start_ns = self._last_ns = time.time_ns()
        self._sent: dict[tuple[str, Series], HistogramSnapshot] = {}
        preferred = (inner._preferred_temporality or {}).get(HistogramInstrument)  # noqa: SLF001
        self._is_delta = preferred is AggregationTemporality.DELTA

    def bind(self, feed: Feed | None, style: Style = "semantic") -> None:
        """Take histograms from the cycles of `feed` from now on; None ends that."""
        self._feed, self._style = feed, style

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """See `MetricExporter.export`. A fault in a histogram costs the histogram only."""
        feed = self._feed
        reading = feed.current if feed is not None and feed.alive else None
        if feed is not None and reading is not None:
            metrics_data = self._with_buckets(metrics_data, reading, feed)
        return self._inner.export(metrics_data, timeout_millis=timeout_millis, **kwargs)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """See `MetricExporter.force_flush`."""
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """See `MetricExporter.shutdown`."""
        self._inner.shutdown(timeout_millis, **kwargs)

    # -- inside ---------------------------------------------------------------------------------

    def _with_buckets(self, data: MetricsData, reading: Reading, feed: Feed) -> MetricsData:
        now_ns = time.time_ns()
        histograms = []
        for row in HISTOGRAMS:
            try:
                if made := list(self._points(row, reading, now_ns)):
                    histograms.append(self._metric(row, made))
            except Exception:  # noqa: BLE001 - one metric's fault is no other's
                feed.count("otel_row")
        self._last_ns = now_ns
        return replace(
            data,
            resource_metrics=[
                replace(
                    resource, scope_metrics=[_added(s, histograms) for s in resource.scope_metrics]
                )
                for resource in data.resource_metrics
            ],
        )

    def _metric(self, row: Row, made: list[HistogramDataPoint]) -> Metric:
        temporality = (
            AggregationTemporality.DELTA if self._is_delta else AggregationTemporality.CUMULATIVE
        )
        return Metric(row.otel or row.name, row.help, row.ucum, Histogram(made, temporality))

    def _points(self, row: Row, reading: Reading, now_ns: int) -> Iterator[HistogramDataPoint]:
        for series, attributes, value in points(row, reading, self._style):
            assert isinstance(value, HistogramSnapshot)
            counts, total = value.counts, value.total
            if self._is_delta:
                sent = self._sent.get((row.name, series))
                self._sent[row.name, series] = value
                if sent is not None and sent.bounds == value.bounds:
                    gains = [new - old for new, old in zip(counts, sent.counts, strict=True)]
                    if min(gains) < 0:
                        continue  # another pool under the name; the next one counts from here
                    counts, total = tuple(gains), max(0.0, total - sent.total)
            yield HistogramDataPoint(
                attributes=attributes,
                start_time_unix_nano=self._last_ns if self._is_delta else self._start_ns,
                time_unix_nano=now_ns,
                count=sum(counts),
                sum=total,
                bucket_counts=counts,
                explicit_bounds=value.bounds,
                min=None,  # type: ignore[arg-type] # not kept; the encoder leaves it out
                max=None,  # type: ignore[arg-type]
            )


def _added(scope: ScopeMetrics, histograms: list[Metric]) -> ScopeMetrics:
    if scope.scope.name != SCOPE:
        return scope
    return replace(scope, metrics=[*scope.metrics, *histograms])
