"""HotPath: the three calls of every decode step and request end, written for speed.

Growing by one block, `mark_used` and the release of an owner are written out here, and hand over to
the general path (`taking`, `giving`) whenever anything is out of the ordinary. Two rules keep them
whole under Ctrl-C, signal handlers and finalizers without the bookkeeping of `Gate._enter`:

- From the last look-up to the last change there is no call, so no signal handler and no other
  thread gets in between, and no container is made, so no finalizer does. Where a container has to
  be made in between, the counters are compared after it.
- `lock.__enter__()` inside the `try` and `release` in its `finally` are `with lock` without the two
  bound methods that `with` makes, which is 75 ns of 175. A signal after the lock was had strikes
  within the `try`. When it strikes a call that waits, there is nothing to release; `release` says
  so, and `unmask` brings back what struck.

`docs/allocator.md` has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory.block import Block, Lease, Owner, shown_lease
from veloxquant_mlx.memory.books import NOTHING
from veloxquant_mlx.memory.checks import check_format, check_owner, check_tokens, wrong_stream
from veloxquant_mlx.memory.gate import Gate
from veloxquant_mlx.memory.giving import release
from veloxquant_mlx.memory.journal import ALLOCATE, BULK
from veloxquant_mlx.memory.lease import Group
from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.memory.stream import MERGED_REGION, Stream
from veloxquant_mlx.memory.taking import make_room, take

__all__ = ["FP16", "HotPath"]

FP16 = "fp16"  # the default format, compared by identity

_new_lease: Callable[[type[Lease]], Lease] = object.__new__


class HotPath(Gate):
    """Allocation, fill and release of a pool."""

    __slots__ = ("_stream_of",)

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        self._stream_of: dict[str, Stream]
        if config.separate_kv:
            self._stream_of = {stream.name: stream for stream in self._streams}
        else:
            self._stream_of = dict.fromkeys(("k", "v", "kv"), self._streams[0])

    # -- allocate -------------------------------------------------------------------------------

    def allocate(  # noqa: C901, PLR0912, PLR0915 - a helper call costs a tenth of it
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
        lock = self._lock
        try:
            try:
                lock.__enter__()
                group: Group | None = None
                turn: Any = None
                # A whole block is most often the pool's own small int.
                if self._gate or not (
                    n_tokens is size or (type(n_tokens) is int and 0 < n_tokens <= size)
                ):
                    return self._allocate(found, n_tokens, owner, format)
                if owner in self._owners:
                    starts = False
                    lease = self._owners[owner]
                    group = lease._group
                    if group is not None and found in group.turn_of:
                        turn = group.turn_of[found]
                        lease = turn[0]
                    if not (
                        lease._owner is owner  # the very object was checked before
                        and lease._format is format
                        and lease._stream is found
                    ):
                        return self._allocate(found, n_tokens, owner, format)
                elif format is FP16 and (type(owner) is int or type(owner) is str):
                    # Lease(found, owner, format), written out: a quarter of what it costs.
                    lease = _new_lease(Lease)
                    lease._stream = found
                    lease._owner = owner
                    lease._format = format
                    lease._blocks = [NO_BLOCK]
                    lease._at = self._home
                    lease._born_ns = self._now
                    lease._partial = lease._slack = 0
                    lease._group = lease._tomb = None
                    starts = True
                    if owner in self._owners or (self._waiting and owner in self._waiting):
                        return self._allocate(found, n_tokens, owner, format)
                else:
                    return self._allocate(found, n_tokens, owner, format)
                before = counts = self._counts
                n_taken = self._taken
                stack = found.top
                if not stack and not found.below:
                    stack = found.unborn
                    gave, born, partial, peak, era = counts
                    counts = (gave, born + 1, partial, peak, era)
                if n_tokens != size:
                    gave, born, partial, peak, era = counts
                    counts = (gave, born, partial + 1, peak, era)
                if not stack or self._counts is not before or self._taken is not n_taken:
                    # None at hand, or a finalizer got in.
                    return self._allocate(found, n_tokens, owner, format)
                # commit
                self._counts = counts
                if n_tokens != size:
                    lease._partial += 1
                    slack = size - n_tokens
                    lease._slack += slack
                    found.slack += slack
                block = stack[-1]
                block._lease = lease
                block._fill = n_tokens
                del stack[-1]
                self._taken = n_taken = n_taken + 1
                held: Any = lease._blocks
                if starts:
                    held[0] = block
                    self._owners[owner] = lease
                else:
                    if group is not None:
                        if group.order is None:
                            group.turns += turn
                        else:
                            group.order[block] = None
                    if lease._tomb is None or held.__class__ is list:
                        held.append(block)  # the last change: a signal falls after it
                    else:
                        held[block] = None
                took = found.took
                took((self._now, 1, lease, 1, n_tokens, n_taken, counts))
                return [block]
            finally:
                lock.release()
        except TypeError:
            check_owner(owner)  # unhashable
            raise
        except RuntimeError as error:
            unmask(error)
            raise

    def _allocate(self, stream: Stream, n_tokens: int, owner: Owner, fmt: str) -> list[Block]:
        """Allocation of any size for any owner; the lock is held."""
        n_tokens = check_tokens(n_tokens)
        owner = check_owner(owner)
        fmt = check_format(fmt)
        self._enter()
        try:
            era = self._counts[4]
            make_room(self, (stream,), n_tokens, owner)
            grown = self._counts[4] is not era
            taken = take(self, stream, n_tokens, owner, fmt, n_tokens)
            stream.took(self._entry(ALLOCATE, taken[0]._lease, len(taken), n_tokens))
            if self._timed is not None and (grown or len(taken) >= BULK or fmt is not FP16):
                self._timed(ALLOCATE, len(taken), self._now)
            return taken
        finally:
            self._busy = False
            self._gate = self._deferred

    # -- free_all -------------------------------------------------------------------------------

    def free_all(self, owner: Owner) -> None:
        """Give back everything that `owner` holds and end its registration; constant time.

        An unknown owner is no error.

        Raises:
            ArgumentTypeError: `owner` is neither an int nor a str.
        """
        lock = self._lock
        try:
            try:
                lock.__enter__()
                if self._gate or owner not in self._owners:
                    self._free_all(owner)
                    return
                before = self._counts
                n_taken = self._taken
                lease = self._owners[owner]
                blocks: Any = lease._blocks
                n = len(blocks)
                stream = lease._stream
                gave, born, partial, peak, era = before
                if n_taken - gave > peak:
                    peak = n_taken - gave
                counts = (gave + n, born, partial - lease._partial, peak, era)
                covered = NO_REGIONS
                n_covered = 0
                if n > MERGED_REGION:
                    if n >= BULK and self._timed is not None:
                        self._free_all(owner)
                        return
                    if stream.top:
                        n_covered = len(stream.top)
                        covered = [stream.top]
                if (
                    lease._group is not None
                    or lease._tomb is not None  # its blocks may be a dict
                    or lease._owner is not owner
                    or self._counts is not before  # a finalizer or a handler got in
                    or self._taken is not n_taken
                ):
                    self._free_all(owner)
                    return
                # commit
                self._counts = counts
                del self._owners[owner]
                if self._explicit and owner in self._explicit:
                    del self._explicit[owner]
                lease._at = None
                lease._blocks = NOTHING
                if n > MERGED_REGION:
                    stream.below += covered
                    stream.n_below += n_covered
                    stream.top = blocks
                else:
                    stream.top += blocks
                if lease._slack:
                    stream.slack -= lease._slack
                gave_back = stream.gave
                gave_back((self._now, 3, lease, n, 0, n_taken, counts))
            finally:
                lock.release()
        except TypeError:
            check_owner(owner)  # unhashable
            raise
        except RuntimeError as error:
            unmask(error)
            raise

    def _free_all(self, owner: Owner) -> None:
        """Release of any owner; the lock is held."""
        owner = check_owner(owner)
        if self._busy:
            self._defer(owner, [], None)
            return
        self._enter()
        try:
            release(self, owner)
        finally:
            self._busy = False
            self._gate = self._deferred

    # -- mark_used ------------------------------------------------------------------------------

    def mark_used(self, block: Block, n_used: int) -> None:
        """Store how many token slots of `block` are occupied.

        On a free block the value is stored and no statistic moves; a block of another pool, a copy
        or a retired one is left alone. Either is counted in `rejected`.

        Raises:
            ValueError: `n_used` is not an int in 0..block_size.
            ArgumentTypeError: `block` is no Block.
        """
        size = self._block_size
        lock = self._lock
        try:
            try:
                lock.__enter__()
                lease = block._lease
                fill = block._fill
                # Every token of a decode step stays within a partly filled block.
                if lease._at is self._home and type(n_used) is int and 0 < fill < size > n_used > 0:
                    # commit
                    block._fill = n_used
                    fill -= n_used
                    lease._slack += fill
                    lease._stream.slack += fill
                else:
                    self._set_fill(block, n_used)
            finally:
                lock.release()
        except AttributeError:
            raise ArgumentTypeError(f"block must be a Block, got {block!r}") from None
        except RuntimeError as error:
            unmask(error)
            raise

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
            lease._stream.slack += fill - n_used
            self._counts = counts
            lease._partial += moved
        finally:
            self._busy = False
            self._gate = self._deferred

    def _mark_refused(self, block: Block, n_used: int) -> None:
        reason = self._reason(block, None)
        if reason == "free":
            block._lease = shown_lease(block._lease)
            block._fill = n_used
        self._incidents.refuse([reason or "free"])


NO_BLOCK: Any = None
NO_REGIONS: list[list[Block]] = []


def unmask(error: RuntimeError) -> None:
    """Raise what interrupted the wait for a lock, if `error` is `release` stumbling over that."""
    struck = error.__context__
    if type(error) is RuntimeError and struck is not None:
        raise struck from None
