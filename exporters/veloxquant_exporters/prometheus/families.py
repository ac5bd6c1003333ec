"""Families: the metrics of one page, filled row by row from the catalogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.samples import Exemplar  # noqa: TC002 - loaded with the families anyway
from prometheus_client.utils import floatToGoString

from veloxquant_exporters.prometheus.labels import label_value
from veloxquant_mlx.telemetry import CATALOGUE, Metric
from veloxquant_mlx.telemetry.catalogue import SIDECAR_ROWS, Sample
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["PAGE_ROWS", "Families", "Family", "FaultError"]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

# The benchmarks' rows are written by the benchmarks, into pages of their own; the sidecar adds its own.
PAGE_ROWS: Final = tuple(
    row
    for row in CATALOGUE
    if not row.name.startswith("veloxquant_bench_") and row not in SIDECAR_ROWS
)


class FaultError(ValueError):
    """A value that must not stand on a page."""


class Families:
    """One family for each row of the catalogue, empty at first. For one page and one thread.

    Args:
        labels_processes: Whether every series carries the label `process`.
    """

    def __init__(self, *, labels_processes: bool) -> None:
        scope = ("process",) if labels_processes else ()
        self._labels_processes = labels_processes
        self._families = {row.name: _family(row, (*scope, *row.all_labels)) for row in PAGE_ROWS}

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def add(
        self,
        row: Metric,
        process: str,
        scope: tuple[str, ...],
        samples: Iterable[Sample],
        exemplar: Exemplar | None = None,
    ) -> None:
        """Add what was read for a row, all of it or, when it raises, nothing.

        Args:
            row: A row of the catalogue.
            process: Value of the label `process`, left out where processes are not labelled.
            scope: Label values of the scope: the pool, or nothing.
            samples: Label values of the row's own labels, and the value.
            exemplar: For each of the samples; counters only.

        Raises:
            FaultError: A value is NaN, or one that a counter cannot have.
        """
        first = (process, *scope) if self._labels_processes else scope
        checked = [
            (tuple(map(label_value, (*first, *labels))), _checked(row, value))
            for labels, value in samples
        ]
        family = self._families[row.name]
        for values, value in checked:
            _put(family, values, value, exemplar)


def _family(row: Metric, labels: Sequence[str]) -> Family:
    kinds: dict[str, Callable[..., Family]] = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[row.kind](row.name, row.help, labels=labels)


def _checked(row: Metric, value: object) -> float | HistogramSnapshot:
    if row.kind == "histogram":
        if not isinstance(value, HistogramSnapshot):
            raise FaultError(f"{row.name} is a histogram, got {value!r}")
        if not math.isfinite(value.total) or min(value.counts) < 0:
            raise FaultError(f"{row.name} has a sum of {value.total} and counts {value.counts}")
        return value
    if not isinstance(value, int | float) or math.isnan(value):
        raise FaultError(f"{row.name} must be a number, got {value!r}")
    if row.kind == "counter" and not 0 <= value < math.inf:
        raise FaultError(f"{row.name} is a counter: finite and not below 0, got {value!r}")
    return value


def _put(
    family: Family,
    values: tuple[str, ...],
    value: float | HistogramSnapshot,
    exemplar: Exemplar | None,
) -> None:
    if isinstance(value, HistogramSnapshot):
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(values, _buckets(value), sum_value=value.total)
    elif isinstance(family, CounterMetricFamily):
        family.add_metric(values, value, exemplar=exemplar)
    else:
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(values, value)


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Cumulated, as both formats want them; the last one holds all."""
    buckets: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip(_bound_texts(histogram.bounds), histogram.counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return buckets


@lru_cache(maxsize=32)
def _bound_texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*(floatToGoString(bound) for bound in bounds), "+Inf")  # type: ignore[no-untyped-call]
