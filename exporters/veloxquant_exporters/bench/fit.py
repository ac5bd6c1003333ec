"""Fit: exponents from sizes and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

__all__ = ["doubling", "growth", "slope"]


def slope(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Least-squares slope of log cost over log size: 0 is flat, 1 linear, 2 quadratic.

    Raises:
        ValueError: Fewer than two sizes, or a cost that is not above 0.
    """
    if len(sizes) < 2 or len(sizes) != len(costs):
        raise ValueError(
            f"need a cost for each of 2 sizes or more, got {len(sizes)} and {len(costs)}"
        )
    if min(costs) <= 0:
        raise ValueError(f"costs must be above 0 to have a logarithm, got {min(costs)}")
    xs = [math.log(size) for size in sizes]
    ys = [math.log(cost) for cost in costs]
    x_mean, y_mean = fmean(xs), fmean(ys)
    over = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - x_mean) ** 2 for x in xs)


def growth(sizes: Sequence[int], counts: Sequence[int]) -> float:
    """Exponent of exact counts: the worse of the slope over all sizes and that of the last step.

    The last step shows a small superlinear term better than the mean does, and counts have no noise
    that would make a single step a bad witness.
    """
    if len(set(counts)) == 1:
        return 0.0
    safe = [max(count, 1) for count in counts]
    return max(slope(sizes, safe), slope(sizes[-2:], safe[-2:]))


def doubling(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Median factor of cost per doubling of size: 1 is flat, 2 linear, 4 quadratic."""
    steps = zip(sizes, sizes[1:], costs, costs[1:], strict=False)
    factors = [math.pow(after / before, 1 / math.log2(m / n)) for n, m, before, after in steps]
    return median(factors)
