"""Reading files of a folder that others may write to: nothing in it blocks or is followed."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from veloxquant_mlx.telemetry.snapshot_json import (
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    Header,
    SchemaError,
    SnapshotFile,
    SnapshotFormatError,
    parse_file,
    parse_header,
)

__all__ = ["READ_ERRORS", "Signature", "UnreadableError", "read_file", "read_header", "signature"]

# Why a file could not be read. `invalid`: cut, garbage, or JSON of something else.
READ_ERRORS: Final = (
    "not_a_file",
    "empty",
    "oversized",
    "invalid",
    "version",
    "permission_denied",
    "io",
)

# Two versions of a file differ in it: rename gives a new inode.
Signature = tuple[int, int, int]

_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class UnreadableError(Exception):
    """A file cannot be read; `reason` is one of `READ_ERRORS`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def signature(found: os.stat_result) -> Signature:
    """What changes when the file does."""
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_header(path: str) -> Header:
    """Who wrote the file, from its first line.

    Raises:
        UnreadableError: It is no snapshot file that this version reads.
        FileNotFoundError: It is gone.
    """
    data, _ = _read(path, MAX_HEADER_BYTES)
    try:
        return parse_header(data)
    except SnapshotFormatError as error:
        raise _unreadable(error) from None


def read_file(path: str) -> tuple[SnapshotFile, Signature]:
    """All of the file, with the signature of the version that was read; raises as `read_header`."""
    data, seen = _read(path, MAX_FILE_BYTES)
    try:
        return parse_file(data), seen
    except SnapshotFormatError as error:
        raise _unreadable(error) from None


def read_bytes(path: str) -> bytes:
    """The file as it is; raises as `read_header`."""
    return _read(path, MAX_FILE_BYTES)[0]


def _unreadable(error: SnapshotFormatError) -> UnreadableError:
    return UnreadableError("version" if isinstance(error, SchemaError) else "invalid", str(error))


def _read(path: str, limit: int) -> tuple[bytes, Signature]:
    try:
        fd = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(_open_error(error), str(error)) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError("not_a_file", "neither a file nor a link to one is read here")
        if found.st_size == 0:
            raise UnreadableError("empty", "0 bytes")
        if found.st_size > MAX_FILE_BYTES:
            raise UnreadableError(
                "oversized", f"{found.st_size} bytes, at most {MAX_FILE_BYTES} are read"
            )
        return _up_to(fd, min(limit, found.st_size)), signature(found)
    except OSError as error:
        raise UnreadableError("io", str(error)) from None
    finally:
        os.close(fd)


def _up_to(fd: int, limit: int) -> bytes:
    parts: list[bytes] = []
    while limit > 0 and (part := os.read(fd, limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def _open_error(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "permission_denied"
    # A link (ELOOP), a socket (ENXIO), a device without a driver (ENODEV).
    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV, errno.ENOTDIR):
        return "not_a_file"
    return "io"
