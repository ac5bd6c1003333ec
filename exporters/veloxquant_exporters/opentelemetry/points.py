"""Points: the values of a catalogue row in a reading, with their attributes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Generic, TypeVar

from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.naming import Style, attributes_of
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.catalogue import Metric, Sample, Value
from veloxquant_mlx.telemetry.process import ProcessSnapshot

__all__ = ["Point", "Remembered", "Series", "own_points", "points"]

# What tells a series of one row from the others: process, pool and label values.
Series = tuple[str, ...]
Point = tuple[Series, dict[str, str], Value]

_ERRORS: Final = "veloxquant.exporter.collect_errors"
_DROPPED: Final = "veloxquant.exporter.dropped_events"
MAX_REMEMBERED: Final = 20_000

T = TypeVar("T")


def points(row: Metric, reading: Reading, style: Style) -> Iterator[Point]:
    """Every series of `row`, its attributes and its value."""
    for process in reading.processes:
        for pool, (values, value) in _samples(row, process):
            labels = [("pool", pool), *zip(row.labels, values, strict=True)]
            attributes = attributes_of(row, labels, process.process, style)
            yield (process.process, pool, *values), attributes, value


def own_points(
    row: Metric,
    reading: Reading | None,
    feed: Feed,
    dropped: Callable[[], Mapping[str, int]],
    style: Style,
) -> Iterator[Point]:
    """What the exporter and its source count themselves, if `row` is about that."""
    counts: Mapping[str, int] = {}
    if row.otel == _ERRORS:
        counts = {**(reading.errors if reading else {}), **feed.errors}
    elif row.otel == _DROPPED:
        counts = dropped()
    for reason, n in counts.items():
        yield ("", "", reason), attributes_of(row, [("reason", reason)], "", style), n


def _samples(row: Metric, process: ProcessSnapshot) -> Iterator[tuple[str, Sample]]:
    if row.read_pool is not None:
        for pool in process.pools:
            for sample in row.read_pool(pool):
                yield pool.name, sample
    elif row.read_process is not None:
        for sample in row.read_process(process):
            yield "", sample


class Remembered(Generic[T]):
    """A value for each series, of the last 20,000 that were told; not thread-safe."""

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[str, Series], T] = OrderedDict()

    def swap(self, row: Metric, series: Series, value: T) -> T | None:
        """Remember `value`; returns what was remembered, or None."""
        key = (row.name, series)
        before = self._values.get(key)
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > MAX_REMEMBERED:
            self._values.popitem(last=False)
        return before

    def get(self, row: Metric, series: Series) -> T | None:
        """What was remembered, or None."""
        return self._values.get((row.name, series))
