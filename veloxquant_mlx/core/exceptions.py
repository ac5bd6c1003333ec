"""Errors of the block pool and of everything built on it.

::

    PoolError                          every error below; catch this to catch them all
    |-- BlockPoolExhaustedError        no free block and no room to grow   (a RuntimeError)
    |-- OwnerAlreadyActiveError        the owner id is in use already      (a ValueError)
    `-- PoolReentryError               a call from inside a pool call      (a RuntimeError)

    ArgumentTypeError                  an argument of a wrong type (a TypeError and a ValueError)

``ArgumentTypeError`` stands apart on purpose: a wrong type is a mistake in the calling code, not a
state of the pool, and ``except PoolError`` around a request must not hide it.

All of them can be pickled and copied with their attributes.
"""

from __future__ import annotations

__all__ = [
    "ArgumentTypeError",
    "BlockPoolExhaustedError",
    "OwnerAlreadyActiveError",
    "PoolError",
    "PoolReentryError",
]


class PoolError(Exception):
    """Base of the errors that a pool, a storage or a pooled cache raises about its own state."""


class BlockPoolExhaustedError(PoolError, RuntimeError):
    """Too few free blocks, and the pool may not grow enough; nothing was allocated.

    The attributes say what was asked for, for handlers that queue or evict instead of reading the
    message. Each is ``None`` where the raiser did not tell.

    Attributes:
        stream: The stream that fell short: ``"k"``, ``"v"`` or ``"kv"``.
        requested: Blocks asked for.
        free: Blocks that were free at that moment.
        owner: The owner that asked.
        reason: A short constant for the cause, such as a reached limit or a failed growth.
        summary: The pool at that moment, a few lines of text that also end the message: free blocks
            and fill by stream, who holds most among the oldest owners, and the last calls.
    """

    stream: str | None
    requested: int | None
    free: int | None
    owner: int | str | None
    reason: str | None

    def __init__(
        self,
        *args: object,
        stream: str | None = None,
        requested: int | None = None,
        free: int | None = None,
        owner: int | str | None = None,
        reason: str | None = None,
        summary: object = None,
    ) -> None:
        """Take the message, and what is known about the refused request."""
        super().__init__(*args)
        self.stream = stream
        self.requested = requested
        self.free = free
        self.owner = owner
        self.reason = reason
        self._summary = summary

    @property
    def summary(self) -> str | None:
        """The pool at that moment, as text."""
        return None if self._summary is None else str(self._summary)

    def __str__(self) -> str:
        line = super().__str__()
        return line if self._summary is None else f"{line}\n{self._summary}"


class OwnerAlreadyActiveError(PoolError, ValueError):
    """An owner id was registered while it is registered or holds blocks; nothing was changed."""


class PoolReentryError(PoolError, RuntimeError):
    """A thread called the pool from inside one of its own pool calls; nothing was changed.

    The pool's lock is not reentrant: raising is what stands between such a call and a deadlock.
    """


class ArgumentTypeError(TypeError, ValueError):
    """An argument has a type that the call does not take; nothing was changed.

    It is both a ``TypeError`` and a ``ValueError``, so that code written against either is served.
    """
