"""Quantiles of histograms, by the rule of Prometheus' `histogram_quantile`."""

from __future__ import annotations

from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

__all__ = ["difference", "quantile"]


def quantile(histogram: HistogramSnapshot, share: float) -> float | None:
    """The value that `share` of the observations do not exceed, in the histogram's unit.

    Interpolated within its bucket, as if observations lay evenly in it; one above all bounds
    counts as the highest bound.

    Args:
        histogram: With positive bounds.
        share: 0 to 1.

    Returns:
        None without an observation.
    """
    n = histogram.n_observed
    if n <= 0 or not histogram.bounds:
        return None
    rank, below = share * n, 0
    for place, count in enumerate(histogram.counts):
        if place == len(histogram.bounds):
            break
        if below + count >= rank and count:
            low = histogram.bounds[place - 1] if place else 0.0
            return low + (histogram.bounds[place] - low) * (rank - below) / count
        below += count
    return histogram.bounds[-1]


def difference(now: HistogramSnapshot, before: HistogramSnapshot) -> HistogramSnapshot:
    """What was observed after `before`; all of `now` if it began anew or has other buckets."""
    if now.bounds != before.bounds or len(now.counts) != len(before.counts):
        return now
    counts = tuple(a - b for a, b in zip(now.counts, before.counts, strict=True))
    if min(counts) < 0:
        return now
    return HistogramSnapshot(now.bounds, counts, now.total - before.total)
