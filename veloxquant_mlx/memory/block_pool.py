"""BlockPoolAllocator: a thread-safe pool of fixed-size blocks for KV caches.

The pool keeps ownership and counters and holds no array: pair it with `MLXBlockStorage` for
buffers, or with `PooledKVCache` / `PoolBackedKVCache` for caches.

The layers below, each in its file: `hot_path` (allocate, free_all, mark_used), `gate` (the lock, and
what may happen inside a call), `taking` and `giving` (the changes), `books`, `stream` and `lease`
(the state). This file is the rest of the public surface. `docs/allocator.md` draws it.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
)
from veloxquant_mlx.memory.allocation_stats import AllocationStats, LiveStats
from veloxquant_mlx.memory.block import Block, Lease, Owner
from veloxquant_mlx.memory.checks import (
    check_blocks,
    check_format,
    check_owner,
    check_tokens,
    wrong_stream,
)
from veloxquant_mlx.memory.giving import free_and_count, free_batch, retire
from veloxquant_mlx.memory.hot_path import FP16, HotPath
from veloxquant_mlx.memory.journal import ALLOCATE, history, thaw
from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.memory.stream import Stream
from veloxquant_mlx.memory.taking import make_room, take

# The two errors as well: code for the package of the same API imports them from here too.
__all__ = [
    "FP16",
    "AllocationStats",
    "Block",
    "BlockPoolAllocator",
    "BlockPoolExhaustedError",
    "OwnerAlreadyActiveError",
    "PoolConfig",
    "RetireListener",
]

_log = logging.getLogger("veloxquant_mlx.memory")
_anonymous = itertools.count(1)


class RetireListener(Protocol):
    """Who wants to know which ids `shrink` retired, e.g. a storage that drops their buffers."""

    def drop_retired(self, block_ids: list[int]) -> None:
        """Called after `shrink`, without the pool's lock."""


