"""Ratios: paired runs of two versions, as a ratio with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

__all__ = ["Ratio", "geometric", "paired"]

# Student's t at 97.5 %, by degrees of freedom; beyond, that of the normal distribution is near.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Head's time over base's; above 1 is slower.

    Attributes:
        value: Geometric mean of the pairs.
        low: Lower end of the 95 % interval.
        high: Upper end.
        pairs: Number of pairs of processes.
    """

    value: float
    low: float
    high: float
    pairs: int

    def slower_than(self, threshold: float) -> bool:
        """True when even the lower end is above `threshold`."""
        return self.low > threshold


def paired(logs: Sequence[float]) -> Ratio:
    """The ratio from the logarithms of single pairs' ratios.

    Pairs are independent processes. Rounds within one process are not: they share its luck.

    Raises:
        ValueError: Fewer than two pairs.
    """
    if len(logs) < 2:
        raise ValueError(f"an interval needs 2 pairs or more, got {len(logs)}")
    middle = fmean(logs)
    t = _T[len(logs) - 2] if len(logs) - 2 < len(_T) else 2.0
    reach = t * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), len(logs))


def geometric(base: Mapping[int, float], head: Mapping[int, float]) -> float:
    """Logarithm of the mean ratio over the sizes that both have.

    Raises:
        ValueError: They share no size.
    """
    sizes = sorted(base.keys() & head.keys())
    if not sizes:
        raise ValueError(f"no size in common: {sorted(base)} and {sorted(head)}")
    return fmean(math.log(head[size] / base[size]) for size in sizes)
