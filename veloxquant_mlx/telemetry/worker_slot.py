"""Worker slot: the lowest number that no live process of a directory holds, so that labels are few.

The kernel keeps the lock for as long as the process lives, whatever its end, and across containers
of one machine that share the directory.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from pathlib import Path
from typing import Final

__all__ = ["WorkerSlot", "make_directory"]

DIRECTORY_MODE: Final = 0o750
FILE_MODE: Final = 0o640
MAX_SLOTS: Final = 4096
_TAKEN: Final = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)


def make_directory(directory: Path) -> None:
    """Make `directory`, and what is above it, if it is missing; mode 0750 whatever the umask.

    One that exists keeps its mode: it may be set so that others can read.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        return
    directory.chmod(DIRECTORY_MODE)


class WorkerSlot:
    """Holds a slot of `directory` from construction to `release`.

    Args:
        directory: Must exist.
        preferred: The number to try first, to keep a label.

    Raises:
        OSError: The directory cannot be used, or its file system knows no locks.
    """

    __slots__ = ("_fd", "_path", "number")

    def __init__(self, directory: Path, preferred: int | None = None) -> None:
        numbers = itertools.chain([] if preferred is None else [preferred], range(MAX_SLOTS))
        for number in numbers:
            path = directory / f".worker-{number}.lock"
            fd = _lock(path)
            if fd is not None:
                self._fd, self._path, self.number = fd, path, number
                return
        raise OSError(errno.EMFILE, f"all {MAX_SLOTS} worker slots are held", str(directory))

    @property
    def label(self) -> str:
        """As in worker-0."""
        return f"worker-{self.number}"

    @property
    def lost(self) -> bool:
        """True once the lock file is another one: others do not see this lock any more."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            return True

    def release(self) -> None:
        """Give the slot back. In a forked child: only let go of it, the parent keeps it."""
        os.close(self._fd)


def _lock(path: Path) -> int | None:
    """A locked descriptor of `path`, or None if another process holds the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, FILE_MODE)
    except PermissionError:
        if path.exists():
            return None  # another user's slot
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in _TAKEN:
            return None
        raise
    os.fchmod(fd, FILE_MODE)
    return fd
