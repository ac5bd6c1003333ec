"""Track: how a process or a pool stood at each reading; what a rate or an increase is made from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from veloxquant_exporters.top.history import History
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["Point", "Track", "Tracks", "rise", "tracks"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point(Generic[T]):
    """A snapshot as it was read.

    Attributes:
        at_s: When it was read first, by the reader's clock.
        taken_s: When it was taken, by its process' clock, in seconds since the epoch.
        snapshot: Of the process or the pool.
    """

    at_s: float
    taken_s: float
    snapshot: T


@dataclass(frozen=True, slots=True)
class Track(Generic[T]):
    """Snapshots of one thing, each once, the newest last; at least one."""

    points: tuple[Point[T], ...]

    @property
    def now(self) -> T:
        """The newest snapshot."""
        return self.points[-1].snapshot

    @property
    def seconds(self) -> float:
        """Between the first and the last, by the process' clock if that did not step."""
        first, last = self.points[0], self.points[-1]
        taken_s, read_s = last.taken_s - first.taken_s, last.at_s - first.at_s
        # Snapshots are taken apart from being read, but never much further apart.
        return taken_s if 0 < taken_s <= 2 * read_s + 60 else read_s

    def window(self, now_s: float, seconds: float) -> Track[T]:
        """The last `seconds` before `now_s`; the newest snapshot at least."""
        start = bisect_left(self.points, now_s - seconds, key=lambda point: point.at_s)
        return Track(self.points[min(start, len(self.points) - 1) :])

    def recent(self, now_s: float, seconds: float) -> Track[T]:
        """As `window`, or where that holds one snapshot only, the newest two there are."""
        found = self.window(now_s, seconds)
        return found if len(found.points) > 1 else Track(self.points[-2:])

    def rise(self, read: Callable[[T], float]) -> float:
        """How much a counter rose from the first snapshot to the last."""
        return rise([read(point.snapshot) for point in self.points])


@dataclass(frozen=True, slots=True)
class Tracks:
    """The tracks of what is there now, by process, and by process and pool."""

    processes: dict[str, Track[ProcessSnapshot]]
    pools: dict[tuple[str, str], Track[PoolSnapshot]]


def rise(values: list[float]) -> float:
    """The sum of all steps up; after a step down the counter began anew, at 0."""
    return sum(b - a if b >= a else b for a, b in pairwise(values))


def tracks(history: History) -> Tracks:
    """The tracks of all processes and pools of the newest reading."""
    processes: dict[str, list[Point[ProcessSnapshot]]] = {}
    pools: dict[tuple[str, str], list[Point[PoolSnapshot]]] = {}
    for process in history.now.reading.processes:
        processes[process.process] = []
        pools.update({(process.process, pool.name): [] for pool in process.pools})
    for moment in history:
        for process in moment.reading.processes:
            line = processes.get(process.process)
            if line is None or (line and line[-1].taken_s == process.wall_s):
                continue  # gone since, or the same snapshot read again
            line.append(Point(moment.at_s, process.wall_s, process))
            for pool in process.pools:
                points = pools.get((process.process, pool.name))
                if points is not None:
                    points.append(Point(moment.at_s, process.wall_s, pool))
    return Tracks(
        {name: Track(tuple(line)) for name, line in processes.items()},
        {key: Track(tuple(line)) for key, line in pools.items() if line},
    )
