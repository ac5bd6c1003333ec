"""Histogram: fixed buckets of plain ints, cheap enough to be filled under the pool's lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

__all__ = [
    "BLOCK_BUCKETS",
    "DURATION_BUCKETS_NS",
    "LIFETIME_BUCKETS_NS",
    "RATIO_BUCKETS",
    "Histogram",
    "HistogramSnapshot",
]

_US: Final = 1_000
_S: Final = 1_000_000_000


def _decades(first: int, n_decades: int) -> tuple[int, ...]:
    return tuple(
        first * 10**decade * step // 10 for decade in range(n_decades) for step in (10, 25, 50)
    )


# 1 us to 100 ms: a pool call that takes longer is broken whatever the figure.
DURATION_BUCKETS_NS: Final = (*_decades(_US, 5), 100_000 * _US)
# 1 ms to 5,000 s: from one decode step to a conversation.
LIFETIME_BUCKETS_NS: Final = _decades(_S // 1000, 7)
BLOCK_BUCKETS: Final = tuple(2**power for power in range(11))
RATIO_BUCKETS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
        bounds: Upper bounds, inclusive, ascending, in the exported unit.
        counts: Observations a bucket, not cumulated; one more than `bounds`, the last one above
            them all.
        total: Sum of the observed values, in the exported unit.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def n_observed(self) -> int:
        """Observations in all."""
        return sum(self.counts)

    def plus(self, other: HistogramSnapshot) -> HistogramSnapshot:
        """Both together; the bounds must be the same."""
        if self.bounds != other.bounds:
            raise ValueError(f"bounds differ: {self.bounds} and {other.bounds}")
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.total + other.total)


class Histogram:
    """Counts by bucket. Not thread-safe: fill and copy it under one lock.

    Args:
        bounds: Upper bounds, inclusive, ascending, in the unit of what is observed.
        unit: Observed units in one exported unit, e.g. 1e9 for ns that are exported as seconds.
    """

    __slots__ = ("_frozen", "bounds", "counts", "exported", "total", "unit")

    def __init__(self, bounds: Sequence[float], unit: float = 1) -> None:
        self.bounds = tuple(bounds)
        self.unit = unit
        self.exported = _exported(self.bounds, unit)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total: float = 0
        self._frozen: HistogramSnapshot | None = None

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value` as `weight` observations."""
        self._frozen = None
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def snapshot(self) -> HistogramSnapshot:
        """The histogram now; the same object until the next observation."""
        frozen = self._frozen
        if frozen is None:
            frozen = HistogramSnapshot(self.exported, tuple(self.counts), self.total / self.unit)
            self._frozen = frozen
        return frozen


@cache
def _exported(bounds: tuple[float, ...], unit: float) -> tuple[float, ...]:
    """One tuple for all histograms of the same buckets."""
    return tuple(bound / unit if unit != 1 else bound for bound in bounds)
