"""Gate: the lock around the books, and what may happen inside a call of the same thread.

A finalizer or a signal handler may run in the middle of any call, with the lock held. Releases that
it asks for are queued, reads are answered, and everything else is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NoReturn

from veloxquant_mlx.core.exceptions import PoolReentryError
from benchmarks.guard.twin.audit import heal
from benchmarks.guard.twin.block import Block, Lease, Owner
from benchmarks.guard.twin.books import Books
from benchmarks.guard.twin.giving import free_and_count, free_batch, release
from benchmarks.guard.twin.pool_config import PoolConfig

__all__ = ["Gate"]


class Gate(Books):
    """Books behind a lock.

    A call that changes more than a few fields is `with self._lock`, `_enter`, and at its end, in a
    `finally` and as bare stores (a call there could be interrupted)::

        self._busy = False
        self._gate = self._deferred
    """

    __slots__ = (
        "_busy",  # a call of the thread that has the lock is under way
        "_deferred",  # releases to do at the next call
        "_gate",  # true when busy or something is queued: keeps the hot path to one test
        "_lock",
    )

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        # Reentrant, so that a finalizer or signal handler inside a call finds `_busy` set instead
        # of hanging; it costs no more than a plain lock.
        self._lock = threading.RLock()
        self._busy = False
        self._deferred: deque[tuple[Owner | None, list[Block], tuple[Lease, ...] | None]] = deque()
        # The queue itself, which is true when something is in it, or True during a call.
        self._gate: object = self._deferred

    def _enter(self) -> None:
        """Begin a call, the lock being held: refuse reentry, then do what was queued."""
        if self._busy:
            self._refuse_reentry()
        self._busy = self._gate = True
        try:
            self._now = self._clock()
            if self._deferred:
                self._drain()
        except BaseException:
            self._busy = False
            self._gate = self._deferred
            raise

    def _refuse_reentry(self) -> NoReturn:
        raise PoolReentryError(
            "this thread is inside a call of this pool (a finalizer or signal handler is calling); "
            "only free, free_all, free_held_later and reads are allowed here"
        )

    def _defer(
        self, owner: Owner | None, batch: list[Block], leases: tuple[Lease, ...] | None
    ) -> None:
        """Queue a release for the next call. Takes no lock."""
        self._deferred.append((owner, batch, leases))

    def _settle(self) -> None:
        """Do what was queued, unless a call is under way; the next one does it then."""
        if self._deferred and not self._busy:
            with self._lock:
                if not self._busy:
                    self._enter()
                    self._busy = False
                    self._gate = self._deferred

    def _drain(self) -> None:
        """Do the queued releases; the lock is held and `_busy` set."""
        queue = self._deferred
        while queue:
            # Off the queue only when done: an interrupt repeats a release, which is harmless.
            owner, batch, leases = queue[0]
            if leases is not None:
                free_batch(self, batch, None, leases)
            elif batch:
                free_and_count(self, batch, owner)
            elif owner is not None:
                release(self, owner)
            del queue[0]

    def _after_fork(self) -> None:
        """In the child: a thread that was inside a call, and held the lock, does not exist here."""
        if self._lock.acquire(blocking=False):
            self._lock.release()  # free, or the forking thread's own: its call goes on here too
            return
        self._lock = threading.RLock()
        self._busy = False
        self._gate = self._deferred
        heal(self)
