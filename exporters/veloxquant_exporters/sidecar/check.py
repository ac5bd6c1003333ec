"""What `vqmon check DIR` tells of a folder of snapshot files; it changes nothing in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from veloxquant_exporters.sidecar.snapshot_files import UnreadableError, read_file
from veloxquant_exporters.sidecar.state import QUIET_INTERVALS, State, judge
from veloxquant_mlx.telemetry.identity import own_namespace
from veloxquant_mlx.telemetry.snapshot_json import SnapshotFile

__all__ = ["CheckedFile", "DirectoryReport", "check_directory", "check_file"]

LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One file: its state and content, or why it cannot be read.

    Attributes:
        name: In the folder.
        state: None if it cannot be read.
        file: Its content, None if it cannot be read.
        fault: Why not: one of `READ_ERRORS`, "" otherwise.
        text: The fault in words.
    """

    name: str
    state: State | None = None
    file: SnapshotFile | None = None
    fault: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """The files of a folder, by name.

    Attributes:
        files: All that are not hidden.
        clashes: Labels that several running processes have.
        fault: Why the folder cannot be read, "" if it can.
    """

    files: tuple[CheckedFile, ...]
    clashes: tuple[str, ...] = ()
    fault: str = ""

    @property
    def ok(self) -> bool:
        """True if all could be read, each process has a name of its own, and none died or hangs."""
        states = {file.state for file in self.files}
        return not self.fault and not self.clashes and states <= {"live", "stopped"}


def check_directory(directory: str | os.PathLike[str], *, watch_s: float = 0.0) -> DirectoryReport:
    """Read every file of `directory` once, and judge the process behind it.

    Args:
        directory: The folder.
        watch_s: Longest time to wait for the sequences of running processes to move. 0 looks once:
            a process whose pid cannot be asked then counts as live.
    """
    names, fault = _names(directory)
    began = time.monotonic()
    files = {name: _check(directory, name, 0.0) for name in names}
    waiting = {name: file for name, file in files.items() if file.state == "live"}
    while waiting and (quiet_s := time.monotonic() - began) < watch_s:
        time.sleep(LOOK_S)
        for name, before in list(waiting.items()):
            files[name], over = _check_again(directory, before, quiet_s)
            if over:
                del waiting[name]
    return DirectoryReport(tuple(files.values()), _clashes(files.values()), fault)


def check_file(path: str | os.PathLike[str]) -> CheckedFile:
    """Read one file, wherever it lies, and judge the process behind it; links are followed."""
    found = Path(path).resolve()
    return _check(found.parent, found.name, 0.0)


def _names(directory: str | os.PathLike[str]) -> tuple[list[str], str]:
    try:
        return sorted(p.name for p in Path(directory).iterdir() if not p.name.startswith(".")), ""
    except OSError as error:
        return [], str(error)


def _check(directory: str | os.PathLike[str], name: str, quiet_s: float) -> CheckedFile:
    try:
        file, _ = read_file(os.fspath(Path(directory) / name))
    except UnreadableError as error:
        return CheckedFile(name, fault=error.reason, text=str(error))
    except FileNotFoundError:
        return CheckedFile(name, fault="io", text="it went while it was checked")
    state = judge(file.header, quiet_s, own_namespace(), float("inf"))
    return CheckedFile(name, state, file)


def _check_again(
    directory: str | os.PathLike[str], before: CheckedFile, quiet_s: float
) -> tuple[CheckedFile, bool]:
    """The file now, and whether enough is known of it."""
    now = _check(directory, before.name, quiet_s)
    assert before.file is not None
    if now.file is None:
        return now, True
    if now.file.header.sequence != before.file.header.sequence:
        return _check(directory, before.name, 0.0), True
    return now, quiet_s > QUIET_INTERVALS * now.file.header.interval_s


def _clashes(files: Iterable[CheckedFile]) -> tuple[str, ...]:
    seen: set[str] = set()
    twice: set[str] = set()
    for checked in files:
        if checked.file is not None and checked.state in ("live", "stale"):
            label = checked.file.header.process
            (twice if label in seen else seen).add(label)
    return tuple(sorted(twice))
