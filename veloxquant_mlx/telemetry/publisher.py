"""publish: this process' snapshot as a file for a sidecar; one publisher a process."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.telemetry.event_source import set_event_source
from veloxquant_mlx.telemetry.snapshot_publisher import Publisher

__all__ = [
    "Publisher",
    "publish",
    "publish_from_environment",
    "set_event_source",
    "stop_publishing",
]

_log = logging.getLogger("veloxquant_mlx.telemetry")

DIRECTORY_VARIABLE: Final = "VELOXQUANT_SNAPSHOT_DIR"
WORKER_VARIABLE: Final = "VELOXQUANT_WORKER"
# A write takes milliseconds; a disk that hangs must not hold up a fork.
FORK_WAIT_S: Final = 0.2

_current: list[Publisher] = []
# In a list, as a forked child needs another one: this may be held by a thread it does not have.
_starting = [threading.Lock()]


def publish(
    directory: str | os.PathLike[str] | None = None,
    interval: float = 1.0,
    worker: str | None = None,
) -> Publisher:
    """Write this process' snapshot into `directory` every `interval` seconds, for a sidecar.

    Asked again for the same, it returns the publisher there is. A forked child goes on by itself,
    under another identity and slot, once it uses a pool.

    Args:
        directory: None takes `VELOXQUANT_SNAPSHOT_DIR`.
        interval: Seconds, 0.01 to 3600.
        worker: Value of the label `process`: stable, and another one in each process. None takes
            `VELOXQUANT_WORKER`, else the lowest free slot of the directory, as in worker-0.

    Raises:
        ValueError: No directory is named, an argument is out of range, or this process publishes
            to another directory, at another interval or under another name already.
        ArgumentTypeError: An argument is of the wrong type.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE) if directory is None else directory
    if not directory:
        raise ValueError(f"name a directory, or set {DIRECTORY_VARIABLE}")
    if not isinstance(directory, (str, os.PathLike)):
        raise ArgumentTypeError(f"directory must be a path, got {directory!r}")
    worker = worker or os.environ.get(WORKER_VARIABLE) or None
    return _publish(Publisher(directory, interval, worker))


def publish_from_environment() -> Publisher | None:
    """Publish if `VELOXQUANT_SNAPSHOT_DIR` is set, from the first watched pool on; else None."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory or any(publisher.alive for publisher in _current):
        return _current[0] if _current else None
    worker = os.environ.get(WORKER_VARIABLE) or None
    try:
        return _publish(Publisher(directory, worker=worker, when_used=True))
    except (ValueError, RuntimeError) as error:
        _log.warning("not publishing to %s: %s", directory, error)
        return None


def stop_publishing() -> None:
    """Stop what `publish` or the environment started, if anything."""
    while _current:
        _current.pop().stop()


def _publish(wanted: Publisher) -> Publisher:
    with _starting[0]:
        _current[:] = [publisher for publisher in _current if publisher.alive]
        if _current:
            there = _current[0]
            for what in ("directory", "interval", "worker"):
                have, want = getattr(there, what), getattr(wanted, what)
                if have != want:
                    raise ValueError(
                        f"this process publishes already, with {what} {have!s}; "
                        f"stop() that before publishing with {what} {want!s}"
                    )
            return there
        wanted.start()
        _current.append(wanted)
        return wanted


def _before_fork() -> None:
    """Let no fork come in the middle of a write, whose locks and file the child could not finish."""
    _paused.extend(publisher for publisher in _current if publisher.pause(FORK_WAIT_S))


_paused: list[Publisher] = []


def _after_fork_in_parent() -> None:
    while _paused:
        _paused.pop().go_on()


def _after_fork_in_child() -> None:
    """The child has no publishing thread: begin one of its own, as somebody else."""
    _paused.clear()
    _starting[0] = threading.Lock()
    if not _current:
        publish_from_environment()
        return
    for publisher in _current:
        publisher.start_in_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
