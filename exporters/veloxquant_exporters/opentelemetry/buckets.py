"""BucketExporter: an exporter that adds our histograms, bucket by bucket, to what it passes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opentelemetry.sdk.metrics.export import (
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    ScopeMetrics,
)

from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.maker import MetricMaker
from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, SCOPE, Style

__all__ = ["BucketExporter"]


class BucketExporter(MetricExporter):
    """Passes metrics on to `inner`, with our histograms added to those of our scope.

    Give it to the reader in place of `inner`, and to `instrument_meter(..., buckets=...)`. Nothing
    is sampled and no record is made: the points are the buckets that the hooks filled.

    Args:
        inner: The exporter that sends; it also says which temporality it prefers.
    """

    def __init__(self, inner: MetricExporter) -> None:
        preferred = inner._preferred_temporality  # noqa: SLF001 - as SDK readers do
        super().__init__(
            preferred_temporality=preferred,
            preferred_aggregation=inner._preferred_aggregation,  # noqa: SLF001
        )
        self._inner = inner
        self._feed: Feed | None = None
        self._style: Style = "semantic"
        self._maker = MetricMaker({row.otel or row.name: [row] for row in HISTOGRAMS}, preferred)

    def bind(self, feed: Feed | None, style: Style = "semantic") -> None:
        """Take histograms from the cycles of `feed` from now on; None ends that."""
        self._feed, self._style = feed, style

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """See `MetricExporter.export`. A fault in a histogram costs the histogram only."""
        feed = self._feed
        if feed is not None and feed.alive and feed.current is not None:
            made = self._maker.make(feed.current, feed, self._style)
            metrics_data = _with(metrics_data, made)
        return self._inner.export(metrics_data, timeout_millis=timeout_millis, **kwargs)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """See `MetricExporter.force_flush`."""
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """See `MetricExporter.shutdown`."""
        self._inner.shutdown(timeout_millis, **kwargs)


def _with(data: MetricsData, made: list[Metric]) -> MetricsData:
    """`data` with `made` in our scope, which is there as the exporter's own counters always are."""
    return replace(
        data,
        resource_metrics=[
            replace(resource, scope_metrics=[_added(s, made) for s in resource.scope_metrics])
            for resource in data.resource_metrics
        ],
    )


def _added(scope: ScopeMetrics, made: list[Metric]) -> ScopeMetrics:
    return scope if scope.scope.name != SCOPE else replace(scope, metrics=[*scope.metrics, *made])
