"""History: the readings of the last minutes, few enough to keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from veloxquant_exporters.sources import Reading
from veloxquant_exporters.top.board import Holder

__all__ = ["HISTORY_S", "History", "Moment"]

# The longest window of an alert that is judged here, and a little.
HISTORY_S: Final = 16 * 60.0
# All readings of the last seconds are kept; before that, one in as many seconds.
FINE_S: Final = 75.0
COARSE_S: Final = 5.0
# Pool snapshots kept in all: some 10 kB each.
MAX_SNAPSHOTS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Moment:
    """A reading and when it was made.

    Attributes:
        at_s: By a clock that never steps: the reader's monotonic one, or a trace's.
        wall_s: Seconds since the epoch.
        reading: The processes.
        holders: Top holders by process and pool, where the source tells.
    """

    at_s: float
    wall_s: float
    reading: Reading
    holders: dict[tuple[str, str], tuple[Holder, ...]] = field(default_factory=dict)


class History:
    """Readings, the newest last. One thread at a time.

    Args:
        keep_s: Older ones are let go.
    """

    def __init__(self, keep_s: float = HISTORY_S) -> None:
        self._keep_s = keep_s
        self._moments: list[Moment] = []
        self._began_s: float | None = None

    def add(self, moment: Moment) -> None:
        """Take in a newer reading; an older one than the newest begins the history anew."""
        if self._moments and moment.at_s < self._moments[-1].at_s:
            self.clear()
        if self._began_s is None:
            self._began_s = moment.at_s
        self._moments.append(moment)
        self._thin()

    def clear(self) -> None:
        """Forget everything."""
        self._moments.clear()
        self._began_s = None

    def __len__(self) -> int:
        return len(self._moments)

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._moments)

    @property
    def now(self) -> Moment:
        """The newest reading.

        Raises:
            IndexError: There is none.
        """
        return self._moments[-1]

    @property
    def watched_s(self) -> float:
        """Seconds between the first reading there ever was and the newest."""
        return 0.0 if self._began_s is None else self.now.at_s - self._began_s

    def since(self, seconds: float) -> list[Moment]:
        """The readings of the last `seconds`, oldest first; the newest is among them."""
        start = self.now.at_s - seconds
        return [moment for moment in self._moments if moment.at_s >= start]

    def _thin(self) -> None:
        now_s = self.now.at_s
        kept: list[Moment] = []
        for moment in self._moments:
            age_s = now_s - moment.at_s
            if age_s > self._keep_s:
                continue
            if age_s > FINE_S and kept and moment.at_s - kept[-1].at_s < COARSE_S:
                continue
            kept.append(moment)
        while len(kept) > 2 and _size(kept) > MAX_SNAPSHOTS:
            kept = kept[:-1:2] + kept[-1:]
        self._moments = kept


def _size(moments: list[Moment]) -> int:
    return sum(len(p.pools) for moment in moments for p in moment.reading.processes)
