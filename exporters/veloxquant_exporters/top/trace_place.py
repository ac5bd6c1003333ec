"""TracePlace: the moment of a trace that is shown; moved by keys, or by itself as it plays."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from veloxquant_mlx.telemetry.trace import Event

__all__ = ["TracePlace"]

SLOWEST: Final = 1 / 16
FASTEST: Final = 1024.0


class TracePlace:
    """A place between the ends of a trace; at the end, to begin with. Thread-safe.

    Args:
        begin_ns, end_ns: The ends, in nanoseconds since the trace began.
        events: What is worth going to, in the order of time.
        curve: Gives the share of the blocks in use over the whole trace, in so many parts.
        clock: Monotonic seconds, for playing.
    """

    def __init__(
        self,
        begin_ns: int,
        end_ns: int,
        events: Sequence[Event],
        curve: Callable[[int], list[float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.begin_ns, self.end_ns = begin_ns, end_ns
        self.events = events
        self._times = [event.at_ns for event in events]
        self.curve = curve
        self._clock = clock
        self._lock = threading.Lock()
        self._at_ns = end_ns
        self._speed = 1.0
        self._played_s: float | None = None  # when the place was brought up to date, as it plays

    @property
    def at_ns(self) -> int:
        """The place; it moves while the trace plays."""
        with self._lock:
            return self._settle()

    @property
    def playing(self) -> bool:
        """Whether the place moves by itself; no longer so at the end."""
        with self._lock:
            self._settle()
            return self._played_s is not None

    @property
    def speed(self) -> float:
        """Seconds of the trace a second, while it plays."""
        return self._speed

    def seek(self, at_ns: float) -> None:
        """Move the place, to the nearest end if it would be outside."""
        with self._lock:
            self._settle()
            self._move(at_ns)

    def step(self, share: float) -> None:
        """Move the place by a share of the trace's length."""
        with self._lock:
            self._move(self._settle() + share * (self.end_ns - self.begin_ns))

    def step_event(self, by: int) -> None:
        """Move the place to the next event (1) or the one before (-1), if there is one."""
        with self._lock:
            here = self._settle()
            find = bisect_right if by > 0 else bisect_left
            place = find(self._times, here) - (by < 0)
            if 0 <= place < len(self._times):
                self._move(self._times[place])

    def n_events_until(self, at_ns: int) -> int:
        """Events up to that time."""
        return bisect_right(self._times, at_ns)

    def play(self, *, on: bool) -> None:
        """Let the place move as time goes, times `speed`; from the beginning if it is at the end."""
        with self._lock:
            self._settle()
            if on and self._at_ns >= self.end_ns:
                self._at_ns = self.begin_ns
            self._played_s = self._clock() if on else None

    def change_speed(self, factor: float) -> None:
        """Play so many times as fast, within bounds."""
        with self._lock:
            self._settle()
            self._speed = min(max(self._speed * factor, SLOWEST), FASTEST)

    def _settle(self) -> int:
        if self._played_s is not None:
            now_s = self._clock()
            self._move(self._at_ns + (now_s - self._played_s) * self._speed * 1e9)
            self._played_s = now_s if self._at_ns < self.end_ns else None
        return self._at_ns

    def _move(self, at_ns: float) -> None:
        self._at_ns = int(min(max(at_ns, self.begin_ns), self.end_ns))
