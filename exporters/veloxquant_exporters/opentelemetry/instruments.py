"""Instruments: one observable instrument for each OpenTelemetry name of the catalogue, on one meter.

Made once a meter and for good, as the API removes no instrument and an SDK drops a second one of
the same name without a word. What they show comes from a feed that can be put in and taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from veloxquant_exporters.opentelemetry.feed import Feed
from veloxquant_exporters.opentelemetry.naming import OBSERVABLES, Style
from veloxquant_exporters.opentelemetry.points import Remembered, Series, own_points, points
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.catalogue import Metric
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["Instruments"]


class Instruments:
    """The observable instruments of one meter.

    Args:
        meter: Of the scope `SCOPE`.
    """

    def __init__(self, meter: Meter) -> None:
        self.feed: Feed | None = None
        self.style: Style = "semantic"
        self.dropped: Callable[[], dict[str, int]] = dict
        self._floors: Remembered[float] = Remembered()
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
                    observed += self._observe(row, reading, feed)
                except Exception:  # noqa: BLE001 - one metric's fault is no other's
                    feed.count("otel_row")
            return observed

        return observe

    def _observe(self, row: Metric, reading: Reading | None, feed: Feed) -> list[Observation]:
        found = [] if reading is None else list(points(row, reading, self.style))
        found += own_points(row, reading, feed, self.dropped, self.style)
        is_sum = row.instrument == "counter"
        observed = []
        for series, attributes, value in found:
            assert not isinstance(value, HistogramSnapshot), f"{row.name} is no histogram"
            number = self._floored(row, series, value) if is_sum else value
            if math.isfinite(number):
                observed.append(Observation(number, attributes))
        return observed

    def _floored(self, row: Metric, series: Series, value: float) -> float:
        """`value`, or the highest so far: the sum over pools not told apart may step back."""
        before = self._floors.swap(row, series, value)
        if before is None or before <= value:
            return value
        self._floors.swap(row, series, before)
        return before


def _description(rows: tuple[Metric, ...]) -> str:
    return " / ".join(dict.fromkeys(row.help for row in rows))
