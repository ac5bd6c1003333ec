"""BufferTable: which block id has which buffer, under one lock. Needs no MLX."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from veloxquant_mlx.core.exceptions import PoolReentryError
from veloxquant_mlx.memory.storage_books import SETTLE_ASKED, Buffer, StorageBooks, StorageUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from veloxquant_mlx.memory.block import Block, Lease
    from veloxquant_mlx.memory.storage_format import StorageFormat

__all__ = ["BufferTable", "holds"]

# How long counts and drops wait for a change of another thread, which takes microseconds.
PATIENCE_S: Final = 0.05

_T = TypeVar("_T")


class BufferTable:
    """The buffers of one storage, their byte counts, and the lock around both.

    `current`, `install` and `note_write` belong into a change passed to `locked`; everything else
    may be called by any thread at any time. The pool is never called under the lock.

    Args:
        block_size: Rows of a buffer.
        head_dim: Elements of a row.
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_busy",
        "_dropping",
        "_last_usage",
        "_lock",
        "_n_pending",
        "_orphans",
        "_pending",
        "_row_elements",
        "books",
    )

    def __init__(self, block_size: int, head_dim: int) -> None:
        # Reentrant, with a flag beside it: a signal handler that finds the flag set knows that it
        # interrupted a change, where a plain lock would leave it waiting for itself.
        self._lock = threading.RLock()
        self._busy = False
        self._row_elements = block_size * head_dim
        self._buffers: dict[int, Buffer] = {}
        self._pending: dict[int, Buffer] = {}  # written since they were last evaluated
        self._n_pending = 0
        # Ids whose buffer must go; with a lease, unless the block has come to a new holder.
        self._dropping: deque[tuple[int, Lease | None]] = deque()
        self._orphans: deque[tuple[weakref.ref[Any], int]] = deque()
        self.books = StorageBooks(head_dim)
        self._last_usage = self._take_usage()
        _tables.add(self)

    def locked(self, change: Callable[[], _T]) -> _T:
        """Run `change` under the lock.

        Raises:
            PoolReentryError: This thread is inside a change already.
        """
        with self._lock:
            if self._busy:
                raise PoolReentryError(
                    "this thread is inside a call on the same storage; a signal handler may call "
                    "resident_bytes, usage and release, and must leave the rest for later"
                )
            done = self._run(change)
            self._drop_queued()
        return done

    def peek(self, block_id: int) -> Buffer | None:
        """The buffer of this id, whoever made it."""
        return self._buffers.get(block_id)

    def current(self, block: Block, lease: Lease) -> Buffer | None:
        """The buffer of a block, if it was made under this lease."""
        buffer = self._buffers.get(block.block_id)
        if buffer is None or buffer.lease is not lease:
            return None
        self.books.enter(buffer)
        return buffer

    def install(self, block: Block, lease: Lease, spec: StorageFormat, array: Any) -> Buffer:
        """Make `array` the buffer of a block, in the place of what it had."""
        buffer = Buffer(block, lease, spec, array, self._row_elements * spec.itemsize)
        self.books.swap(self._buffers.get(block.block_id), buffer)
        self._buffers[block.block_id] = buffer
        self._pending.pop(block.block_id, None)
        return buffer

    def note_write(self, buffer: Buffer, end: int) -> None:
        """Rows up to `end` were written, lazily."""
        self.books.note_rows(buffer, end)
        self._pending[buffer.block.block_id] = buffer
        self._n_pending += 1

    def evaluate(self, evaluate: Callable[[list[Any]], object]) -> None:
        """Pass the arrays written since the last call to `evaluate`, without the lock."""
        pending, n_writes = self.locked(self._take_pending)
        try:
            evaluate([buffer.array for buffer in pending.values()])
        except BaseException:
            self.locked(lambda: self._put_back(pending, n_writes))
            raise
        self.locked(lambda: self._note_evaluated(pending.values()))

    def release(self, block: Block) -> None:
        """Drop the buffer of a block, unless it has come to a new holder when its turn is."""
        self._drop([(block.block_id, block.lease)])

    def retire(self, block_ids: Iterable[int]) -> None:
        """Drop the buffers of ids that no block will have again."""
        self._drop([(block_id, None) for block_id in block_ids])

    def retired_bytes(self) -> int:
        """Bytes of retired arrays that someone outside still refers to."""
        return sum([nbytes for array, nbytes in list(self._orphans) if array() is not None])

    def fp16_equivalent_bytes(self) -> int:
        """Bytes that the buffers would take if all were fp16."""
        return self.books.n_buffers * self._row_elements * 2

    def usage(self) -> StorageUsage:
        """All counts at one moment; the last ones taken, where the lock cannot be had soon."""
        self._soon(self._refresh_usage)
        return self._last_usage

    # -- under the lock -------------------------------------------------------------------------

    def _run(self, change: Callable[[], _T]) -> _T:
        try:
            self._busy = True
            return change()
        except BaseException:
            # Refusals are decided before a change begins, so this is an interrupt or MLX.
            self.books.recount(self._buffers.values())
            raise
        finally:
            self._busy = False

    def _drop(self, entries: Iterable[tuple[int, Lease | None]]) -> None:
        self._dropping.extend(entries)
        # Where that is not possible now, the change that has the lock does it when it is done.
        self._soon(self._drop_queued)

    def _soon(self, change: Callable[[], object]) -> None:
        """Run `change` under the lock, unless that would mean to wait for long or for itself.

        A collector may hold the pool's lock here, and a finalizer wait for it inside a change of
        another thread: the one wait that ends by itself is this.
        """
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]
            if not self._busy:
                change()
            return
        try:
            if lock.acquire(timeout=PATIENCE_S):
                change()
        finally:
            # Not by what `acquire` returned, which an interrupt just after it would lose.
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()

    def _drop_queued(self) -> None:
        while self._dropping:
            self._run(self._drop_next)

    def _drop_next(self) -> None:
        if not self._dropping:
            return  # a signal handler was faster
        block_id, lease = self._dropping[0]
        buffer = self._buffers.get(block_id)
        if buffer is not None and (
            lease is None or buffer.lease is lease or not holds(buffer.block, buffer.lease)
        ):
            self.books.swap(buffer, None)
            del self._buffers[block_id]
            self._pending.pop(block_id, None)
            if lease is None:
                self._watch_orphan(buffer)
        # Off the queue only when done: an interrupt repeats a drop, which is harmless.
        self._dropping.popleft()

    def _watch_orphan(self, buffer: Buffer) -> None:
        # Without a callback, which an interrupt could swallow: the dead are sorted out in passing.
        orphans = self._orphans
        orphans.append((weakref.ref(buffer.array), buffer.nbytes))
        for _ in range(min(2, len(orphans))):
            orphan = orphans.popleft()
            if orphan[0]() is not None:
                orphans.append(orphan)

    def _take_pending(self) -> tuple[dict[int, Buffer], int]:
        taken = self._pending, self._n_pending
        self._pending, self._n_pending = {}, 0
        return taken

    def _put_back(self, pending: dict[int, Buffer], n_writes: int) -> None:
        kept = {key: buffer for key, buffer in pending.items() if self._buffers.get(key) is buffer}
        self._pending = {**kept, **self._pending}
        self._n_pending += n_writes

    def _note_evaluated(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            if self._buffers.get(buffer.block.block_id) is buffer:
                self.books.note_evaluated(buffer)

    def _refresh_usage(self) -> None:
        self._drop_queued()
        self._last_usage = self._run(self._take_usage)

    def _take_usage(self) -> StorageUsage:
        books = self.books
        books.settle(SETTLE_ASKED)
        return StorageUsage(
            n_buffers=books.n_buffers,
            resident_bytes=books.resident,
            written_bytes=books.written,
            evaluated_bytes=books.evaluated,
            in_use_bytes=books.in_use,
            free_cached_bytes=books.resident - books.in_use,
            retired_bytes=self.retired_bytes(),
            logical_bytes=-(-books.logical_bits // 8),
            fp16_equivalent_bytes=self.fp16_equivalent_bytes(),
            pending_writes=self._n_pending,
            bytes_by_format=MappingProxyType(dict(books.by_format)),
        )

    def _after_fork(self) -> None:
        """In the child: the thread that had the lock, if any, does not exist here."""
        self._lock = threading.RLock()
        if self._busy:
            self._busy = False
            self.books.recount(self._buffers.values())


def holds(block: Block, lease: Lease) -> bool:
    """Whether `lease` is the holding that a block belongs to now."""
    return block.lease is lease and lease.live


_tables: weakref.WeakSet[BufferTable] = weakref.WeakSet()


def _release_locks_after_fork() -> None:
    for table in list(_tables):
        table._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_locks_after_fork)
