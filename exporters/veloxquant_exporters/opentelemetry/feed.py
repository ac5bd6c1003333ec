"""Feed: one reading of the source a collection cycle, with a bounded wait for it.

An SDK collects by calling the callback of one instrument after the other. All callbacks of a cycle
share a reading; the first one asks for it. A thread of the feed's own reads the source, so that a
pool that is locked for long costs a cycle its points and the reader nothing but a short wait.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from veloxquant_exporters.sources import Reading, SnapshotSource

__all__ = ["ERROR_REASONS", "Feed"]

MAX_WAIT_S = 2.0
# A cycle that stopped half way must not lend its reading to a later one.
MAX_AGE_S: Final = 10.0

# How long a collection is left alone with Python's own lock before `after` is called.
AFTER_S: Final = 0.05

# otel_skipped: cycles without points, the source not answering in time. otel_source: it raised.
# otel_row: one metric could not be read. otel_export: an export of our own pipeline failed.
ERROR_REASONS: Final = ("otel_skipped", "otel_source", "otel_row", "otel_export")


class _Request:
    """A reading that was asked for."""

    __slots__ = ("done", "reading")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reading: Reading | None = None


class Feed:
    """Readings for the callbacks of one instrumentation. Any thread may ask.

    Dead in a forked child: its thread is the parent's.

    Args:
        source: What is read.
        max_wait_s: Longest wait for a reading, in seconds; None takes `MAX_WAIT_S`.
        after: Called on the feed's thread a moment after the last reading that was asked for.
    """

    def __init__(
        self,
        source: SnapshotSource,
        *,
        max_wait_s: float | None = None,
        after: Callable[[Reading], None] | None = None,
    ) -> None:
        self._source = source
        self._max_wait_s = MAX_WAIT_S if max_wait_s is None else max_wait_s
        self._after = after
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pending: _Request | None = None
        self._served: set[object] = set()
        self._began_s = 0.0
        self._current: Reading | None = None
        self.settled = threading.Event()  # set when `after` has had the last reading
        self.errors: dict[str, int] = dict.fromkeys(ERROR_REASONS, 0)

    @property
    def alive(self) -> bool:
        """False once closed, and in a forked child."""
        return not self._closed and os.getpid() == self._pid

    @property
    def current(self) -> Reading | None:
        """The reading of the cycle that is under way, or of the last one; None if it was skipped."""
        return self._current

    def count(self, reason: str) -> None:
        """Count a failure; see `ERROR_REASONS`."""
        self.errors[reason] += 1

    def reading(self, asker: object, timeout_s: float = math.inf) -> Reading | None:
        """The reading of this cycle, None where it was skipped.

        Args:
            asker: An instrument; one that asks again begins the next cycle.
            timeout_s: What is left of the collection's time, of which half is used at most.
        """
        if not self.alive:
            return None
        with self._lock:
            now = time.monotonic()
            if asker in self._served or not self._served or now - self._began_s > MAX_AGE_S:
                self._served = set()
                self._began_s = now
                self._current = self._fetch(max(0.0, min(self._max_wait_s, timeout_s / 2)))
            self._served.add(asker)
            return self._current

    def close(self) -> None:
        """Stop for good; the thread ends with the reading it is at."""
        self._closed = True
        self._requests.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `close`; False if it has not."""
        thread = self._thread
        if thread is None or os.getpid() != self._pid or thread is threading.current_thread():
            return True
        thread.join(max(0.0, timeout_s))
        return not thread.is_alive()

    # -- inside ---------------------------------------------------------------------------------

    def _fetch(self, wait_s: float) -> Reading | None:
        """A new reading; the lock is held."""
        request = self._pending
        if request is None or request.done.is_set():
            # One that came too late for its cycle is as old as its cycle.
            request = self._pending = _Request()
            self._start()
            self._requests.put(request)
        if not request.done.wait(wait_s):
            self.count("otel_skipped")
            return None
        self._pending = None
        return request.reading

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="veloxquant-otel", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        left: Reading | None = None
        while True:
            try:
                request = self._requests.get(timeout=None if left is None else AFTER_S)
            except queue.Empty:
                if left is not None:
                    self._finish(left)
                left = None
                continue
            if request is None:
                return
            self.settled.clear()
            try:
                request.reading = self._source.read()
            except Exception:  # noqa: BLE001 - a source's fault costs its cycle only
                self.count("otel_source")
            finally:
                request.done.set()
            left = request.reading if self._after is not None else None

    def _finish(self, reading: Reading) -> None:
        assert self._after is not None
        try:
            self._after(reading)
        except Exception:  # noqa: BLE001 - histograms failing leave the rest alone
            self.count("otel_row")
        self.settled.set()
