"""Books: who holds which block, and every change of that, under the pool's lock.

Moves come in two halves: first everything that may fail or be interrupted, then a commit without
a single call. CPython looks at signals only at calls, loops and function entries, so a Ctrl-C
falls before or after a commit, never into it. The comments `# commit` mark where calls must stop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from veloxquant_mlx.memory.block import Block, Group, Lease, Owner
from veloxquant_mlx.memory.journal import (
    FREE_ALL,
    HISTORY,
    SHRINK,
    Counts,
    Entry,
    Era,
    Part,
)
from veloxquant_mlx.memory.journal import FREE as FREE_OP
from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.memory.stream import MERGED_REGION, Stream, make_blocks

__all__ = ["BULK", "NOTHING", "Books"]

# Calls that move this many blocks are timed whenever somebody listens.
BULK: Final = 4096

NOTHING: Final[list[Block]] = []  # what a dead lease holds; never changed


class Books:
    """State of a pool. Every method is called under the pool's lock."""

    __slots__ = (
        "_block_size",
        "_clock",
        "_counts",  # gave, born, partial, peak (as of the last release), era
        "_explicit",  # owners of register_owner that hold blocks
        "_home",
        "_journal",
        "_next_id",
        "_now",  # the clock as last read; the one-block path does not pay for reading it
        "_owners",
        "_rare",  # journal slot of calls with several parts and of failures
        "_streams",
        "_taken",
        "_timed",  # told operation, blocks and start of calls off the hot path, when instrumented
        "_waiting",  # owners of register_owner that hold none
    )

    def __init__(self, config: PoolConfig) -> None:
        self._block_size = config.block_size
        self._home = object()
        self._clock: Callable[[], int] = time.monotonic_ns
        self._now = self._clock()
        self._journal: deque[Entry] = deque(maxlen=HISTORY)
        log = self._journal.append
        self._rare: Callable[[Entry], None] = log
        self._timed: Callable[[int, int, int], None] | None = None
        n = config.n_blocks
        if config.separate_kv:
            n_keys = n - n // 2
            self._streams: tuple[Stream, ...] = (
                Stream("k", self._home, 0, n_keys, log),
                Stream("v", self._home, n_keys, n - n_keys, log),
            )
        else:
            self._streams = (Stream("kv", self._home, 0, n, log),)
        self._next_id = n
        self._owners: dict[Owner, Lease] = {}
        self._waiting: dict[Owner, None] = {}
        self._explicit: dict[Owner, None] = {}
        self._taken = 0
        self._counts: Counts = (0, 0, 0, 0, Era(n_blocks=n))

    # -- taking ---------------------------------------------------------------------------------

    def _grow(self, stream: Stream, n: int) -> None:
        """Add `n` blocks to `stream`."""
        made = make_blocks(range(self._next_id, self._next_id + n))
        made.reverse()
        *counts, era = self._counts
        era = era._replace(n_blocks=era.n_blocks + n, n_grown=era.n_grown + n)
        # Ids left to mint would have to go first, and growth means that none are free.
        stream.mint(stream.n_free)
        counts = (*counts, era)
        unborn = made + stream.unborn
        # commit
        stream.unborn = unborn
        stream.managed += n
        self._next_id += n
        self._counts = counts

    def _take(
        self, stream: Stream, n_tokens: int, owner: Owner, fmt: str, n_filled: int
    ) -> list[Block]:
        """Hand out the blocks for `n_tokens`, of which the caller made sure that they are free.

        The caller enters it in the journal.
        """
        size = self._block_size
        n = -(-n_tokens // size)
        stream.expose(n)
        n_reused = min(n, len(stream.top))
        n_born = n - n_reused
        taken: list[Block] = []
        if n_reused:
            taken = stream.top[-n_reused:]
            taken.reverse()
        if n_born:
            stream.mint(n_born)
            born = stream.unborn[-n_born:]
            born.reverse()
            taken += born
        lease, group = self._lease_for(stream, owner, fmt)
        self._mark(taken, lease)
        held = lease._blocks
        ordered = isinstance(held, dict) or (group is not None and group.order is not None)
        keys = dict.fromkeys(taken) if ordered else None
        last_fill = n_tokens - (n - 1) * size
        gave, n_ever, partial, peak, era = self._counts
        is_partial = last_fill < size
        counts = (gave, n_ever + n_born, partial + is_partial, peak, era)
        slack = n * size - n_filled
        started = lease._at is None
        key = (stream.name, fmt)
        turn = (lease, n)
        newcomer = (lease,)
        top, unborn = slice(-n_reused, None), slice(-n_born, None)
        # commit
        if n_reused:
            del stream.top[top]
        if n_born:
            del stream.unborn[unborn]
        taken[-1]._fill = last_fill
        if keys is None:
            held += taken  # type: ignore[operator]
        elif held:
            held |= keys  # type: ignore[operator]
        else:
            lease._blocks = keys
        if group is not None:
            if started:
                group.leases += newcomer
                group.by_key[key] = lease
            if group.order is not None:
                group.order |= keys  # type: ignore[operator]
            else:
                group.turns += turn  # type: ignore[operator]
        if started:
            lease._at = self._home
            lease._born_ns = self._now
            if owner not in self._owners:
                self._owners[owner] = lease
                if owner in self._waiting:
                    del self._waiting[owner]
                    self._explicit[owner] = None
            else:
                first = self._owners[owner]
                first._group = lease._group = group
                first._plain = lease._plain = None
        self._taken += n
        self._counts = counts
        stream.slack += slack
        lease._slack += slack
        lease._partial += is_partial
        return taken

    def _lease_for(self, stream: Stream, owner: Owner, fmt: str) -> tuple[Lease, Group | None]:
        """The lease to take under, dead if it is new, and its group, detached if it is new."""
        first = self._owners.get(owner)
        if first is None:
            return Lease(stream, owner, fmt), None
        group = first._group
        if group is not None:
            found = group.by_key.get((stream.name, fmt))
        else:
            found = first if first._stream is stream and first._format == fmt else None
            if found is None:
                group = Group(first)
        return found or Lease(stream, owner, fmt), group

    def _mark(self, taken: Sequence[Block], lease: Lease) -> None:
        """Point `taken`, still on the free list, to `lease`."""
        size = self._block_size
        try:
            # The one loop over blocks of an allocation: two stores, about 20 ns a block.
            for block in taken:
                block._lease = lease
                block._fill = size
        except BaseException:
            self._unmark(taken, lease)
            raise

    def _unmark(self, taken: Sequence[Block], lease: Lease) -> None:
        """Undo an interrupted `_mark`: free blocks must not point to a lease that lives."""
        if lease._at is not None:
            tomb = lease.tomb()
            for block in taken:
                block._lease = tomb

    # -- giving back ----------------------------------------------------------------------------

    def _release(self, owner: Owner) -> None:
        """Give back all that `owner` holds, and forget the owner."""
        lease = self._owners.get(owner)
        if lease is None:
            if owner in self._waiting:
                del self._waiting[owner]
        elif lease._group is None:
            n = len(lease._blocks)
            stream = lease._stream
            self._return(lease, True)
            stream.gave(self._entry(FREE_ALL, lease, n, 0))
        else:
            parts = tuple((kin, len(kin._blocks), None) for kin in lease._group.leases)
            self._return_group(lease._group)
            self._rare(self._entry(FREE_ALL, parts, sum(n for _, n, _ in parts), 0))

    def _return(self, lease: Lease, last: bool) -> None:
        """Give back one lease, with its owner if it is the last. Constant: its list changes hands."""
        blocks = lease._blocks
        n = len(blocks)
        owner = lease._owner
        stream = lease._stream
        gave, born, partial, peak, era = self._counts
        peak = max(peak, self._taken - gave)
        counts = (gave + n, born, partial - lease._partial, peak, era)
        # Tracked allocations before the commit, since each may run a finalizer.
        whole = n > MERGED_REGION
        pushed = [stream.top] if whole and stream.top else []
        n_pushed = len(stream.top) if whole else 0
        if whole and blocks.__class__ is not list:
            pushed.append(blocks)
            n_pushed += n
            blocks = []
        # commit
        if last:
            del self._owners[owner]
            if self._explicit and owner in self._explicit:
                del self._explicit[owner]
        lease._at = None
        lease._blocks = NOTHING
        if whole:
            stream.below += pushed
            stream.n_below += n_pushed
            stream.top = blocks
        else:
            stream.top += blocks
        stream.slack -= lease._slack
        self._counts = counts

    def _return_group(self, group: Group) -> None:
        """Give back every lease of an owner, first lease first."""
        last = group.leases[-1]
        try:
            for lease in group.leases:
                self._return(lease, lease is last)
        except BaseException:
            # Half an owner is no state of the books: finish, then let the interrupt pass.
            for lease in group.leases:
                if lease._at is not None:
                    self._return(lease, lease is last)
            raise

    def _free_batch(
        self, batch: Sequence[Block], owner: Owner | None, leases: Collection[Lease] | None
    ) -> list[Block]:
        """Free those of `batch` that the books hold out (to `owner`, or under one of `leases`).

        Returns the others. Linear in the batch, whatever its order.
        """
        refused: list[Block] = []
        freed: dict[Lease, list[Block]] = {}
        run_lease: Lease | None = None
        run: list[Block] = []
        home, size = self._home, self._block_size
        n_gave = n_closed = 0
        try:
            for block in batch:
                lease = block._lease
                if (
                    lease._at is not home
                    or (owner is not None and lease._owner != owner)
                    or (leases is not None and lease not in leases)
                ):
                    refused.append(block)
                    continue
                if lease is not run_lease:
                    run = freed.setdefault(lease, [])
                    run_lease = lease
                held = lease._blocks
                if held.__class__ is list:
                    self._index(lease)
                    held = lease._blocks
                tomb = lease._tomb or lease.tomb()
                group = lease._group
                stream = lease._stream
                fill = block._fill
                one = (block,)
                room = (len(held) - 1) * size
                slack = lease._slack - size + fill
                slack = 0 if slack < 0 else room if slack > room else slack
                # commit
                del held[block]
                if group is not None:
                    del group.order[block]
                block._lease = tomb
                run += one
                stream.top += one
                n_gave += 1
                stream.slack += slack - lease._slack
                lease._slack = slack
                if 0 < fill < size:
                    n_closed += 1
                    lease._partial -= 1
        finally:
            gave, born, partial, peak, era = self._counts
            in_use = self._taken - gave
            if in_use > peak:
                peak = in_use
            self._counts = (gave + n_gave, born, partial - n_closed, peak, era)
            if freed:
                self._bury(freed)
                self._log_freed(freed)
        return refused

    def _index(self, lease: Lease) -> None:
        """Turn the lists of an owner into ordered dicts, so that single frees are constant.

        Once an owner, at its first single free: what is freed singly is often freed so again.
        """
        group = lease._group
        if group is None:
            indexed = dict.fromkeys(lease._blocks)
            # commit
            lease._blocks = indexed
            lease._plain = None
            return
        order = dict.fromkeys(group.ordered())
        for member in group.leases:
            member._blocks = dict.fromkeys(member._blocks)
        group.order = order
        group.turns = None

    def _bury(self, leases: Collection[Lease]) -> None:
        """End those of `leases` whose last block was freed singly."""
        for lease in leases:
            if lease._blocks or lease._at is None:
                continue
            owner, group = lease._owner, lease._group
            heirs = [] if group is None else [kin for kin in group.leases if kin is not lease]
            key = (lease.stream, lease._format)
            # commit
            lease._at = None
            lease._blocks = NOTHING
            if group is not None:
                group.leases = heirs
                del group.by_key[key]
            if heirs:
                self._owners[owner] = heirs[0]
            else:
                del self._owners[owner]
                if owner in self._explicit:
                    del self._explicit[owner]
                    self._waiting[owner] = None

    def _log_freed(self, freed: dict[Lease, list[Block]]) -> None:
        parts: tuple[Part, ...] = tuple((lease, len(run), run) for lease, run in freed.items())
        n = sum(len(run) for run in freed.values())
        self._rare(self._entry(FREE_OP, parts, n, 0))

    # -- shrinking ------------------------------------------------------------------------------

    def _retire(self, stream: Stream, n: int, ids: list[int]) -> None:
        """Take the `n` coldest free blocks of `stream` out for good, their ids onto `ids`."""
        while n > 0:
            gave, born, partial, peak, era = self._counts
            n_ids = min(n, stream.end_id - stream.next_id)
            step = list(range(stream.end_id - n_ids, stream.end_id))
            source = [] if n_ids else stream.coldest()
            gone = source[:n]
            count = n_ids + len(gone)
            from_below = bool(stream.below) and source is stream.below[0]
            emptied = from_below and count == len(source)
            era = era._replace(n_blocks=era.n_blocks - count, n_retired=era.n_retired + count)
            counts = (gave, born, partial, max(peak, self._taken - gave), era)
            # commit
            stream.end_id -= n_ids
            del source[:n]
            if from_below:
                stream.n_below -= count
            if emptied:
                del stream.below[0]
            stream.managed -= count
            self._counts = counts
            n -= count
            for block in gone:
                block._lease = stream.retired
                step += (block._id,)
            ids += step
        self._rare(self._entry(SHRINK, ((stream.retired, len(ids), None),), len(ids), 0))

    # -- reading --------------------------------------------------------------------------------

    def _held(self, owner: Owner) -> list[Block]:
        """The blocks of `owner`, in the order of allocation."""
        lease = self._owners.get(owner)
        if lease is None:
            return []
        return list(lease._blocks if lease._group is None else lease._group.ordered())

    def _entry(
        self, operation: int, what: Lease | tuple[Part, ...], n: int, n_tokens: int
    ) -> Entry:
        return (self._now, operation, what, n, n_tokens, self._taken, self._counts)
