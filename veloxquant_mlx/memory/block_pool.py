"""BlockPoolAllocator: a thread-safe pool of fixed-size blocks for KV caches.

The pool keeps ownership and counters and holds no array: pair it with `MLXBlockStorage` for
buffers, or with `PooledKVCache` / `PoolBackedKVCache` for caches. This file is the public surface:
arguments, lock, errors. The moves are in `books`, the free lists in `stream`.

One-block allocation and the release of an owner are the hot path, and the only code here that is
written for speed; `docs/allocator.md` has its measurements.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    OwnerAlreadyActiveError,
    PoolReentryError,
)
from veloxquant_mlx.memory.allocation_stats import AllocationStats, LiveStats
from veloxquant_mlx.memory.block import Block, Lease, Owner, detached_reason, shown_lease
from veloxquant_mlx.memory.audit import heal
from veloxquant_mlx.memory.books import NOTHING, Books
from veloxquant_mlx.memory.checks import (
    check_blocks,
    check_format,
    check_owner,
    check_tokens,
    wrong_stream,
)
from veloxquant_mlx.memory.incidents import Incidents
from veloxquant_mlx.memory.journal import ALLOCATE, EXHAUSTED, FREE, history, thaw
from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.memory.stream import MERGED_REGION, Stream

__all__ = ["AllocationStats", "Block", "BlockPoolAllocator", "PoolConfig"]

FP16 = "fp16"  # the default format, compared by identity on the hot path

_anonymous = itertools.count(1)
_new_lease: Callable[[type[Lease]], Lease] = object.__new__


class RetireListener(Protocol):
    """Who wants to know which ids `shrink` retired, e.g. a storage that drops their buffers."""

    def drop_retired(self, block_ids: list[int]) -> None:
        """Called after `shrink`, without the pool's lock."""


