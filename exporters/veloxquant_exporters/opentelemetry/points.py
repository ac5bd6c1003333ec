"""Points: the values of a catalogue row in a reading, with their attributes."""

from __future__ import annotations

from collections.abc import Iterator

from veloxquant_exporters.opentelemetry.naming import Style, attributes_of
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.catalogue import Metric, Sample, Value
from veloxquant_mlx.telemetry.process import ProcessSnapshot

__all__ = ["Series", "points"]

# What tells a series of one row from the others: process, pool and label values.
Series = tuple[str, ...]


def points(
    row: Metric, reading: Reading, style: Style
) -> Iterator[tuple[Series, dict[str, str], Value]]:
    """Every series of `row`, its attributes and its value."""
    for process in reading.processes:
        for pool, (values, value) in _samples(row, process):
            labels = [("pool", pool), *zip(row.labels, values, strict=True)]
            attributes = attributes_of(row, labels, process.process, style)
            yield (process.process, pool, *values), attributes, value


def _samples(row: Metric, process: ProcessSnapshot) -> Iterator[tuple[str, Sample]]:
    if row.read_pool is not None:
        for pool in process.pools:
            for sample in row.read_pool(pool):
                yield pool.name, sample
    elif row.read_process is not None:
        for sample in row.read_process(process):
            yield "", sample
