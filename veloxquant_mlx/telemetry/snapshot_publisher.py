"""Publisher: the thread that writes this process' snapshot to a file, again and again.

Nothing here reaches the serving code: failures are counted, logged once, and mend themselves.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.telemetry import registry
from veloxquant_mlx.telemetry.event_source import last_events
from veloxquant_mlx.telemetry.identity import ProcessIdentity, own_identity
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.resource import resource_attributes
from veloxquant_mlx.telemetry.snapshot_json import (
    MAX_FILE_BYTES,
    MAX_LABEL_CHARS,
    Header,
    SnapshotFile,
    encode_file,
    encode_shrunk,
)
from veloxquant_mlx.telemetry.snapshot_writer import (
    WRITE_ERRORS,
    file_name,
    remove_predecessors,
    write_error,
    write_whole,
)
from veloxquant_mlx.telemetry.worker_slot import WorkerSlot, make_directory

__all__ = ["Publisher"]

_log = logging.getLogger("veloxquant_mlx.telemetry")

ERRORS: Final = (*WRITE_ERRORS, "snapshot")
MIN_INTERVAL_S: Final = 0.01
MAX_INTERVAL_S: Final = 3600.0
# How long an end waits for the last write. Longer, and a full pool lock would keep a process alive.
LAST_WRITE_S: Final = 2.0
LOG_AGAIN_S: Final = 600.0


class Publisher:
    """Writes one file every `interval` seconds on a daemon thread; made by `publish`.

    Thread-safe. A forked child goes on under an identity and a slot of its own.

    Args:
        directory: Made with mode 0750 if it is missing, also later.
        interval: Seconds between writes, 0.01 to 3600.
        worker: The label `process`; None takes the lowest free slot, as in worker-0.
        when_used: Write nothing before a watched pool is there and in use.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        interval: float = 1.0,
        worker: str | None = None,
        *,
        when_used: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.interval = _check_interval(interval)
        self.worker = _check_worker(worker)
        self._errors: dict[str, int] = dict.fromkeys(ERRORS, 0)
        self._logged: dict[str, float] = {}
        self._failing = False
        self._slot: WorkerSlot | None = None
        self._number: int | None = None
        self._born_anew(() if when_used else None)

    # -- for others -----------------------------------------------------------------------------

    @property
    def process(self) -> str:
        """The label; "" until the first write took a slot."""
        return self._process

    @property
    def path(self) -> Path | None:
        """The file; None until the first write."""
        return None if not self._process else self.directory / self._name

    @property
    def identity(self) -> ProcessIdentity:
        """Who this publisher says it is."""
        return self._identity

    @property
    def alive(self) -> bool:
        """False once it was told to stop."""
        return not self._stopping.is_set()

    @property
    def n_written(self) -> int:
        """Files written since this process began to publish."""
        return self._n_written

    @property
    def errors(self) -> Mapping[str, int]:
        """Failures so far by reason, every reason there."""
        return dict(self._errors)

    def stop(self) -> None:
        """Write a last file that says `stopped`, and end. Waits 2 s at most; idempotent."""
        self._stopping.set()
        thread = self._thread
        if thread is not threading.current_thread():
            thread.join(LAST_WRITE_S)
        atexit.unregister(self.stop)

    # -- for `publish` --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write; once."""
        atexit.unregister(self.stop)
        atexit.register(self.stop)
        self._thread.start()

    def pause(self, timeout_s: float) -> bool:
        """Keep the thread from writing until `go_on`; False if it was not done in time."""
        return self._busy.acquire(timeout=timeout_s)

    def go_on(self) -> None:
        """Undo `pause`."""
        self._busy.release()

    def start_in_child(self) -> None:
        """After a fork, in the child: begin as somebody else, for the thread stayed behind."""
        if self._slot is not None:
            self._slot.release()  # this copy only: the parent keeps its slot
        self._slot = self._number = None
        # The name is the parent's. Two of one name would hide each other.
        self.worker = None
        # Pools that the fork copied are not in use here before they are used.
        self._born_anew(_AS_FORKED)
        self.start()

    # -- the thread -----------------------------------------------------------------------------

    def _born_anew(self, unused: _Usage | None) -> None:
        """Begin as a new identity: at the start, and in a forked child.

        Args:
            unused: What the pools look like while there is nothing to tell; None to tell at once.
        """
        self._identity = own_identity()
        self._born_s = time.time()
        self._process = ""
        self._name = ""
        self._sequence = 0
        self._n_written = 0
        self._spent_s = 0.0
        self._unused = unused
        self._stopping = threading.Event()
        self._busy = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(self._stopping,), name="veloxquant-publisher", daemon=True
        )

    def _run(self, stopping: threading.Event) -> None:
        due = time.monotonic()
        while not stopping.is_set():
            self._attempt("running")
            # A write that took too long skips beats; it does not hurry after them.
            due = max(due + self.interval, time.monotonic())
            stopping.wait(max(0.0, due - time.monotonic()))
        if self._n_written and self.directory.is_dir():
            self._attempt("stopped")
        if self._slot is not None:
            self._slot.release()
            self._slot = None

    def _finish_with_multiprocessing(self) -> None:
        """Children of multiprocessing end without atexit, but run its own finalizers.

        Not done in the moment of the fork: it drops those that are there then.
        """
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.stop, exitpriority=100)

    def _attempt(self, state: Literal["running", "stopped"]) -> None:
        try:
            with self._busy:
                self._write(state)
        except OSError as error:
            self._failed(write_error(error), error)
        except Exception as error:  # noqa: BLE001 - nothing of this may reach the serving code
            self._failed("snapshot", error)
        else:
            if self._failing:
                self._failing = False
                _log.info("publishing to %s goes on", self.directory)

    def _failed(self, reason: str, error: Exception) -> None:
        self._errors[reason] += 1
        self._failing = True
        now = time.monotonic()
        if now >= self._logged.get(reason, 0.0):
            self._logged[reason] = now + LOG_AGAIN_S
            _log.warning(
                "publishing to %s fails (%s): %s; going on without, and trying again every %g s",
                self.directory, reason, error, self.interval,
            )  # fmt: skip

    # -- one file -------------------------------------------------------------------------------

    def _write(self, state: str) -> None:
        snapshot = registry.take_snapshot()
        if self._unused is not None:
            usage = _usage(snapshot)
            if self._unused is _AS_FORKED:
                self._unused = usage
            if usage == self._unused:
                return
            self._unused = None
        began_s = time.thread_time()
        try:
            self._take_label()
            write_whole(self.directory, self._name, self._encode(state, snapshot))
        finally:
            self._spent_s += time.thread_time() - began_s
        self._n_written += 1
        if self._n_written == 1:
            self._finish_with_multiprocessing()

    def _take_label(self) -> None:
        """Have a directory, and in it the label that this process is known by."""
        known = self._slot.lost is False if self._slot is not None else bool(self.worker)
        if known and self._process and self.directory.is_dir():
            return
        make_directory(self.directory)
        if self.worker is not None:
            self._rename(self.worker)
            return
        lost, self._slot = self._slot, None
        if lost is not None:
            lost.release()
        self._slot = WorkerSlot(self.directory, self._number)
        self._number = self._slot.number
        self._rename(self._slot.label)

    def _rename(self, process: str) -> None:
        self._process = process
        self._name = file_name(process, self._identity.random_id)
        alone = self._slot is not None
        remove_predecessors(self.directory, process, self._name, alone=alone)

    def _encode(self, state: str, snapshot: ProcessSnapshot) -> bytes:
        self._sequence += 1
        file = SnapshotFile(
            header=Header(
                state=state,
                sequence=self._sequence,
                interval_s=self.interval,
                process=self._process,
                born_s=self._born_s,
                identity=self._identity,
            ),
            snapshot=self._with_own(snapshot),
            resource=resource_attributes(),
            events=self._events(),
        )
        data = encode_file(file)
        if len(data) > MAX_FILE_BYTES:
            self._failed(
                "oversized", ValueError(f"{len(data)} bytes; leaving out what is too much")
            )
            data = encode_shrunk(file, MAX_FILE_BYTES)
        return data

    def _events(self) -> tuple[Mapping[str, Any], ...]:
        try:
            return last_events()
        except Exception as error:  # noqa: BLE001 - events are an extra; the numbers go on
            self._failed("snapshot", error)
            return ()

    def _with_own(self, snapshot: ProcessSnapshot) -> ProcessSnapshot:
        """`snapshot` with what publishing itself failed in and cost so far."""
        own = {f"publish_{reason}": n for reason, n in self._errors.items()}
        return replace(
            snapshot,
            errors={**snapshot.errors, **own},
            overhead_s=snapshot.overhead_s + self._spent_s,
        )


# Of each pool its name, and the blocks it handed out and got back.
_Usage = tuple[tuple[str, int, int], ...]
# Stands for what the pools look like at the first look: those that a fork copied are not ours.
_AS_FORKED: Final[_Usage] = (("", -1, -1),)


def _usage(snapshot: ProcessSnapshot) -> _Usage:
    return tuple((pool.name, pool.n_allocations, pool.n_frees) for pool in snapshot.pools)


def _check_interval(interval: object) -> float:
    if isinstance(interval, bool) or not isinstance(interval, (int, float)):
        raise ArgumentTypeError(f"interval must be a number of seconds, got {interval!r}")
    if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
        raise ValueError(
            f"interval must be {MIN_INTERVAL_S} to {MAX_INTERVAL_S:g} seconds, got {interval!r}"
        )
    return float(interval)


def _check_worker(worker: object) -> str | None:
    if worker is None:
        return None
    if not isinstance(worker, str):
        raise ArgumentTypeError(f"worker must be a str or None, got {worker!r}")
    if not 0 < len(worker) <= MAX_LABEL_CHARS or not worker.isprintable():
        raise ValueError(f"worker must have 1 to 128 printable characters, got {worker!r}")
    return worker
