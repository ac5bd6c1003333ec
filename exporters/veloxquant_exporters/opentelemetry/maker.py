"""MetricMaker: finished OpenTelemetry metrics, made of a reading without an SDK's aggregations.

An SDK remembers every series for ever, and past 2,000 of an instrument it sums the rest into one:
in a sidecar, whose processes come and go, both would be reached. And it takes no finished histogram.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)

from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.naming import Style
from veloxquant_exporters.opentelemetry.points import Point, Remembered, own_points, points
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.catalogue import Metric as Row
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["MetricMaker"]

_CLASSES: Final = {
    "counter": sdk.ObservableCounter,
    "updowncounter": sdk.ObservableUpDownCounter,
    "histogram": sdk.Histogram,
}
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
_DELTA: Final = AggregationTemporality.DELTA


class MetricMaker:
    """Makes metrics, cycle by cycle. Used by one thread at a time.

    Args:
        rows: By OpenTelemetry name; rows of one name share an instrument.
        preferred: Temporality by instrument class, as an exporter prefers it.
        dropped: Events that were left out so far, by reason.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]],
        preferred: Mapping[type, AggregationTemporality] | None,
        dropped: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._rows = rows
        self._dropped = dropped
        self._temporality = {
            name: (preferred or {}).get(kind, _CUMULATIVE) for name, kind in _CLASSES.items()
        }
        self._start_ns = self._last_ns = time.time_ns()
        self._numbers: Remembered[float] = Remembered()
        self._histograms: Remembered[HistogramSnapshot] = Remembered()
        self._restarts: Remembered[int] = Remembered()  # when a worker's counter began anew, in ns

    def make(self, reading: Reading | None, feed: Feed, style: Style) -> list[Metric]:
        """The metrics of `reading`; of a skipped cycle, what the exporter counts itself.

        A fault in a row costs the row only, and is counted by `feed`.
        """
        now_ns = time.time_ns()
        made = []
        for name, rows in self._rows.items():
            found: list[Any] = []
            for row in rows:
                try:
                    found += self._points_of(row, reading, feed, style, now_ns)
                except Exception:  # noqa: BLE001 - one metric's fault is no other's
                    feed.count("otel_row")
            if found:
                made.append(self._metric(name, rows, found))
        self._last_ns = now_ns
        return made

    # -- inside ---------------------------------------------------------------------------------

    def _points_of(
        self, row: Row, reading: Reading | None, feed: Feed, style: Style, now_ns: int
    ) -> list[Any]:
        found: list[Any] = []
        if reading is not None:
            found += self._made(row, points(row, reading, style), now_ns)
        own = own_points(row, reading, feed, self._dropped, style)
        return found + list(self._made(row, own, now_ns))

    def _made(self, row: Row, found: Iterator[Point], now_ns: int) -> Iterator[Any]:
        kind = row.instrument or "gauge"
        delta = self._temporality.get(kind) is _DELTA
        start_ns = self._last_ns if delta else self._start_ns
        for series, attributes, value in found:
            if isinstance(value, HistogramSnapshot):
                before = self._histograms.swap(row, series, value) if delta else None
                gained = value if before is None else _gained(value, before)
                if gained is None and series[0]:
                    gained = value  # another process under the label: all of it is new
                if gained is not None:
                    yield _histogram_point(attributes, gained, start_ns, now_ns)
            elif math.isfinite(value):
                number, start = value, None if kind == "gauge" else start_ns
                if kind == "counter":
                    number, start = self._count(row, series, value, start_ns, delta)
                yield NumberDataPoint(attributes, start, now_ns, number)  # type: ignore[arg-type]

    def _count(
        self, row: Row, series: tuple[str, ...], value: float, start_ns: int, delta: bool
    ) -> tuple[float, int]:
        """A counter's value, or what it gained, and since when."""
        before = self._numbers.swap(row, series, value)
        if before is not None and before > value:
            if series[0]:
                # Another process came under the label of one that ended: it counts from zero.
                self._restarts.swap(row, series, self._last_ns)
                before = None
            else:
                # The sum over pools that are not told apart may step back: it stands still.
                self._numbers.swap(row, series, before)
                value = before
        if delta:
            return value - (before or 0), start_ns
        return value, self._restarts.get(row, series) or start_ns

    def _metric(self, name: str, rows: Sequence[Row], found: list[Any]) -> Metric:
        kind = rows[0].instrument
        description = " / ".join(dict.fromkeys(row.help for row in rows))
        data: Any
        if kind == "gauge":
            data = Gauge(found)
        elif kind == "histogram":
            data = Histogram(found, self._temporality["histogram"])
        else:
            data = Sum(found, self._temporality[str(kind)], is_monotonic=kind == "counter")
        return Metric(name, description, rows[0].ucum, data)


def _gained(now: HistogramSnapshot, before: HistogramSnapshot) -> HistogramSnapshot | None:
    """What came since `before`; None if counts stepped back, and the next cycle starts from here."""
    if now.bounds != before.bounds:
        return None
    gains = tuple(new - old for new, old in zip(now.counts, before.counts, strict=True))
    if min(gains) < 0:
        return None
    return HistogramSnapshot(now.bounds, gains, max(0.0, now.total - before.total))


def _histogram_point(
    attributes: dict[str, str], value: HistogramSnapshot, start_ns: int, now_ns: int
) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=sum(value.counts),
        sum=value.total,
        bucket_counts=value.counts,
        explicit_bounds=value.bounds,
        min=None,  # type: ignore[arg-type] # not kept; the encoder leaves it out
        max=None,  # type: ignore[arg-type]
    )
