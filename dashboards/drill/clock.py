"""The virtual clock: seconds that pass when the drill says so, for everything in the process.

`CLOCK.install()` replaces the functions of `time` before the packages under test are imported, as
some of them take hold of a function at import. Modules imported earlier (subprocess, threading)
keep the real ones, which is what waiting for promtool needs.
"""

from __future__ import annotations

# Before the clock is replaced: these must go on with real seconds.
import concurrent.futures  # noqa: F401
import subprocess  # noqa: F401
import threading  # noqa: F401
import time
from typing import Final

__all__ = ["CLOCK", "VirtualClock"]

# A read takes time, so that the calls between two reads take some too.
READ_NS: Final = 400


class VirtualClock:
    """Nanoseconds that only rise. The wall clock is 0 where `restart_wall` was called last."""

    def __init__(self) -> None:
        self._now_ns = 3_600_000_000_000  # as of a machine that has been up for an hour
        self._wall_ns = self._now_ns
        self.real_s = time.time

    def install(self) -> None:
        """Replace the functions of the module `time` in this process."""
        time.time = self.wall_s
        time.time_ns = lambda: self.now_ns() - self._wall_ns
        time.monotonic = time.perf_counter = lambda: self.now_ns() / 1e9
        time.monotonic_ns = time.perf_counter_ns = self.now_ns

    def restart_wall(self) -> None:
        """Let the wall clock begin at 0: promtool's tests do."""
        self._wall_ns = self._now_ns

    def now_ns(self) -> int:
        """The monotonic time; each read takes `READ_NS`."""
        self._now_ns += READ_NS
        return self._now_ns

    def wall_s(self) -> float:
        """Seconds since `restart_wall`."""
        return (self.now_ns() - self._wall_ns) / 1e9

    def pass_ns(self, ns: int) -> None:
        """Let `ns` nanoseconds pass, as in a call that takes that long."""
        self._now_ns += ns

    def step_to(self, wall_s: float) -> None:
        """Go on to `wall_s`, unless it is past."""
        self._now_ns = max(self._now_ns, self._wall_ns + int(wall_s * 1e9))


CLOCK: Final = VirtualClock()
