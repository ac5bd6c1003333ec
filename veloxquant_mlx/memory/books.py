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
    ALLOCATE,
    FREE_ALL,
    HISTORY,
    SHRINK,
    Entry,
    Era,
    Part,
)
from veloxquant_mlx.memory.journal import FREE as FREE_OP
from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.memory.stream import MERGED_REGION, Stream, make_blocks

__all__ = ["BULK", "Books"]

# Calls that move this many blocks are timed whenever somebody listens.
BULK: Final = 4096

_NOTHING: Final[list[Block]] = []  # what a dead lease holds; never changed


class Books:
    """State of a pool. Every method is called under the pool's lock."""

    __slots__ = (
        "_block_size",
        "_born",  # blocks that were ever handed out
        "_clock",
        "_era",
        "_explicit",  # owners of register_owner that hold blocks
        "_gave",
        "_home",
        "_journal",
        "_next_id",
        "_owners",
        "_partial",
        "_peak",  # as of the last release; the present use may be higher
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
        self._gave = 0
        self._born = 0
        self._partial = 0
        self._peak = 0
        self._era = Era(n_blocks=n)

    # -- taking ---------------------------------------------------------------------------------

    def _grow(self, stream: Stream, n: int) -> None:
        """Add `n` blocks to `stream`."""
        made = make_blocks(range(self._next_id, self._next_id + n))
        made.reverse()
        era = self._era._replace(
            n_blocks=self._era.n_blocks + n, n_grown=self._era.n_grown + n
        )
        # Ids left to mint would have to go first, and growth means that none are free.
        stream.mint(stream.n_free)
        # commit
        stream.unborn[:0] = made
        stream.managed += n
        stream.n_free += n
        self._next_id += n
        self._era = era

    def _take(
        self, stream: Stream, n_tokens: int, owner: Owner, fmt: str, n_filled: int
    ) -> list[Block]:
        """Hand out the blocks for `n_tokens`, of which the caller made sure that they are free."""
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
        partial = last_fill < size
        slack = n * size - n_filled
        started = not lease._live
        now = self._clock()
        key = (stream.name, fmt)
        # commit
        if n_reused:
            del stream.top[-n_reused:]
        if n_born:
            del stream.unborn[-n_born:]
            self._born += n_born
        taken[-1]._fill = last_fill
        if keys is None:
            held += taken  # type: ignore[operator]
        elif held:
            held |= keys  # type: ignore[operator]
        else:
            lease._blocks = keys
        if group is not None:
            if started:
                group.leases += (lease,)
                group.by_key[key] = lease
            if group.order is not None:
                group.order |= keys  # type: ignore[operator]
            else:
                group.turns += (lease, n)  # type: ignore[operator]
        if started:
            lease._live = True
            lease._born_ns = now
            if owner not in self._owners:
                self._owners[owner] = lease
                if owner in self._waiting:
                    del self._waiting[owner]
                    self._explicit[owner] = None
            else:
                first = self._owners[owner]
                first._group = lease._group = group
        stream.n_free -= n
        self._taken += n
        stream.slack += slack
        lease._slack += slack
        if partial:
            self._partial += 1
            lease._partial += 1
        stream.took(
            (now, ALLOCATE, lease, n, n_tokens, self._taken, self._gave, self._born,
             self._partial, self._peak, self._era)
        )  # fmt: skip
        return taken

    def _lease_for(self, stream: Stream, owner: Owner, fmt: str) -> tuple[Lease, Group | None]:
        """The lease to take under, dead if it is new, and its group, detached if it is new."""
        first = self._owners.get(owner)
        if first is None:
            return Lease(self._home, stream, owner, fmt), None
        group = first._group
        if group is not None:
            found = group.by_key.get((stream.name, fmt))
        else:
            found = first if first._stream is stream and first._format == fmt else None
            if found is None:
                group = Group(first)
        return found or Lease(self._home, stream, owner, fmt), group

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
        if lease._live:
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
            self._return(lease, last=True)
        else:
            self._return_group(lease._group)

    def _return(self, lease: Lease, *, last: bool) -> None:
        """Give back one lease, with its owner if it is the last. Constant: its list changes hands."""
        blocks = lease._blocks
        n = len(blocks)
        in_use = self._taken - self._gave
        owner = lease._owner
        now = self._clock()
        stream = lease._stream
        # commit
        if last:
            del self._owners[owner]
            if self._explicit and owner in self._explicit:
                del self._explicit[owner]
        if in_use > self._peak:
            self._peak = in_use
        lease._live = False
        lease._blocks = _NOTHING
        if n <= MERGED_REGION:
            stream.top += blocks
        else:
            if stream.top:
                stream.below += (stream.top,)
            if blocks.__class__ is list:
                stream.top = blocks
            else:
                stream.below += (blocks,)
                stream.top = []
        stream.n_free += n
        self._gave += n
        if lease._slack:
            stream.slack -= lease._slack
        if lease._partial:
            self._partial -= lease._partial
        stream.gave(
            (now, FREE_ALL, lease, n, 0, self._taken, self._gave, self._born, self._partial,
             self._peak, self._era)
        )  # fmt: skip

    def _return_group(self, group: Group) -> None:
        """Give back every lease of an owner, first lease first."""
        last = group.leases[-1]
        try:
            for lease in group.leases:
                self._return(lease, last=lease is last)
        except BaseException:
            # Half an owner is no state of the books: finish, then let the interrupt pass.
            for lease in group.leases:
                if lease._live:
                    self._return(lease, last=lease is last)
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
        in_use = self._taken - self._gave
        if in_use > self._peak:
            self._peak = in_use
        try:
            for block in batch:
                lease = block._lease
                if (
                    not lease._live
                    or lease._home is not home
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
                room = (len(held) - 1) * size
                slack = lease._slack - size + fill
                slack = 0 if slack < 0 else room if slack > room else slack
                # commit
                del held[block]
                if group is not None:
                    del group.order[block]
                block._lease = tomb
                run += (block,)
                stream.top += (block,)
                stream.n_free += 1
                self._gave += 1
                stream.slack += slack - lease._slack
                lease._slack = slack
                if 0 < fill < size:
                    self._partial -= 1
                    lease._partial -= 1
        finally:
            self._bury(freed)
            if freed:
                self._log_freed(freed)
        return refused

    def _index(self, lease: Lease) -> None:
        """Turn the lists of an owner into ordered dicts, so that single frees are constant.

        Once an owner, at its first single free: what is freed singly is often freed so again.
        """
        group = lease._group
        if group is None:
            lease._blocks = dict.fromkeys(lease._blocks)
            return
        order = dict.fromkeys(group.ordered())
        for member in group.leases:
            member._blocks = dict.fromkeys(member._blocks)
        group.order = order
        group.turns = None

    def _bury(self, leases: Collection[Lease]) -> None:
        """End those of `leases` whose last block was freed singly."""
        for lease in leases:
            if lease._blocks or not lease._live:
                continue
            owner, group = lease._owner, lease._group
            heirs = [] if group is None else [kin for kin in group.leases if kin is not lease]
            key = (lease.stream, lease._format)
            # commit
            lease._live = False
            lease._blocks = _NOTHING
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
        in_use = self._taken - self._gave
        if in_use > self._peak:
            self._peak = in_use
        while n > 0:
            gone = min(n, stream.end_id - stream.next_id)
            source: list[Block] = []
            if gone:
                step = list(range(stream.end_id - gone, stream.end_id))
            else:
                source = stream.coldest()
                step = [block._id for block in source[:n]]
                for block in source[:n]:
                    block._lease = stream.retired
            count = len(step)
            era = self._era._replace(
                n_blocks=self._era.n_blocks - count, n_retired=self._era.n_retired + count
            )
            n -= count
            # commit
            if gone:
                stream.end_id -= gone
            else:
                del source[:count]
            stream.n_free -= count
            stream.managed -= count
            self._era = era
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
        self, operation: int, what: Lease | tuple[Part, ...] | None, n: int, n_tokens: int
    ) -> Entry:
        return (
            self._clock(), operation, what, n, n_tokens, self._taken, self._gave, self._born,
            self._partial, self._peak, self._era,
        )  # fmt: skip
