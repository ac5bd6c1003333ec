"""DirectorySource: the processes whose snapshot files lie in a folder."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final, Self

from veloxquant_exporters.sidecar.fault_log import FaultLog
from veloxquant_exporters.sidecar.snapshot_files import (
    READ_ERRORS,
    Signature,
    UnreadableError,
    read_header,
    signature,
)
from veloxquant_exporters.sidecar.state import STATES
from veloxquant_exporters.sidecar.tracked_file import TrackedFile
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.telemetry.identity import own_namespace
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.snapshot_json import FILE_SUFFIX

__all__ = ["ERRORS", "DirectorySource"]

# What the source counts: files by why they could not be read, and faults of its own.
ERRORS: Final = (*READ_ERRORS, "directory", "clash", "cleanup", "busy")
RETENTION_S: Final = 900.0
# Ended processes that are remembered; older ones go before their time, so that series stay few.
MAX_ENDED: Final = 64
# A writer that was killed leaves its temporary file.
TEMPORARY_S: Final = 60.0
MAX_CLASHES: Final = 1000
WAIT_S: Final = 2.0
MIN_LOOK_S: Final = 0.02
MAX_LOOK_S: Final = 1.0


class DirectorySource:
    """Reads snapshot files; a `SnapshotSource`. Any thread may call it.

    Between reads, `start` keeps looking, so that silence is noticed in time; without it each read
    looks once.

    Args:
        directory: Need not exist yet.
        retention_s: Seconds that an ended process' last snapshot stays; its file goes then.
        clock: Monotonic seconds.
        namespace: PID namespace of this reader; None asks the system.
    """

    labels_processes = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        retention_s: float = RETENTION_S,
        clock: Callable[[], float] = time.monotonic,
        namespace: str | None = None,
    ) -> None:
        self.directory = os.fspath(directory)
        self.retention_s = retention_s
        self._clock = clock
        self._namespace = own_namespace() if namespace is None else namespace
        self._lock = threading.Lock()
        self._files: dict[str, TrackedFile] = {}
        self._bad: dict[str, Signature] = {}
        self._temporary: dict[str, tuple[Signature, float]] = {}
        self._clashes: set[frozenset[str]] = set()
        self._faults = FaultLog(ERRORS)
        self._n_removed = 0
        self._last = Reading(processes=(), up={}, errors=self._faults.counts())
        self._dead: frozenset[str] = frozenset()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # -- as a source ----------------------------------------------------------------------------

    def read(self) -> Reading:
        """Snapshots of live and stale processes; `up` of a dead one is 0. See `SnapshotSource`."""
        reading = self.read_with_dead()
        dead = self._dead
        live = tuple(process for process in reading.processes if process.process not in dead)
        return replace(reading, processes=live)

    def read_with_dead(self) -> Reading:
        """As `read`, with the last snapshots of dead processes too, whose `up` is 0.

        Of a dead process, only what it counted is still true: whoever exports this leaves its
        gauges out, see `dead_processes`.
        """
        if not self._lock.acquire(timeout=WAIT_S):
            # A folder on a file system that does not answer. The last reading is the best there is.
            self._faults.count("busy", self.directory, "the folder does not answer in time")
            return self._last
        try:
            self._look()
            self._last = self._reading()
        finally:
            self._lock.release()
        return self._last

    @property
    def dead_processes(self) -> frozenset[str]:
        """Labels whose process was dead at the last read, and no other has the name."""
        return self._dead

    def sizes(self) -> Mapping[str, int]:
        """As in `Reading.sizes`, at the last look: files by state, and how many were removed."""
        with self._lock:
            return self._sizes()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Keep looking, on a daemon thread, until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_looking, name="veloxquant-directory", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread of `start`. Reading goes on working."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(WAIT_S)

    def files(self, process: str | None = None) -> list[TrackedFile]:
        """The files known from the last look, of one label or all, the one that counts first."""
        with self._lock:
            found = [file for file in self._files.values() if not file.hidden]
        wanted = [file for file in found if process in (None, file.header.process)]
        return sorted(wanted, key=lambda file: file.rank, reverse=True)

    # -- looking: who is there, in which state ---------------------------------------------------

    def _keep_looking(self) -> None:
        while not self._closing.wait(self._look_again_s()):
            try:
                with self._lock:
                    self._look()
            except Exception as error:  # noqa: BLE001 - the thread outlives whatever a folder holds
                self._faults.count("io", self.directory, repr(error))

    def _look_again_s(self) -> float:
        with self._lock:
            intervals = [file.header.interval_s for file in self._files.values() if not file.ended]
        return max(MIN_LOOK_S, min([MAX_LOOK_S, *(interval / 2 for interval in intervals)]))

    def _look(self) -> None:
        now = self._clock()
        there = self._entries()
        for name, path, found in there:
            if name.startswith("."):
                if name.endswith(f"{FILE_SUFFIX}.tmp"):
                    self._look_at_temporary(path, signature(found), now)
                continue
            self._look_at(path, found, now)
        paths = {path for _, path, _ in there}
        for known in (self._files, self._bad, self._temporary):
            for path in [path for path in known if path not in paths]:
                del known[path]
        for file in self._files.values():
            if not file.ended:
                file.judge(now, self._namespace, self.retention_s)
        self._sweep(now)

    def _entries(self) -> list[tuple[str, str, os.stat_result]]:
        try:
            with os.scandir(self.directory) as entries:
                there = list(_stats(entries))
        except OSError as error:
            self._faults.count("directory", self.directory, error)
            return []
        self._faults.mended("directory", self.directory)
        return there

    def _look_at(self, path: str, found: os.stat_result, now: float) -> None:
        regular = stat.S_ISREG(found.st_mode)
        seen = signature(found) if regular else (found.st_ino, 0, 0)
        known = self._files.get(path)
        if self._bad.get(path) == seen or (known is not None and known.seen == seen):
            return
        try:
            if not regular:  # opening it might do something, or wait
                raise UnreadableError("not_a_file", "neither a file nor a link to one is read here")
            header = read_header(path)
        except FileNotFoundError:
            return
        except UnreadableError as error:
            self._note_bad(path, seen, error)
            self._files.pop(path, None)
            return
        self._bad.pop(path, None)
        if known is None:
            age_s = max(0.0, time.time() - found.st_mtime)
            known = self._files[path] = TrackedFile.at_first_sight(
                path, seen, header, now, age_s, self._namespace
            )
        else:
            known.renew(seen, header, now)
        known.judge(now, self._namespace, self.retention_s)

    def _look_at_temporary(self, path: str, seen: Signature, now: float) -> None:
        last, since = self._temporary.get(path, (None, now))
        self._temporary[path] = seen, since if last == seen else now
        if now - self._temporary[path][1] > TEMPORARY_S:
            self._remove(path)

    def _note_bad(self, path: str, seen: Signature, error: UnreadableError) -> None:
        """Count a file that cannot be read: once a version, not at each look."""
        if self._bad.get(path) != seen:
            self._bad[path] = seen
            self._faults.count(error.reason, path, error)

    # -- letting go -----------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        """Remove the files of ended processes when their time is over, or there are too many."""
        ended = [file for file in self._files.values() if file.ended and not file.hidden]
        if not ended:
            return
        ended.sort(key=lambda file: (file.since_s, file.modified_s), reverse=True)
        for place, file in enumerate(ended):
            if place >= MAX_ENDED or now - file.since_s > self.retention_s:
                if self._remove(file.path):
                    del self._files[file.path]
                else:
                    file.hidden = True

    def _remove(self, path: str) -> bool:
        try:
            os.unlink(path)  # noqa: PTH108 - 5,000 at a time: plain text is enough of a path
        except FileNotFoundError:
            return True
        except OSError as error:
            self._faults.count("cleanup", self.directory, error)
            return False
        self._n_removed += 1
        return True

    # -- reading: what they had ------------------------------------------------------------------

    def _reading(self) -> Reading:
        processes: list[ProcessSnapshot] = []
        up: dict[str, int] = {}
        dead: set[str] = set()
        for label, file in self._by_label().items():
            snapshot = self._decoded(file)
            up[label] = int(snapshot is not None and file.state != "dead")
            if file.state == "dead":
                dead.add(label)
            if snapshot is not None:
                processes.append(snapshot)
        self._dead = frozenset(dead)
        return Reading(tuple(processes), up, self._faults.counts(), self._sizes())

    def _by_label(self) -> dict[str, TrackedFile]:
        """The file that counts for each label; others that run under it are counted as clashes."""
        best: dict[str, TrackedFile] = {}
        for file in self._files.values():
            if file.state == "stopped" or file.hidden:
                continue
            label = file.header.process
            other = best.get(label)
            if other is not None and not other.ended and not file.ended:
                self._note_clash(label, other, file)
            if other is None or file.rank > other.rank:
                best[label] = file
        return dict(sorted(best.items()))

    def _note_clash(self, label: str, one: TrackedFile, other: TrackedFile) -> None:
        if len(self._clashes) >= MAX_CLASHES:
            self._clashes.clear()
        pair = frozenset({one.header.identity.random_id, other.header.identity.random_id})
        if pair not in self._clashes:
            self._clashes.add(pair)
            text = "two live processes have this name; give each its own with publish(worker=...)"
            self._faults.count("clash", f"process {label!r}", text)

    def _decoded(self, file: TrackedFile) -> ProcessSnapshot | None:
        try:
            return file.decode()
        except FileNotFoundError:
            return None
        except UnreadableError as error:
            self._note_bad(file.path, file.seen, error)
            return None

    def _sizes(self) -> Mapping[str, int]:
        sizes: dict[str, int] = dict.fromkeys(STATES, 0)
        for file in self._files.values():
            sizes[file.state] += 1
        return {**sizes, "unreadable": len(self._bad), "removed": self._n_removed}


def _stats(entries: Iterator[os.DirEntry[str]]) -> Iterator[tuple[str, str, os.stat_result]]:
    for entry in entries:
        try:
            yield entry.name, entry.path, entry.stat(follow_symlinks=False)
        except OSError:
            continue  # it went while we looked
