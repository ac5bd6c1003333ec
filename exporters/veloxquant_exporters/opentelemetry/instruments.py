"""Instruments: one observable instrument for each OpenTelemetry name of the catalogue, on one meter.

Made once a meter and for good, as the API removes no instrument and an SDK drops a second one of
the same name without a word. What they show comes from a feed that can be put in and taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.naming import OBSERVABLES, Style, attributes_of
from veloxquant_exporters.opentelemetry.points import Series, points
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.catalogue import Metric
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["Instruments"]

_ERRORS: Final = "veloxquant.exporter.collect_errors"
_DROPPED: Final = "veloxquant.exporter.dropped_events"
# Series whose highest value is remembered.
MAX_FLOORS: Final = 20_000


class Instruments:
    """The observable instruments of one meter.

    Args:
        meter: Of the scope `SCOPE`.
    """

    def __init__(self, meter: Meter) -> None:
        self.feed: Feed | None = None
        self.style: Style = "semantic"
        self.dropped: Callable[[], dict[str, int]] = dict
        self._floors: dict[tuple[str, Series], float] = {}
        make = {
            "counter": meter.create_observable_counter,
            "updowncounter": meter.create_observable_up_down_counter,
            "gauge": meter.create_observable_gauge,
        }
        for name, rows in OBSERVABLES.items():
            instrument = rows[0].instrument
            assert instrument is not None
            make[instrument](
                name,
                callbacks=[self._callback(name, rows)],
                unit=rows[0].ucum,
                description=_description(rows),
            )

    def _callback(
        self, name: str, rows: tuple[Metric, ...]
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            feed = self.feed
            if feed is None or not feed.alive:
                return []
            reading = feed.reading(name, options.timeout_millis / 1e3)
            observed: list[Observation] = []
            for row in rows:
                try:
                    if reading is not None:
                        observed += self._observe(row, reading)
                    observed += self._own(row, reading, feed)
                except Exception:  # noqa: BLE001 - one metric's fault is no other's
                    feed.count("otel_row")
            return observed

        return observe

    def _observe(self, row: Metric, reading: Reading) -> list[Observation]:
        is_sum = row.instrument == "counter"
        observed = []
        for series, attributes, value in points(row, reading, self.style):
            assert not isinstance(value, HistogramSnapshot), f"{row.name} is no histogram"
            number = self._floored(row, series, value) if is_sum else value
            if math.isfinite(number):
                observed.append(Observation(number, attributes))
        return observed

    def _floored(self, row: Metric, series: Series, value: float) -> float:
        """`value`, or the highest so far: the sum over pools not told apart may step back."""
        key = (row.name, series)
        floor = self._floors.get(key)
        if floor is not None and floor >= value:
            return floor
        if floor is not None or len(self._floors) < MAX_FLOORS:
            self._floors[key] = value
        return value

    def _own(self, row: Metric, reading: Reading | None, feed: Feed) -> Iterable[Observation]:
        """What this exporter and its source count themselves."""
        counts: dict[str, int] = {}
        if row.otel == _ERRORS:
            counts = {**(reading.errors if reading else {}), **feed.errors}
        elif row.otel == _DROPPED:
            counts = self.dropped()
        return [
            Observation(n, attributes_of(row, [("reason", reason)], "", self.style))
            for reason, n in counts.items()
        ]


def _description(rows: tuple[Metric, ...]) -> str:
    return " / ".join(dict.fromkeys(row.help for row in rows))
