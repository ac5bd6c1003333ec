"""CountedLock: a lock that notes how much work was done while it was held."""

from __future__ import annotations

from typing import Any

from veloxquant_exporters.bench.counting.meter import METER

__all__ = ["CountedLock"]


class CountedLock:
    """Stands for a `Lock` or `RLock` made by the rewritten code, around the real one."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._depth = 0
        self._began = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As that of the real lock."""
        had: bool = self._lock.acquire(blocking, timeout)
        if had:
            self._note_acquired()
        return had

    def release(self) -> None:
        """As that of the real lock."""
        self._lock.release()
        self._depth -= 1
        if self._depth == 0:
            held = METER.total() - self._began
            METER.longest_hold = max(METER.longest_hold, held)

    def locked(self) -> bool:
        """True while held."""
        return self._depth > 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _note_acquired(self) -> None:
        if self._depth == 0:
            self._began = METER.total()
            METER.n_holds += 1
        self._depth += 1
