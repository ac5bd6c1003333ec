"""Recorder: the newest calls on a pool, and the trace files that are made of them."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.core.exceptions import PoolReentryError
from veloxquant_mlx.memory.journal import HISTORY
from veloxquant_mlx.telemetry.recorder.capture import books_of
from veloxquant_mlx.telemetry.recorder.files import Source, TraceFile, write_ring
from veloxquant_mlx.telemetry.recorder.ring import Ring, Taken
from veloxquant_mlx.telemetry.trace.schema import SUFFIX

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.telemetry.probe import Probe
    from veloxquant_mlx.telemetry.recorder.settings import Settings
    from veloxquant_mlx.telemetry.samples import Sample

__all__ = ["Recorder"]

_log = logging.getLogger("veloxquant_mlx.telemetry")

LOCK_TIMEOUT_S: Final = 1.0
LOG_AGAIN_S: Final = 600.0


class Recorder:
    """Records one pool; made by `record`. Any thread may use it.

    Attributes:
        settings: As given to `record`.
        errors: Failures so far by reason: "dump", "write" (the continuous file), "lock".
        n_lost: Calls that the continuous file lacks.
        n_suppressed: Dumps that were not made because another one of the kind had just been made.
    """

    def __init__(self, pool: BlockPoolAllocator, probe: Probe, settings: Settings) -> None:
        self.settings = settings
        self.errors: dict[str, int] = {"dump": 0, "write": 0, "lock": 0}
        self.n_lost = 0
        self.n_suppressed = 0
        self._pool = weakref.ref(pool)
        self._probe = probe
        self._hooks = probe.hooks
        self._source = Source(probe.name, pool.config, owners=settings.owners)
        self._file: TraceFile | None = None
        self._left: Taken | None = None  # what was in the ring when the hooks were taken out
        self._dumps: deque[Path] = deque()
        self._wanted: dict[str, bool] = {"exhausted": False, "violation": False, "asked": False}
        self._next_s: dict[str, float] = {}
        self._logged_s: dict[str, float] = {}
        self._n_dumped = 0
        self._snapshot_due_s = self._flush_due_s = 0.0
        self._ended = self._gone = False
        self._pid = os.getpid()
        self._writing = threading.Lock()

    # -- on and off -----------------------------------------------------------------------------

    def start(self) -> None:
        """Make the journal longer, and begin the continuous file if there is to be one.

        Raises:
            OSError: The file cannot be made; nothing is recorded.
            ImportError: The extra `trace` is not installed; the same.
        """
        pool = self._pool()
        assert pool is not None
        with pool._lock:
            books = books_of(pool)
            self._ring = Ring(pool, self._hooks, self.settings.capacity)
            self._hooks.use_journal(pool, self._ring.entries, self)
        if self.settings.path is not None:
            try:
                now = pool._clock()
                self._file = TraceFile(self.settings.path, self._source, books, now, "continuous")
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Record no more, and end the continuous file. Idempotent; waits some seconds at most."""
        pool = self._pool()
        if pool is not None and not self._ended:
            lock: Any = pool._lock
            try:
                # Not `with`: at exit, a thread that is stuck with the lock must not keep the process.
                if lock.acquire(timeout=LOCK_TIMEOUT_S):
                    self.removed()
                else:
                    self.errors["lock"] += 1
            finally:
                if lock._is_owned():
                    lock.release()
        self.keep()

    def records(self, pool: BlockPoolAllocator) -> bool:
        """Whether it is that pool's."""
        return self._pool() is pool

    @property
    def active(self) -> bool:
        """Whether it records."""
        return not (self._ended or self._gone)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to be written either."""
        return not self.active and self._file is None

    @property
    def path(self) -> Path | None:
        """The continuous file, while it is written."""
        file = self._file
        return None if file is None else self.settings.path

    @property
    def dumps(self) -> tuple[Path, ...]:
        """Files that were dumped by themselves or on `request_dump`, oldest first."""
        return tuple(self._dumps)

    # -- told by the hooks; under the pool's lock -----------------------------------------------

    def freed(self, entry: Entry) -> None:
        """See `hooks.Tap`."""
        self._ring.freed(entry)

    def resized(self) -> None:
        """See `hooks.Tap`."""
        self._ring.resized()

    def refused(self) -> None:
        """See `hooks.Tap`."""
        self._wanted["exhausted"] = True

    def sampled(self, sample: Sample) -> None:
        """See `hooks.Tap`."""
        self._ring.sampled(sample)

    def violated(self) -> None:
        """See `hooks.Tap`."""
        self._wanted["violation"] = True

    def removed(self) -> None:
        """See `hooks.Tap`."""
        pool = self._pool()
        if pool is None or self._ended:
            return
        self._ended = True
        if self._file is not None:
            self._left = self._ring.take(pool)
        journal = deque(self._ring.entries, maxlen=HISTORY)
        self._hooks.use_journal(pool, journal, None)

    def gone(self) -> None:
        """See `hooks.Tap`."""
        self._gone = True

    # -- dumps ----------------------------------------------------------------------------------

    def request_dump(self) -> None:
        """Ask for a dump into the folder. Takes no lock: for signal handlers.

        The recorder's thread makes it within a tick, 20 ms, at most one a second.
        """
        self._wanted["asked"] = True

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Write what the ring holds as a trace file, now, on this thread.

        Returns:
            The path.

        Raises:
            RuntimeError: Nothing is recorded any more: stopped, no longer watched, or the pool was
                collected; or the pool's lock could not be had.
            PoolReentryError: Called from inside a call of the pool, such as by a signal handler.
            OSError: The file cannot be written.
            ImportError: The extra `trace` is not installed.
        """
        return self._dump(Path(path), "asked")

    def _dump(self, path: Path, reason: str) -> Path:
        pool = self._pool()
        if pool is None or not self.active:
            raise RuntimeError("nothing is recorded any more: the pool is gone or not watched")
        lock: Any = pool._lock
        if lock._is_owned():
            raise PoolReentryError(
                "dump() was called from inside a call of the pool; request_dump() may be"
            )
        snapshot = self._probe.snapshot()
        try:
            if not lock.acquire(timeout=LOCK_TIMEOUT_S):
                raise RuntimeError(f"the pool's lock could not be had in {LOCK_TIMEOUT_S:g} s")
            taken = self._ring.copy(pool)
        finally:
            if lock._is_owned():
                lock.release()
        write_ring(path, self._source, taken, snapshot, reason)
        return path

    def flush(self) -> None:
        """Write to the continuous file, if there is one, what happened so far."""
        self._flush_due_s = 0.0
        self.keep()

    # -- the recorder's thread ------------------------------------------------------------------

    def keep(self) -> None:
        """What is due: time, dumps, the continuous file. Called every tick; raises nothing."""
        if self._pid != os.getpid() or not self._writing.acquire(timeout=LOCK_TIMEOUT_S):
            return
        try:
            self._tell_time()
            self._dump_wanted()
            if self._file is not None:
                self._guarded("write", self._go_on_writing)
            if self.done and self._ring.entries:
                self._ring.clear()
                _log.info("the recording of pool %r has ended", self._source.pool)
        finally:
            self._writing.release()

    def _tell_time(self) -> None:
        """Let the one-block path, which reads no clock, enter a fresh time in the journal."""
        pool = self._pool()
        if pool is not None and self.active:
            now = pool._clock()
            # One step for other threads. A call under way has its time, by which it is measured.
            if not pool._busy and now > pool._now:
                pool._now = now

    def _dump_wanted(self) -> None:
        for reason, wanted in self._wanted.items():
            if not wanted:
                continue
            self._wanted[reason] = False
            now = time.monotonic()
            if now < self._next_s.get(reason, 0.0):
                self.n_suppressed += 1
            elif self.active:
                self._next_s[reason] = now + self.settings.pause_s(reason)
                self._guarded("dump", partial(self._dump_into_folder, reason))

    def _dump_into_folder(self, reason: str) -> None:
        folder = self.settings.make_folder()
        self._n_dumped += 1
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in self._source.pool)[:64]
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        file = f"{name}-{self._pid}-{stamp}-{self._n_dumped}-{reason}{SUFFIX}"
        self._dumps.append(self._dump(folder / file, reason))
        _log.warning(
            "pool %r: dumped the last calls (%s) to %s", self._source.pool, reason, folder / file
        )
        while len(self._dumps) > self.settings.keep:
            self._dumps.popleft().unlink(missing_ok=True)

    def _go_on_writing(self) -> None:
        file, now = self._file, time.monotonic()
        assert file is not None
        pool = self._pool()
        over = not self.active or file.writer.n_bytes > self.settings.max_bytes
        full = self._ring.n_waiting() > self.settings.capacity // 4
        if not (over or full or now >= self._flush_due_s):
            return
        self._flush_due_s = now + self.settings.flush_s
        taken = self._take(pool)
        if taken is None:
            return
        self.n_lost += taken.n_lost
        if now >= self._snapshot_due_s or over:
            self._snapshot_due_s = now + self.settings.snapshot_s
            file.add_snapshot(self._probe.snapshot() if pool is not None else None)
        try:
            file.append(taken)
        except BaseException:
            self._give_up()
            raise
        if over:
            self._file = None
            file.end()

    def _take(self, pool: BlockPoolAllocator | None) -> Taken | None:
        if self._ended:
            left, self._left = self._left, None
            return left or Taken([], [], {}, [], 0, None)
        if pool is None:
            return self._ring.take(None) if self._gone else None
        lock: Any = pool._lock
        try:
            if not lock.acquire(timeout=LOCK_TIMEOUT_S):
                self.errors["lock"] += 1
                return None
            return None if self._ended or pool._busy else self._ring.take(pool)
        finally:
            if lock._is_owned():
                lock.release()

    def _give_up(self) -> None:
        """After a failed write rows are missing that nothing later could be read without."""
        file, self._file = self._file, None
        if file is not None:
            file.writer.abandon()

    def _guarded(self, reason: str, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001 - nothing of this may reach the serving code
            self.errors[reason] += 1
            now = time.monotonic()
            if now >= self._logged_s.get(reason, 0.0):
                self._logged_s[reason] = now + LOG_AGAIN_S
                _log.warning("recording pool %r: %s fails: %s", self._source.pool, reason, error)

    # -- fork, and the last events --------------------------------------------------------------

    def start_in_child(self) -> None:
        """After a fork, in the child: the file is the parent's; the ring goes on."""
        self._writing = threading.Lock()
        self._pid = os.getpid()
        self._dumps.clear()
        self._give_up()

    def last_events(self, n: int) -> list[Mapping[str, Any]]:
        """The newest `n` calls as JSON objects, oldest first."""
        from veloxquant_mlx.telemetry.recorder.events import events_of

        offset_s = time.time() - time.monotonic()
        return events_of(self._ring.entries, n, self._source, offset_s)
