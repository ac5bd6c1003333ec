"""Writer: frames onto a file, each whole and by one write, so that a kill cuts between or within one."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veloxquant_mlx.telemetry.trace.libraries import load_library
from veloxquant_mlx.telemetry.trace.schema import CHUNK, END, FRAME, HEADER, MAGIC, VERSION

__all__ = ["TraceWriter", "refuse_special"]

LEVEL = 3


def refuse_special(path: Path) -> None:
    """Raise if something is there that must not be replaced by a file, such as `/dev/null`.

    Raises:
        OSError: It is a folder, a device, a pipe or a socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise OSError(errno.EINVAL, "not a file, and not to be replaced by one", str(path))


class TraceWriter:
    """Writes one trace file. Not thread-safe.

    Args:
        path: Made anew with mode 0600; a file or a link that was there is replaced.
        header: The map of the header frame.

    Raises:
        OSError: The file cannot be made or written, or something is there that is no file.
        ImportError: The extra `trace` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self._pack = load_library("msgpack").packb
        self._compress = load_library("zstandard").ZstdCompressor(level=LEVEL).compress
        self.path = Path(path)
        refuse_special(self.path)
        # Not into what was there: a link would lead the writing elsewhere, a reader may have it open.
        self.path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._fd: int | None = os.open(self.path, flags, 0o600)
        self.n_bytes = 0
        try:
            self._write(MAGIC + bytes([VERSION]) + self._frame(HEADER, header))
        except BaseException:
            self.abandon()
            raise

    def chunk(self, content: Mapping[str, Any]) -> None:
        """Append a chunk.

        Raises:
            OSError: The disk is full, or worse. What was written before stays readable.
        """
        self._write(self._frame(CHUNK, content))

    def end(self, content: Mapping[str, Any]) -> None:
        """Write the end and close."""
        if self._fd is not None:
            self._write(self._frame(END, content))
        self.abandon()

    def abandon(self) -> None:
        """Close without an end; the file is readable up to here. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _frame(self, kind: bytes, content: Mapping[str, Any]) -> bytes:
        data: bytes = self._compress(self._pack(content))
        head: bytes = FRAME.pack(len(data), zlib.crc32(data, zlib.crc32(kind)), kind)
        return head + data

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            raise OSError(f"{self.path} was closed")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except BaseException:
            # Half a frame in the middle would hide all that is written once there is room again.
            os.ftruncate(self._fd, self.n_bytes)
            os.lseek(self._fd, self.n_bytes, os.SEEK_SET)
            raise
        self.n_bytes += len(data)
