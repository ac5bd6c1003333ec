"""Drain: feeds our histograms to somebody else's pipeline, where only single records can go.

An SDK takes 5 to 20 us for a record, so that at most `MAX_RECORDS` are fed a cycle. Beyond that
every n-th observation is fed: shares and quantiles stay, counts and rates do not. A pipeline of our
own exports the buckets themselves (see `BucketExporter`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from opentelemetry.metrics import Histogram, Meter

from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, Style
from veloxquant_exporters.opentelemetry.points import Remembered, points
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["MAX_RECORDS", "Drain"]

MAX_RECORDS: Final = 500
SAMPLED: Final = " Sampled on this route: at most 500 records a collection are fed."

# Observations of one bucket since the last time: the instrument, attributes, a value in it, count.
_News = tuple[Histogram, dict[str, str], float, int]


class Drain:
    """Records what histograms gained since the last reading. Used by one thread only.

    Args:
        meter: Where the histograms are made, once the first reading tells their buckets.
        style: Names of the attributes.
    """

    def __init__(self, meter: Meter, style: Style) -> None:
        self.style: Style = style
        self.n_dropped = 0
        self._meter = meter
        self._histograms: dict[str, Histogram] = {}
        self._seen: Remembered[HistogramSnapshot] = Remembered()

    def drain(self, reading: Reading) -> None:
        """Record what is new in `reading`."""
        news = list(self._news(reading))
        n = sum(item[3] for item in news)
        step = max(1.0, n / MAX_RECORDS)
        passed, n_fed = 0, 0
        for histogram, attributes, value, count in news:
            passed += count
            # The n-th, 2n-th, ... of all observations in a row, whichever bucket they fall into.
            due = min(MAX_RECORDS, int(passed / step + 1e-9))
            for _ in range(due - n_fed):
                histogram.record(value, attributes)
            n_fed = max(n_fed, due)
        self.n_dropped += n - n_fed

    def _news(self, reading: Reading) -> Iterator[_News]:
        for row in HISTOGRAMS:
            for series, attributes, value in points(row, reading, self.style):
                assert isinstance(value, HistogramSnapshot)
                before = self._seen.swap(row, series, value)
                if row.name not in self._histograms:
                    self._histograms[row.name] = self._meter.create_histogram(
                        row.otel or row.name,
                        unit=row.ucum,
                        description=row.help + SAMPLED,
                        explicit_bucket_boundaries_advisory=list(value.bounds),
                    )
                for within, count in _gains(value, before):
                    yield self._histograms[row.name], attributes, within, count


def _gains(now: HistogramSnapshot, before: HistogramSnapshot | None) -> Iterator[tuple[float, int]]:
    """A value inside each bucket that gained, and by how much; together they make up the sum."""
    known = before is not None and before.bounds == now.bounds
    counts = before.counts if before is not None and known else (0,) * len(now.counts)
    total = now.total - (before.total if before is not None and known else 0)
    gains = [max(0, new - old) for new, old in zip(now.counts, counts, strict=True)]
    edges = list(pairwise((0.0, *now.bounds, now.bounds[-1] * 2)))
    least = sum(low * n for (low, _), n in zip(edges, gains, strict=True))
    span = sum((high - low) * n for (low, high), n in zip(edges, gains, strict=True))
    # How far up its bucket each value stands: as far as the sum demands, and never outside.
    share = min(1.0, max(0.001, (total - least) / span)) if span else 1.0
    for (low, high), n in zip(edges, gains, strict=True):
        if n:
            yield min(high, low + share * (high - low)), n
