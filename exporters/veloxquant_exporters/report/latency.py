"""Latency: what timed calls took, by operation and by the number of blocks that moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.telemetry.trace.schema import OPERATIONS

if TYPE_CHECKING:
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["Timed", "find_latency"]

QUANTILES: Final = (0.5, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Timed:
    """Calls of one operation that moved `low` to `high` blocks.

    Attributes:
        operation: As in `OPERATIONS`.
        low, high: Blocks; a power of two and the last number below the next.
        n: Calls that were timed.
        p50_s, p99_s, most_s: Seconds in the pool, without the wait for its lock.
    """

    operation: str
    low: int
    high: int
    n: int
    p50_s: float
    p99_s: float
    most_s: float


def find_latency(trace: Trace) -> list[Timed]:
    """By operation and power of two, the smaller first."""
    import numpy as np

    found = []
    samples = trace.samples
    power = np.floor(np.log2(np.maximum(samples.blocks, 1))).astype(np.int64)
    for index, name in enumerate(OPERATIONS):
        of_operation = samples.operation == index
        for exponent in np.unique(power[of_operation]).tolist():
            took = samples.took_ns[of_operation & (power == exponent)] / 1e9
            p50, p99, most = np.quantile(took, QUANTILES).tolist()
            low = 1 << exponent
            found.append(Timed(name, low, 2 * low - 1, len(took), p50, p99, most))
    return found
