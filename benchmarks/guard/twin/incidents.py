"""Incidents: counts of what went wrong in a pool. Off the hot path, so always counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["EXHAUSTION_REASONS", "GROW_OUTCOMES", "REJECTION_REASONS", "Incidents"]

REJECTION_REASONS: Final = ("repeated", "free", "foreign", "retired", "copied", "stale")
EXHAUSTION_REASONS: Final = ("full", "stranded", "limit")
GROW_OUTCOMES: Final = ("full", "denied")

_log = logging.getLogger("benchmarks.guard.twin")
_LOG_EVERY_S: Final = 60.0


class Incidents:
    """Counters that only rise, every key present from the start."""

    __slots__ = (
        "_logged",
        "_next_log_s",
        "collisions",
        "exhausted",
        "grow_attempts",
        "rejected",
        "shortfall",
    )

    def __init__(self, streams: Iterable[str]) -> None:
        names = list(streams)
        self.rejected: dict[str, int] = dict.fromkeys(REJECTION_REASONS, 0)
        self.exhausted = {(name, reason): 0 for name in names for reason in EXHAUSTION_REASONS}
        self.shortfall = dict.fromkeys(names, 0)
        self.grow_attempts: dict[str, int] = dict.fromkeys(GROW_OUTCOMES, 0)
        self.collisions = 0
        self._logged = 0
        self._next_log_s = 0.0

    def refuse(self, reasons: Sequence[str]) -> None:
        """Count refused blocks, a reason each."""
        for reason in reasons:
            self.rejected[reason] += 1

    def exhaust(self, stream: str, reason: str, n_short: int) -> None:
        """Count a failed allocation that lacked `n_short` blocks."""
        self.exhausted[stream, reason] += 1
        self.shortfall[stream] += n_short

    def report(self) -> None:
        """Log refusals not yet logged, at most once a minute; called without the pool's lock."""
        total = sum(self.rejected.values())
        if total == self._logged or time.monotonic() < self._next_log_s:
            return
        self._next_log_s = time.monotonic() + _LOG_EVERY_S
        new, self._logged = total - self._logged, total
        counts = ", ".join(f"{reason} {n}" for reason, n in self.rejected.items() if n)
        _log.warning("refused %d blocks that the pool does not hold out (so far: %s)", new, counts)
