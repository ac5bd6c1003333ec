"""Worker: the one thread in which handlers run that may take a while."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Worker"]

_log = logging.getLogger("veloxquant_exporters.http")


class Worker:
    """Runs jobs one after another, in a daemon thread of its own. Thread-safe.

    One thread whatever the number of clients: a scrape is Python code, so two at once would only
    slow each other, and the serving process with them.

    Args:
        name: Of the thread.
        max_waiting: Jobs that may wait; more are refused.
        clock: Seconds, for `busy_s`.
    """

    def __init__(
        self, name: str, *, max_waiting: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._began: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job; False if too many wait already, or the worker is closed."""
        with self._wake:
            if self._closed or len(self._jobs) >= self._max_waiting:
                return False
            self._jobs.append(job)
            self._wake.notify()
            return True

    def n_waiting(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    def busy_s(self) -> float:
        """Seconds that the running job has taken so far; 0 without one."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def close(self, timeout_s: float) -> bool:
        """End the thread after its running job; False if that took longer than `timeout_s`.

        Jobs that wait are dropped. A thread that is left behind ends with its job, or the process.
        """
        with self._wake:
            self._closed = True
            self._jobs.clear()
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            self._began = self._clock()
            try:
                job()
            except Exception:  # noqa: BLE001 - the thread outlives whatever a job does
                _log.exception("a job of the metrics server failed")
            self._began = None
