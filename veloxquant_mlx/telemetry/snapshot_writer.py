"""Writing snapshot files: whole or not at all, readable by the group, and none left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Final

from veloxquant_mlx.telemetry.identity import liveness, own_namespace
from veloxquant_mlx.telemetry.snapshot_json import (
    FILE_SUFFIX,
    MAX_HEADER_BYTES,
    SnapshotFormatError,
    parse_header,
)
from veloxquant_mlx.telemetry.worker_slot import FILE_MODE

__all__ = ["WRITE_ERRORS", "file_name", "remove_predecessors", "write_error", "write_whole"]

WRITE_ERRORS: Final = ("disk_full", "directory_gone", "permission_denied", "oversized", "io")
_BY_ERRNO: Final = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EFBIG: "disk_full",
    errno.ENOENT: "directory_gone",
    errno.ENOTDIR: "directory_gone",
    errno.ESTALE: "directory_gone",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
}


def write_error(error: OSError) -> str:
    """Which of `WRITE_ERRORS` it is."""
    return _BY_ERRNO.get(error.errno or 0, "io")


def file_name(process: str, random_id: str) -> str:
    """Name of the file: no two publishers share one, even under the same label."""
    return f"{_safe(process)}.{random_id}{FILE_SUFFIX}"


def _safe(process: str) -> str:
    # Never a dot in front, which would hide the file, nor a name too long for a file system.
    return re.sub(r"[^A-Za-z0-9_-]", "_", process)[:64]


def write_whole(directory: Path, name: str, data: bytes) -> None:
    """Write `data` under a temporary name, then rename: a reader sees all of it or the file before.

    Raises:
        OSError: Nothing is left behind but what was there before.
    """
    temporary = directory / f".{name}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, FILE_MODE)
    try:
        try:
            os.fchmod(fd, FILE_MODE)  # the umask may have taken the group's right to read
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        temporary.replace(directory / name)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove_predecessors(directory: Path, process: str, own_name: str, *, alone: bool) -> None:
    """Remove what earlier processes of this label left, so that files stay few without a sidecar.

    The newest is kept: it may tell why its process died. Failures do not matter.

    Args:
        directory: Where.
        process: The label.
        own_name: This publisher's file.
        alone: No other live process can have the label, as it goes with a lock.
    """
    prefix = f"{_safe(process)}."
    old: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            name = entry.name.removeprefix(".")
            ours = name.removesuffix(".tmp").endswith(FILE_SUFFIX) and name.startswith(prefix)
            if not ours or own_name in name or not entry.is_file(follow_symlinks=False):
                continue
            path = Path(entry.path)
            if alone or _is_over(path):
                whole = not name.endswith(".tmp")
                old.append((entry.stat(follow_symlinks=False).st_mtime if whole else 0.0, path))
    newest = max(old, default=None)
    for item in old:
        if item is not newest or not item[0]:
            with contextlib.suppress(OSError):
                item[1].unlink()


def _is_over(path: Path) -> bool:
    """True if the writer of `path` ended for sure."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            header = parse_header(os.read(fd, MAX_HEADER_BYTES))
        finally:
            os.close(fd)
    except (OSError, SnapshotFormatError):
        return False
    return header.state == "stopped" or liveness(header.identity, own_namespace()) == "gone"
