"""Series: the samples of one process, or of one of its pools, on a metrics page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.samples import Sample  # noqa: TC002 - loaded with the parsers anyway

from veloxquant_exporters.top.source import SourceError
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["NO_HISTOGRAM", "Series"]

NO_HISTOGRAM: Final = HistogramSnapshot((), (0,), 0.0)


@dataclass(slots=True)
class Series:
    """The samples of one process, or of one of its pools, by name."""

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Take in a sample."""
        self.samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def number(self, name: str) -> float | None:
        """The value of the series of that name, None without one."""
        found = self.samples.get(name)
        if not found:
            return None
        if math.isnan(found[0][1]):
            raise SourceError(f"says NaN for {name}")
        return found[0][1]

    def whole(self, name: str) -> int | None:
        """As `number`, as a whole number."""
        value = self.number(name)
        if value is not None and not math.isfinite(value):
            raise SourceError(f"says {value} for {name}")
        return None if value is None else round(value)

    def by(self, name: str, label: str) -> dict[str, int]:
        """Whole numbers by the value of a label."""
        found: dict[str, int] = {}
        for labels, value in self.samples.get(name, ()):
            if not math.isfinite(value):
                raise SourceError(f"says {value} for {name}")
            found[labels.get(label, "")] = round(value)
        return found

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the series of that name; none without one."""
        found = self.samples.get(name)
        return found[0][0] if found else {}

    def histogram(self, name: str, **wanted: str) -> HistogramSnapshot:
        """The histogram of that name; an empty one without it."""

        def fits(labels: Mapping[str, str]) -> bool:
            return all(labels.get(label) == value for label, value in wanted.items())

        rows = self.samples.get(f"{name}_bucket", ())
        buckets = sorted((float(ls["le"]), n) for ls, n in rows if fits(ls) and "le" in ls)
        if not buckets or not all(map(math.isfinite, (n for _, n in buckets))):
            return NO_HISTOGRAM
        counts, below = [], 0
        for _, n in buckets:
            counts.append(round(n) - below)
            below = round(n)
        bounds = tuple(bound for bound, _ in buckets if math.isfinite(bound))
        if len(bounds) == len(buckets):
            counts.append(0)  # without +Inf, as no page of ours is
        total = next((v for ls, v in self.samples.get(f"{name}_sum", ()) if fits(ls)), 0.0)
        return HistogramSnapshot(bounds, tuple(counts), total)