class BlockPoolAllocator(HotPath):
    """Hands out fixed-size blocks per owner and stream, and takes them back.

    Freed blocks are reused last in, first out, before blocks never handed out. `free_all` takes
    constant time, whatever the owner holds.

    Every method may be called from any thread. A finalizer or signal handler may call it too:
    inside a call of the same thread, releases are queued until that call ends, reads answer, and
    everything else raises `PoolReentryError`. After a fork the child has the pool as it was.

    Args:
        config: Size and behaviour; `PoolConfig()` if None.

    Example::

        pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=256))
        blocks = pool.allocate(stream="k", n_tokens=40, owner=request_id, format="int2")
        ...
        pool.free_all(owner=request_id)
    """

    __slots__ = ("__weakref__", "_listeners", "_stats_view")

    def __init__(self, config: PoolConfig | None = None) -> None:
        if config is None:
            config = PoolConfig()
        if not isinstance(config, PoolConfig):
            raise ArgumentTypeError(f"config must be a PoolConfig or None, got {config!r}")
        super().__init__(config)
        self._listeners: weakref.WeakSet[RetireListener] = weakref.WeakSet()
        self._stats_view: weakref.ref[LiveStats] | None = None
        _pools.add(self)
        for observe in _observers:
            observe(self)

    # -- what callers read ----------------------------------------------------------------------

    @property
    def config(self) -> PoolConfig:
        """The settings given at construction."""
        return self._config

    @property
    def stats(self) -> AllocationStats:
        """The live counters: one object as long as it is held; `snapshot()` freezes it."""
        self._settle()
        view = self._stats_view() if self._stats_view is not None else None
        if view is None:
            # Held weakly, since the view holds the pool.
            view = LiveStats(self)
            self._stats_view = weakref.ref(view)
        return view

    @property
    def history(self) -> deque[AllocationStats]:
        """The newest 256 states, oldest first: one a call that changed something or failed."""
        with self._lock:
            self._settle()
            return history(self._journal)

    @property
    def rejected(self) -> dict[str, int]:
        """Blocks refused so far, by reason: free, repeated, copied, foreign, retired, stale."""
        return dict(self._incidents.rejected)

    def n_free(self, stream: str = "k") -> int:
        """Free blocks of `stream`.

        Takes no lock, so that a signal handler may ask.

        Raises:
            ValueError: The pool has no such stream.
        """
        found = self._stream(stream)
        self._settle()
        return found.n_free

    def blocks_for(self, owner: Owner) -> list[Block]:
        """The blocks that `owner` holds, in the order of allocation; linear in their number.

        Raises:
            ArgumentTypeError: `owner` is neither an int nor a str.
        """
        owner = check_owner(owner)
        with self._lock:
            if self._busy:
                return self._held(owner)
            self._enter()
            try:
                return self._held(owner)
            finally:
                self._busy = False
                self._gate = self._deferred

    def refusal(self, block: Block, *, owner: Owner | None = None) -> str | None:
        """Why the books refuse `block` (counted), or None when it is held, by `owner` if given.

        Returns:
            None, "free", "copied", "foreign", "retired", or "stale" (held by another owner).
        """
        if owner is not None:
            owner = check_owner(owner)
        reason = self._reason(block, owner)
        if reason is not None:
            self._incidents.refuse([reason])
        return reason

    # -- owners ---------------------------------------------------------------------------------

    def register_owner(self, owner: Owner) -> None:
        """Claim `owner` before its first allocation, until `release_owner` or `free_all`.

        Raises:
            OwnerAlreadyActiveError: `owner` is registered or holds blocks.
            ArgumentTypeError: `owner` is neither an int nor a str.
        """
        owner = check_owner(owner)
        with self._lock:
            self._enter()
            try:
                if owner in self._owners or owner in self._waiting:
                    self._incidents.collisions += 1
                    held = self._n_held(owner)
                    raise OwnerAlreadyActiveError(
                        f"owner {owner!r} is active already and holds {held} blocks; "
                        "release it with free_all(), or use another id"
                    )
                self._waiting[owner] = None
            finally:
                self._busy = False
                self._gate = self._deferred

    def release_owner(self, owner: Owner) -> None:
        """End the registration of `owner`. Blocks stay with it, and keep it active.

        Raises:
            ArgumentTypeError: `owner` is neither an int nor a str.
        """
        owner = check_owner(owner)
        with self._lock:
            self._enter()
            try:
                if owner in self._waiting:
                    del self._waiting[owner]
                elif owner in self._explicit:
                    del self._explicit[owner]
            finally:
                self._busy = False
                self._gate = self._deferred

    def mark_cached(self, owner: Owner, *, cached: bool = True) -> bool:
        """Say that a prompt cache keeps the blocks of `owner` on purpose, and may evict them.

        Telemetry counts them as cached, and neither as a leak nor by their age. The mark ends with
        the owner's last block.

        Args:
            owner: Who holds the blocks.
            cached: False takes the mark off, e.g. when a request goes on with them.

        Returns:
            Whether the owner is (was) marked: False for one that holds nothing.

        Raises:
            ArgumentTypeError: `owner` is neither an int nor a str.
            PoolReentryError: Called from inside a call of this pool.
        """
        owner = check_owner(owner)
        with self._lock:
            self._enter()
            try:
                return self._cached.mark(owner) if cached else self._cached.unmark(owner)
            finally:
                self._busy = False
                self._gate = self._deferred

    def fresh_owner(self) -> str:
        """An owner id that nobody in this process was given before."""
        while True:
            owner = f"anon-{next(_anonymous)}"
            if owner not in self._owners and owner not in self._waiting:
                return owner

    # -- taking ---------------------------------------------------------------------------------

    def allocate_kv(
        self, n_tokens: int, owner: Owner, format: str = FP16, *, n_filled: int | None = None
    ) -> tuple[list[Block], list[Block]]:
        """Hand out blocks for `n_tokens` keys and as many values: both or neither, in one lock.

        Args:
            n_tokens: Token slots a stream, an int >= 1.
            owner: Who holds them.
            format: Tag of what will be stored.
            n_filled: Slots a stream that hold tokens already, 0..n_tokens; None means all.

        Returns:
            Blocks for keys and for values; in a unified pool both come from "kv".

        Raises:
            BlockPoolExhaustedError: Too few free blocks in either stream, and no room to grow.
            ValueError: A bad `n_tokens`, `n_filled` or format.
            ArgumentTypeError: A wrong type.
            PoolReentryError: Called from inside a call of this pool.
        """
        n_tokens = check_tokens(n_tokens)
        owner = check_owner(owner)
        format = check_format(format)
        if n_filled is None:
            n_filled = n_tokens
        elif type(n_filled) is not int or not 0 <= n_filled <= n_tokens:
            raise ValueError(f"n_filled must be an int in 0..{n_tokens}, got {n_filled!r}")
        streams = (self._streams[0], self._streams[-1])
        with self._lock:
            self._enter()
            try:
                make_room(self, streams, n_tokens, owner)
                keys = take(self, streams[0], n_tokens, owner, format, n_filled)
                try:
                    values = take(self, streams[-1], n_tokens, owner, format, n_filled)
                except BaseException:
                    free_batch(self, keys, owner, None)
                    raise
                parts = ((keys[0]._lease, len(keys), None), (values[0]._lease, len(values), None))
                self._rare(self._entry(ALLOCATE, parts, len(keys) + len(values), n_tokens))
                return keys, values
            finally:
                self._busy = False
                self._gate = self._deferred

    # -- giving back ----------------------------------------------------------------------------

    def free(self, blocks: Iterable[Block], *, owner: Owner | None = None) -> None:
        """Give back `blocks`; linear in their number, whatever their order.

        A block that this pool does not hold out (free, repeated, copied, foreign, retired; with
        `owner`, held by another: stale) is skipped, counted in `rejected`, and logged at most once
        a minute; the rest are freed. Without `owner` a handle acts on its block's present holder.

        Raises:
            ArgumentTypeError: Not an iterable of Block; nothing is freed.
        """
        batch = check_blocks(blocks)
        if owner is not None:
            owner = check_owner(owner)
        with self._lock:
            if self._busy:
                self._defer(owner, batch, None)
                return
            self._enter()
            try:
                free_and_count(self, batch, owner)
            finally:
                self._busy = False
                self._gate = self._deferred
        self._incidents.report()

    def free_held(self, blocks: Iterable[Block], *leases: Lease) -> int:
        """Free those of `blocks` that are still held under one of `leases`; ignore the others.

        For a holder that may have been released behind its back. Linear in the blocks.

        Returns:
            The number freed.

        Raises:
            ArgumentTypeError: Not an iterable of Block.
            PoolReentryError: Called from inside a call of this pool.
        """
        batch = check_blocks(blocks)
        with self._lock:
            self._enter()
            try:
                return len(batch) - len(free_batch(self, batch, None, leases))
            finally:
                self._busy = False
                self._gate = self._deferred

    def free_held_later(self, blocks: Iterable[Block], *leases: Lease) -> None:
        """`free_held` at the next call on the pool. Never takes the lock: made for finalizers."""
        self._defer(None, check_blocks(blocks), leases)

    def shrink(self, stream: str, target_free: int) -> int:
        """Retire free blocks of `stream` for good until `target_free` are left.

        Never touches blocks in use. The coldest go first: those never handed out, then those free
        the longest. Storages drop the buffers of retired ids.

        Returns:
            The number retired.

        Raises:
            ValueError: A bad stream, or `target_free` < 0.
            ArgumentTypeError: `target_free` is not an int.
            PoolReentryError: Called from inside a call of this pool.
        """
        found = self._stream(stream)
        if type(target_free) is not int:
            raise ArgumentTypeError(f"target_free must be an int >= 0, got {target_free!r}")
        if target_free < 0:
            raise ValueError(f"target_free must be >= 0, got {target_free}")
        ids: list[int] = []
        try:
            with self._lock:
                self._enter()
                try:
                    if found.n_free > target_free:
                        retire(self, found, found.n_free - target_free, ids)
                finally:
                    self._busy = False
                    self._gate = self._deferred
        finally:
            # Without the lock: a storage takes its own, and may call the pool.
            if ids:
                self._tell_retired(ids)
        return len(ids)

    def _tell_retired(self, ids: list[int]) -> None:
        for listener in list(self._listeners):
            # The ids are gone whatever one listener makes of that, and the others hold buffers.
            try:
                listener.drop_retired(list(ids))
            except Exception:  # noqa: BLE001 - a storage's fault is not the caller's
                _log.exception("a retire listener failed; its buffers of %d ids may stay", len(ids))

    def add_retire_listener(self, listener: RetireListener) -> None:
        """Call `listener.drop_retired(block_ids)` after each `shrink`; held weakly.

        What it raises is logged: the blocks are retired by then.
        """
        self._listeners.add(listener)

    # -- fill -----------------------------------------------------------------------------------

    def add_filled(self, n_tokens: int, *leases: Lease) -> None:
        """Add `n_tokens` (negative: subtract) to the token fill of each of `leases`.

        Fill stays within 0..capacity; a dead lease is ignored. For holders that fill slots without
        `mark_used`, such as a cache that grows by many blocks and stores a token at a time.

        Raises:
            ArgumentTypeError: `n_tokens` is not an int.
        """
        if type(n_tokens) is not int:
            raise ArgumentTypeError(f"n_tokens must be an int, got {n_tokens!r}")
        size = self._block_size
        with self._lock:
            if self._busy:
                self._refuse_reentry()
            for lease in leases:
                most = len(lease._blocks) * size
                if lease._at is not self._home:
                    continue
                slack = lease._slack - n_tokens
                slack = 0 if slack < 0 else most if slack > most else slack
                # commit
                lease._stream.slack += slack - lease._slack
                lease._slack = slack

    # -- inside ---------------------------------------------------------------------------------

    def _stream(self, name: str) -> Stream:
        try:
            return self._stream_of[name]
        except (KeyError, TypeError):
            raise wrong_stream(name, self._stream_of) from None

    def _frozen_stats(self) -> AllocationStats:
        with self._lock:
            self._settle()
            _, born, partial, peak, era = self._counts
            # From the lists, for a reader in the middle of a long release: `free` moves block by
            # block and counts at its end.
            in_use = 0
            for stream in self._streams:
                in_use += stream.managed - stream.n_free
            counts = (self._taken - in_use, born, partial, peak, era)
            return thaw(self._clock(), self._taken, counts)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a BlockPoolAllocator cannot be copied or pickled: it hands out one object a block. "
            "Share the pool itself, or make another from its config"
        )

    def __repr__(self) -> str:
        free = ", ".join(f"{stream.name} {stream.n_free} free" for stream in self._streams)
        return (
            f"<BlockPoolAllocator {self._n_in_use()} of {self._counts[4].n_blocks} blocks in "
            f"use, {free}, {len(self._owners)} owners>"
        )


_pools: weakref.WeakSet[BlockPoolAllocator] = weakref.WeakSet()
# Called with each pool made; `veloxquant_mlx.telemetry.instrument_all` adds itself here.
_observers: list[Callable[[BlockPoolAllocator], None]] = []


def _mend_after_fork() -> None:
    for pool in list(_pools):
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mend_after_fork)
