"""Keeper: the one thread that serves all recorders of a process, and who they are."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.telemetry import event_source
from veloxquant_mlx.telemetry.recorder.recorder import Recorder
from veloxquant_mlx.telemetry.recorder.settings import CAPACITY, Settings
from veloxquant_mlx.telemetry.registry import instrument
from veloxquant_mlx.telemetry.trace.libraries import load_library

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["TICK_S", "record"]

# How often the thread looks. Signal handlers set flags, as waking a thread takes locks.
TICK_S: Final = 0.02


class Keeper:
    """Recorders, and the thread that ticks while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorders: tuple[Recorder, ...] = ()
        self._thread: threading.Thread | None = None

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """Those that record, or have something left to write."""
        return self._recorders

    def add(self, recorder: Recorder) -> None:
        """Serve `recorder` until it is done."""
        with self._lock:
            self._recorders = (*self._recorders, recorder)
            self._start()

    def _start(self) -> None:
        if self._thread is None and self._recorders:
            self._thread = threading.Thread(
                target=self._run, name="veloxquant-recorder", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            for recorder in self._recorders:
                recorder.keep()
            with self._lock:
                self._recorders = tuple(r for r in self._recorders if not r.done)
                if not self._recorders:
                    self._thread = None
                    return
            time.sleep(TICK_S)

    def stop_all(self) -> None:
        """At the end of the process: end the files."""
        for recorder in self._recorders:
            recorder.stop()

    def start_in_child(self) -> None:
        """After a fork: the thread and whoever had the lock do not exist here."""
        self._lock = threading.Lock()
        self._thread = None
        for recorder in self._recorders:
            recorder.start_in_child()
        self._start()


keeper = Keeper()
atexit.register(keeper.stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=keeper.start_in_child)


def record(
    pool: BlockPoolAllocator,
    path: str | os.PathLike[str] | None = None,
    *,
    capacity: int = CAPACITY,
    owners: bool = False,
    folder: str | os.PathLike[str] | None = None,
    dump_pause_s: float = 60.0,
    keep: int = 16,
    max_bytes: int = 1 << 30,
    flush_s: float = 0.25,
    snapshot_s: float = 1.0,
) -> Recorder:
    """Record the calls on `pool` from now on, and watch it if it is not watched yet.

    The newest calls stay in a ring and are dumped as a trace file: on demand, when an allocation
    fails, and when the self-check finds the books wrong. With `path` all calls go to that file, too.
    Recording ends with `stop()`, with `uninstrument(pool)`, and with the pool; also when a pool that
    nobody had named is given a name, so name it (`instrument`) before. A forked child goes on
    with its ring and leaves the file to its parent.

    Args:
        pool: Held weakly.
        path: File for all calls, replaced if there is one.
        capacity: Calls in the ring, 256 to 4,194,304; about 0.5 KB each.
        owners: Write owner ids into files; otherwise numbers stand for them.
        folder: For dumps that nobody gave a path; None takes `VELOXQUANT_TRACE_DIR`, else a folder of
            this user in the system's for temporary files.
        dump_pause_s: Seconds between dumps of one kind, at least.
        keep: So many of these dumps are kept, the newest.
        max_bytes: The continuous file ends when it is larger.
        flush_s: How often it is written to.
        snapshot_s: How often a snapshot of the pool goes into it.

    Raises:
        ValueError: An argument is out of range, the pool is recorded already, or another recorder
            writes to `path`.
        ArgumentTypeError: An argument, or `pool`, is of the wrong type.
        OSError: The file cannot be made.
        ImportError: The extra `trace` is not installed.
    """
    for name, value in (("path", path), ("folder", folder)):
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise ArgumentTypeError(f"{name} must be a path or None, got {value!r}")
    settings = Settings(
        None if path is None else Path(path),
        capacity,
        owners,
        None if folder is None else Path(folder),
        dump_pause_s,
        keep,
        max_bytes,
        flush_s,
        snapshot_s,
    )
    # Now, and not when the first dump is due.
    load_library("msgpack")
    load_library("zstandard")
    probe = instrument(pool)
    if any(other.active and other.records(pool) for other in keeper.recorders):
        raise ValueError(f"pool {probe.name!r} is recorded already; stop() that recorder before")
    _refuse_shared(settings.path)
    recorder = Recorder(pool, probe, settings)
    recorder.start()
    keeper.add(recorder)
    if not event_source.has_source():
        event_source.set_event_source(_last_events)
    return recorder


def _refuse_shared(path: Path | None) -> None:
    """Raise if a recorder writes to `path`: it would go on into a file that has no name any more."""
    if path is None:
        return
    for other in keeper.recorders:
        if other.path is not None and other.active and _is_same(other.path, path):
            raise ValueError(f"another recorder writes to {path}; give each pool a file of its own")


def _is_same(path: Path, other: Path) -> bool:
    return path.name == other.name and path.parent.resolve() == other.parent.resolve()


def _last_events() -> list[Mapping[str, Any]]:
    n = event_source.MAX_EVENTS
    events = [event for recorder in keeper.recorders for event in recorder.last_events(n)]
    return sorted(events, key=lambda event: float(event["wall_s"]))[-n:]