class BlockPoolAllocator(Books):
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

    __slots__ = (
        "__weakref__",
        "_busy",  # a call of the thread that has the lock is under way
        "_config",
        "_deferred",
        "_gate",  # busy, or something is queued: keeps the hot path to one test
        "_incidents",
        "_listeners",
        "_lock",
        "_stats_view",
        "_stream_of",
    )

    def __init__(self, config: PoolConfig | None = None) -> None:
        if config is None:
            config = PoolConfig()
        if not isinstance(config, PoolConfig):
            raise ArgumentTypeError(f"config must be a PoolConfig or None, got {config!r}")
        super().__init__(config)
        self._config = config
        if config.separate_kv:
            self._stream_of = {stream.name: stream for stream in self._streams}
        else:
            self._stream_of = dict.fromkeys(("k", "v", "kv"), self._streams[0])
        # Reentrant, so that a finalizer or signal handler inside a call finds `_busy` set instead
        # of hanging; `with` costs the same on both kinds of lock (150 ns, CPython 3.11).
        self._lock = threading.RLock()
        self._busy = False
        self._gate = False
        self._deferred: deque[tuple[Owner | None, list[Block], tuple[Lease, ...] | None]] = deque()
        self._incidents = Incidents([stream.name for stream in self._streams])
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
            return history(list(self._journal))

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
                self._gate = True if self._deferred else False

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
                self._gate = True if self._deferred else False

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
                self._gate = True if self._deferred else False

    def fresh_owner(self) -> str:
        """An owner id that nobody in this process was given before."""
        while True:
            owner = f"anon-{next(_anonymous)}"
            if owner not in self._owners and owner not in self._waiting:
                return owner

    # -- taking ---------------------------------------------------------------------------------

    def allocate(
        self, stream: str, n_tokens: int, owner: Owner, format: str = FP16
    ) -> list[Block]:
        """Hand out enough blocks for `n_tokens` slots, all or none.

        Args:
            stream: "k" or "v"; in a unified pool also "kv", all three meaning the same.
            n_tokens: Token slots, an int >= 1. Every block but the last is marked full.
            owner: Who holds them, an int or a str. An active owner grows.
            format: Tag of what will be stored, 1 to 64 characters.

        Returns:
            The blocks in the order of their use.

        Raises:
            BlockPoolExhaustedError: Too few free blocks, and no room to grow.
            ValueError: A bad stream, `n_tokens` or format.
            ArgumentTypeError: A wrong type.
            PoolReentryError: Called from inside a call of this pool.
        """
        try:
            found = self._stream_of[stream]
        except (KeyError, TypeError):
            raise wrong_stream(stream, self._stream_of) from None
        size = self._block_size
        try:
            with self._lock:
                # One block of a plain owner is every decode step, so it is written out twice: for
                # an owner that grows and for a new one. From the look-up of the owner to the
                # append, calls and tracked allocations stand before the first change: neither a
                # signal handler nor a finalizer gets in between, and `_busy` need not be set.
                # A whole block is most often the pool's own small int.
                if self._gate or not (
                    n_tokens is size or (type(n_tokens) is int and 0 < n_tokens <= size)
                ):
                    pass
                elif owner in self._owners:
                    lease = self._owners[owner]
                    if (
                        lease._plain is found
                        and lease._owner is owner  # the very object was checked before
                        and lease._format is format
                    ):
                        stack = found.top
                        born = 0
                        if not stack and not found.below:
                            stack = found.unborn
                            born = 1
                        if stack:
                            if born or n_tokens != size:
                                before = self._counts
                                gave, n_born, partial, peak, era = before
                                opened = n_tokens != size
                                counts = (gave, n_born + born, partial + opened, peak, era)
                                if self._counts is not before:  # a finalizer got in
                                    return self._allocate(found, n_tokens, owner, format)
                                self._counts = counts
                                lease._partial += opened
                                lease._slack += size - n_tokens
                                found.slack += size - n_tokens
                            block = stack[-1]
                            block._lease = lease
                            block._fill = n_tokens
                            del stack[-1]
                            self._taken += 1
                            lease._blocks.append(block)  # type: ignore[union-attr]
                            took = found.took
                            took((self._now, 1, lease, 1, n_tokens, self._taken, self._counts))
                            return [block]
                elif (
                    (type(owner) is int or type(owner) is str)
                    and format is FP16
                    and not self._waiting
                ):
                    # Lease(found, owner, format), written out: a quarter of what it costs.
                    lease = _new_lease(Lease)
                    lease._stream = lease._plain = found
                    lease._owner = owner
                    lease._format = format
                    lease._blocks = []
                    lease._at = self._home
                    lease._born_ns = self._now
                    lease._partial = lease._slack = 0
                    lease._group = lease._tomb = None
                    stack = found.top
                    if stack and owner not in self._owners:
                        if n_tokens != size:
                            before = self._counts
                            gave, n_born, partial, peak, era = before
                            counts = (gave, n_born, partial + 1, peak, era)
                            if self._counts is not before:
                                return self._allocate(found, n_tokens, owner, format)
                            self._counts = counts
                            lease._partial = 1
                            lease._slack = size - n_tokens
                            found.slack += size - n_tokens
                        block = stack[-1]
                        block._lease = lease
                        block._fill = n_tokens
                        del stack[-1]
                        self._taken += 1
                        self._owners[owner] = lease
                        lease._blocks.append(block)
                        took = found.took
                        took((self._now, 1, lease, 1, n_tokens, self._taken, self._counts))
                        return [block]
                return self._allocate(found, n_tokens, owner, format)
        except TypeError:
            check_owner(owner)  # unhashable
            raise

    def allocate_kv(
        self, n_tokens: int, owner: Owner, format: str = "fp16", *, n_filled: int | None = None
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
                self._make_room(streams, n_tokens, owner)
                keys = self._take(streams[0], n_tokens, owner, format, n_filled)
                try:
                    values = self._take(streams[-1], n_tokens, owner, format, n_filled)
                except BaseException:
                    self._free_batch(keys, owner, None)
                    raise
                parts = ((keys[0]._lease, len(keys), None), (values[0]._lease, len(values), None))
                self._rare(self._entry(ALLOCATE, parts, len(keys) + len(values), n_tokens))
                return keys, values
            finally:
                self._busy = False
                self._gate = True if self._deferred else False

    def _allocate(self, stream: Stream, n_tokens: int, owner: Owner, fmt: str) -> list[Block]:
        """Allocation of any size for any owner; the lock is held."""
        n_tokens = check_tokens(n_tokens)
        owner = check_owner(owner)
        fmt = check_format(fmt)
        self._enter()
        try:
            started = self._clock()
            self._make_room((stream,), n_tokens, owner)
            taken = self._take(stream, n_tokens, owner, fmt, n_tokens)
            stream.took(self._entry(ALLOCATE, taken[0]._lease, len(taken), n_tokens))
            if self._timed is not None:
                self._timed(ALLOCATE, len(taken), started)
            return taken
        finally:
            self._busy = False
            self._gate = True if self._deferred else False

    def _make_room(self, streams: tuple[Stream, ...], n_tokens: int, owner: Owner) -> None:
        """Grow each of `streams` by what it lacks for `n_tokens`, or raise and change nothing."""
        n = -(-n_tokens // self._block_size)
        need: dict[Stream, int] = {}
        for stream in streams:
            need[stream] = need.get(stream, 0) + n
        short = {stream: n - stream.n_free for stream, n in need.items() if n > stream.n_free}
        if not short:
            return
        limit = self._config.max_blocks if self._config.grow_on_exhaustion else 0
        lacking = sum(short.values())
        if limit is not None and self._counts[4].n_blocks + lacking > limit:
            self._fail(need, short, n_tokens, owner)
        for stream, n_short in short.items():
            self._grow(stream, n_short)
        if self._config.grow_on_exhaustion:
            self._incidents.grow_attempts["full"] += 1

    def _fail(
        self, need: dict[Stream, int], short: dict[Stream, int], n_tokens: int, owner: Owner
    ) -> NoReturn:
        """Count an exhaustion and raise it."""
        stream, n_short = next(iter(short.items()))
        others = sum(other.n_free for other in self._streams if other not in short)
        if self._config.grow_on_exhaustion:
            reason = "limit"
            self._incidents.grow_attempts["denied"] += 1
        else:
            reason = "stranded" if others >= sum(short.values()) else "full"
        self._incidents.exhaust(stream.name, reason, n_short)
        *counts, era = self._counts
        self._counts = (*counts, era._replace(n_exhausted=era.n_exhausted + 1))
        refused = Lease(stream, owner, "fp16")
        self._rare(self._entry(EXHAUSTED, ((refused, need[stream], None),), 0, n_tokens))
        raise BlockPoolExhaustedError(
            f"stream {stream.name!r} has {stream.n_free} of {need[stream]} blocks that owner "
            f"{owner!r} needs for {n_tokens} tokens ({_CAUSE[reason]}; pool of "
            f"{era.n_blocks} blocks, {self._n_in_use()} in use)",
            stream=stream.name,
            requested=need[stream],
            free=stream.n_free,
            owner=owner,
            reason=reason,
        )

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
                self._free(batch, owner)
            finally:
                self._busy = False
                self._gate = True if self._deferred else False
        self._incidents.report()

    def _free(self, batch: list[Block], owner: Owner | None) -> None:
        started = self._clock()
        before = self._counts[0]
        refused = self._free_batch(batch, owner, None)
        if refused:
            # A block freed by this very call and refused after is repeated, not free already.
            freed = Counter(batch)
            freed.subtract(refused)
            for block in refused:
                reason = "repeated" if freed[block] > 0 else self._reason(block, owner)
                self._incidents.refuse([reason or "stale"])
        if self._timed is not None:
            self._timed(FREE, self._counts[0] - before, started)

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
                return len(batch) - len(self._free_batch(batch, None, leases))
            finally:
                self._busy = False
                self._gate = True if self._deferred else False

    def free_held_later(self, blocks: Iterable[Block], *leases: Lease) -> None:
        """`free_held` at the next call on the pool. Never takes the lock: made for finalizers."""
        self._defer(None, check_blocks(blocks), leases)

    def free_all(self, owner: Owner) -> None:
        """Give back everything that `owner` holds and end its registration; constant time.

        An unknown owner is no error.

        Raises:
            ArgumentTypeError: `owner` is neither an int nor a str.
        """
        try:
            with self._lock:
                # Few blocks of a plain owner: the other half of the one-block cycle, written out
                # under the same rule as in `allocate`.
                if not self._gate and not self._explicit and owner in self._owners:
                    before = self._counts
                    taken = self._taken
                    lease = self._owners[owner]
                    blocks = lease._blocks
                    n = len(blocks)
                    stream = lease._plain
                    gave, born, partial, peak, era = before
                    if taken - gave > peak:
                        peak = taken - gave
                    counts = (gave + n, born, partial - lease._partial, peak, era)
                    if (
                        stream is not None
                        and n <= MERGED_REGION
                        and lease._owner is owner
                        and self._counts is before  # else a handler got in before the commit
                        and self._taken == taken
                    ):
                        # commit
                        self._counts = counts
                        del self._owners[owner]
                        lease._at = None
                        lease._blocks = NOTHING
                        stream.top += blocks
                        if lease._slack:
                            stream.slack -= lease._slack
                        log = stream.gave
                        log((self._now, 3, lease, n, 0, taken, counts))
                        return
                owner = check_owner(owner)
                if self._busy:
                    self._defer(owner, [], None)
                    return
                self._enter()
                try:
                    self._release(owner)
                finally:
                    self._busy = False
                self._gate = True if self._deferred else False
        except TypeError:
            check_owner(owner)  # unhashable
            raise

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
                        self._retire(found, found.n_free - target_free, ids)
                finally:
                    self._busy = False
        finally:
            # Without the lock: a storage takes its own, and may call the pool.
            if ids:
                for listener in list(self._listeners):
                    listener.drop_retired(ids)
        return len(ids)

    def add_retire_listener(self, listener: RetireListener) -> None:
        """Call `listener.drop_retired(block_ids)` after each `shrink`; held weakly."""
        self._listeners.add(listener)

    # -- fill -----------------------------------------------------------------------------------

    def mark_used(self, block: Block, n_used: int) -> None:
        """Store how many token slots of `block` are occupied.

        On a free block the value is stored and no statistic moves; a block of another pool, a copy
        or a retired one is left alone. Either is counted in `rejected`.

        Raises:
            ValueError: `n_used` is not an int in 0..block_size.
            ArgumentTypeError: `block` is no Block.
        """
        size = self._block_size
        try:
            with self._lock:
                lease = block._lease
                fill = block._fill
                # Every token of a decode step stays within a partly filled block. No call from the
                # last `if` on, as in `allocate`.
                if (
                    lease._at is self._home
                    and type(n_used) is int
                    and 0 < fill < size > n_used > 0
                ):
                    block._fill = n_used
                    fill -= n_used
                    lease._slack += fill
                    lease._stream.slack += fill  # type: ignore[union-attr]
                else:
                    self._set_fill(block, n_used)
        except AttributeError:
            raise ArgumentTypeError(f"block must be a Block, got {block!r}") from None

    def _set_fill(self, block: Block, n_used: int) -> None:
        """`mark_used` in general; the lock is held."""
        size = self._block_size
        if type(n_used) is not int or n_used < 0 or n_used > size:
            raise ValueError(f"n_used must be an int in 0..{size}, got {n_used!r}")
        self._enter()
        try:
            lease, fill = block._lease, block._fill
            if lease._at is not self._home:
                self._mark_refused(block, n_used)
                return
            moved = (0 < n_used < size) - (0 < fill < size)
            gave, born, partial, peak, era = self._counts
            counts = (gave, born, partial + moved, peak, era)
            # commit
            block._fill = n_used
            lease._slack += fill - n_used
            lease._stream.slack += fill - n_used  # type: ignore[union-attr]
            self._counts = counts
            lease._partial += moved
        finally:
            self._busy = False
            self._gate = True if self._deferred else False

    def _mark_refused(self, block: Block, n_used: int) -> None:
        reason = self._reason(block, None)
        if reason == "free":
            block._lease = shown_lease(block._lease)
            block._fill = n_used
        self._incidents.refuse([reason or "free"])

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
                # commit
                if lease._at is self._home:
                    slack = lease._slack - n_tokens
                    slack = 0 if slack < 0 else most if slack > most else slack
                    lease._stream.slack += slack - lease._slack  # type: ignore[union-attr]
                    lease._slack = slack

    # -- inside ---------------------------------------------------------------------------------

    def _stream(self, name: str) -> Stream:
        try:
            return self._stream_of[name]
        except (KeyError, TypeError):
            raise wrong_stream(name, self._stream_of) from None

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
            raise

    def _defer(
        self, owner: Owner | None, batch: list[Block], leases: tuple[Lease, ...] | None
    ) -> None:
        """Queue a release for the next call."""
        self._deferred.append((owner, batch, leases))
        self._gate = True

    def _refuse_reentry(self) -> NoReturn:
        raise PoolReentryError(
            "this thread is inside a call of this pool (a finalizer or signal handler is calling); "
            "only free, free_all, free_held_later and reads are allowed here"
        )

    def _settle(self) -> None:
        """Do what was queued, unless a call is under way; that call does it."""
        if self._deferred and not self._busy:
            with self._lock:
                if not self._busy:
                    self._enter()
                    self._busy = False
                self._gate = True if self._deferred else False

    def _drain(self) -> None:
        """Do the queued releases; the lock is held and `_busy` set."""
        queue = self._deferred
        while queue:
            # Off the queue only when done: an interrupt repeats a release, which is harmless.
            owner, batch, leases = queue[0]
            if leases is not None:
                self._free_batch(batch, None, leases)
            elif batch:
                self._free(batch, owner)
            elif owner is not None:
                self._release(owner)
            del queue[0]

    def _reason(self, block: Block, owner: Owner | None) -> str | None:
        if not isinstance(block, Block):
            raise ArgumentTypeError(f"block must be a Block, got {block!r}")
        lease = block._lease
        stream = lease._stream
        if stream is None or stream.home is not self._home:
            return detached_reason(lease) or "foreign"
        if lease._at is None:
            return "retired" if lease is stream.retired else "free"
        return None if owner is None or lease._owner == owner else "stale"

    def _n_held(self, owner: Owner) -> int:
        lease = self._owners.get(owner)
        if lease is None:
            return 0
        leases = [lease] if lease._group is None else lease._group.leases
        return sum(len(lease._blocks) for lease in leases)

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

    def _n_in_use(self) -> int:
        return self._taken - self._counts[0]

    def _after_fork(self) -> None:
        """In the child: a thread that was inside a call, and held the lock, does not exist here."""
        if self._lock.acquire(blocking=False):
            self._lock.release()  # free, or the forking thread's own: its call goes on here too
            return
        self._lock = threading.RLock()
        self._busy = False
        heal(self)

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


_CAUSE = {
    "limit": "growth is at max_blocks",
    "stranded": "the other stream has enough free blocks; separate_kv=False would share them",
    "full": "the pool may not grow",
}

_pools: weakref.WeakSet[BlockPoolAllocator] = weakref.WeakSet()
# Called with each pool made; `veloxquant_mlx.telemetry.instrument_all` adds itself here.
_observers: list[Callable[[BlockPoolAllocator], None]] = []


def _release_locks_after_fork() -> None:
    for pool in list(_pools):
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_locks_after_fork)
