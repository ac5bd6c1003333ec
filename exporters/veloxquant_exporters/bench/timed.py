"""Timed: CPU time of each workload over its sizes, beside a twin of known shape.

The clock is `time.thread_time`: a wall clock counts what other processes do, and more of it for long
calls than for short ones, which bends the line. Rounds go over all sizes in turn, target and twin in
alternating order, so that a slow spell of the machine meets all of them; the minimum is kept.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from veloxquant_exporters.bench.target import Factory
from veloxquant_exporters.bench.workloads import Round, UnsupportedError, Workload

__all__ = ["ROUNDS", "Samples", "sample"]

ROUNDS: Final = 5
# A quadratic of planted or real make is seen long before its largest size ends.
_ABORT_S: Final = 0.05
_ABORT_DOUBLING: Final = 3.0


@dataclass(frozen=True, slots=True)
class Samples:
    """CPU seconds a call, by size: the minimum and the median of the rounds.

    Attributes:
        sizes: Sizes that were run; fewer than asked for when `stopped_at` is set.
        target_s: Minimum for the target, in the order of `sizes`.
        median_s: Median for the target.
        twin_s: Minimum for the twin; empty without one.
        calls: Calls a round.
        rounds: Timed rounds, the warm-up not counted.
        stopped_at: The size at which growth was so steep that larger ones were left out.
        unsupported: Why nothing was run.
    """

    sizes: list[int] = field(default_factory=list)
    target_s: list[float] = field(default_factory=list)
    median_s: list[float] = field(default_factory=list)
    twin_s: list[float] = field(default_factory=list)
    calls: int = 1
    rounds: int = 0
    stopped_at: int | None = None
    unsupported: str | None = None


class _Lane:
    """One pool under one workload at one size, and its samples."""

    def __init__(self, workload: Workload, factory: Factory, size: int) -> None:
        self.round: Round = workload.start(factory, size)
        self.samples: list[float] = []

    def sample(self) -> float:
        """One timed round, in CPU seconds."""
        work = self.round
        work.ready()
        run, clock = work.run, time.thread_time
        began = clock()
        run()
        took = clock() - began
        work.check()
        self.samples.append(took)
        return took


def sample(
    workload: Workload,
    factory: Factory,
    twin: Factory | None,
    *,
    rounds: int = ROUNDS,
    sizes: Sequence[int] | None = None,
) -> Samples:
    """Time one workload; the garbage collector rests meanwhile."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _sample(workload, factory, twin, rounds, sizes or workload.sizes)
    except UnsupportedError as error:
        return Samples(unsupported=str(error))
    finally:
        if was_on:
            gc.enable()


def _sample(
    workload: Workload, factory: Factory, twin: Factory | None, rounds: int, sizes: Sequence[int]
) -> Samples:
    pairs: dict[int, list[_Lane]] = {}
    warm: list[float] = []
    stopped_at = None
    for size in sizes:
        pairs[size] = [_Lane(workload, factory, size)]
        warm.append(pairs[size][0].sample())
        if _too_steep(list(pairs), warm):
            stopped_at = size
            break
        twin = _beside(pairs[size], workload, twin, size)
    for number in range(rounds if stopped_at is None else min(rounds, 2)):
        for place, lanes in enumerate(pairs.values()):
            for lane in lanes if (number + place) % 2 == 0 else reversed(lanes):
                lane.sample()
    return _summed(workload, pairs, stopped_at)


def _beside(
    lanes: list[_Lane], workload: Workload, twin: Factory | None, size: int
) -> Factory | None:
    """Add the twin's lane, if it can do this workload."""
    if twin is None:
        return None
    try:
        lane = _Lane(workload, twin, size)
    except UnsupportedError:
        return None
    lane.sample()
    lanes.append(lane)
    return twin


def _too_steep(sizes: list[int], took: list[float]) -> bool:
    if len(took) < 3 or took[-1] < _ABORT_S:
        return False
    steps = zip(sizes[-3:], sizes[-2:], took[-3:], took[-2:], strict=False)
    return all(
        after / before > _ABORT_DOUBLING ** math.log2(m / n) for n, m, before, after in steps
    )


def _summed(workload: Workload, pairs: dict[int, list[_Lane]], stopped_at: int | None) -> Samples:
    # Without the warm-up round, which met cold caches and first-time work.
    best = {size: [min(lane.samples[1:]) for lane in lanes] for size, lanes in pairs.items()}
    middle = {size: median(lanes[0].samples[1:]) for size, lanes in pairs.items()}
    grain = time.get_clock_info("thread_time").resolution
    calls = workload.calls
    has_twin = all(len(values) == 2 for values in best.values())
    return Samples(
        sizes=list(pairs),
        target_s=[max(values[0], grain) / calls for values in best.values()],
        median_s=[max(value, grain) / calls for value in middle.values()],
        twin_s=[max(values[1], grain) / calls for values in best.values()] if has_twin else [],
        calls=calls,
        rounds=len(next(iter(pairs.values()))[0].samples) - 1,
        stopped_at=stopped_at,
    )
