"""Metric: one row of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from veloxquant_mlx.telemetry.histogram import HistogramSnapshot
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["Instrument", "Kind", "Metric", "ReadProcess", "Sample", "Value", "of_process"]

Kind = Literal["gauge", "counter", "histogram"]
Instrument = Literal["counter", "updowncounter", "gauge", "histogram"]
Value = float | HistogramSnapshot
# Label values, without the labels of the scope, and the value.
Sample = tuple[tuple[str, ...], Value]

ReadProcess = Callable[[ProcessSnapshot], Iterable[Sample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row.

    Attributes:
        name: Prometheus name; a counter's ends in `_total`.
        kind: Prometheus type.
        help: What it is, and what it is not.
        labels: Labels beside those of the scope ("pool" for a pool metric; "process" comes from
            the source and is not named here).
        otel: OpenTelemetry name, or None where OpenTelemetry has it otherwise.
        instrument: OpenTelemetry instrument; all but histograms are observable.
        ucum: UCUM unit of the OpenTelemetry instrument.
        attributes: OpenTelemetry attributes that are the same for every point.
        attribute_names: OpenTelemetry attributes that labels become, where they have names of their
            own there.
        read_pool, read_process: How it is read off a snapshot: exactly one is set, or none for
            what the exporter or the benchmarks know themselves.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    otel: str | None = None
    instrument: Instrument | None = None
    ucum: str = "1"
    attributes: Mapping[str, str] = field(default_factory=dict)
    attribute_names: Mapping[str, str] = field(default_factory=dict)
    read_pool: Callable[[PoolSnapshot], Iterable[Sample]] | None = None
    read_process: Callable[[ProcessSnapshot], Iterable[Sample]] | None = None

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The scope's labels and the metric's own."""
        return ("pool", *self.labels) if self.read_pool is not None else self.labels


def of_process(
    read: Callable[[ProcessSnapshot], float | None],
) -> ReadProcess:
    """A reader of one number without labels; where it is None, there is no series."""

    def samples(process: ProcessSnapshot) -> Iterable[Sample]:
        value = read(process)
        return [] if value is None else [((), value)]

    return samples
