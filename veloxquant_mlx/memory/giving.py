"""Giving back: whole owners, single blocks, and blocks that the pool retires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from veloxquant_mlx.memory.block import Block, Lease, Owner
from veloxquant_mlx.memory.books import NOTHING, Books
from veloxquant_mlx.memory.journal import BULK, FREE, FREE_ALL, SHRINK
from veloxquant_mlx.memory.lease import Group
from veloxquant_mlx.memory.stream import MERGED_REGION, Stream

__all__ = ["free_and_count", "free_batch", "release", "retire"]


def release(books: Books, owner: Owner) -> None:
    """Give back all that `owner` holds, and forget the owner. Never visits a block."""
    lease = books._owners.get(owner)
    if lease is None:
        if owner in books._waiting:
            del books._waiting[owner]
    elif lease._group is None:
        n = len(lease._blocks)
        _return(books, lease, True)
        lease._stream.gave(books._entry(FREE_ALL, lease, n, 0))
        if books._timed is not None and n >= BULK:
            books._timed(FREE_ALL, n, books._now)
    else:
        parts = tuple((kin, len(kin._blocks), None) for kin in lease._group.leases)
        _return_group(books, lease._group)
        books._rare(books._entry(FREE_ALL, parts, sum(n for _, n, _ in parts), 0))


def _return(books: Books, lease: Lease, last: bool) -> None:
    """Give back one lease, with its owner if it is the last: its list changes hands."""
    blocks: Any = lease._blocks
    n = len(blocks)
    owner = lease._owner
    stream = lease._stream
    gave, born, partial, peak, era = books._counts
    peak = max(peak, books._taken - gave)
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
        del books._owners[owner]
        if books._explicit and owner in books._explicit:
            del books._explicit[owner]
    lease._at = None
    lease._blocks = NOTHING
    if whole:
        stream.below += pushed
        stream.n_below += n_pushed
        stream.top = blocks
    else:
        stream.top += blocks
    stream.slack -= lease._slack
    books._counts = counts


def _return_group(books: Books, group: Group) -> None:
    """Give back every lease of an owner, first lease first."""
    last = group.leases[-1]
    try:
        for lease in group.leases:
            _return(books, lease, lease is last)
    except BaseException:
        # Half an owner is no state of the books: finish, then let the interrupt pass.
        for lease in filter(_lives, group.leases):
            _return(books, lease, lease is last)
        raise
    finally:
        # A free block keeps its lease, which must not keep the order of the whole request. To drop
        # that here would take a moment a turn; the next allocation of many blocks does it.
        books._spent.append(group)
        for lease in group.leases:
            lease._group = None


def _lives(lease: Lease) -> bool:
    return lease._at is not None


def free_batch(
    books: Books, batch: Sequence[Block], owner: Owner | None, leases: Collection[Lease] | None
) -> list[Block]:
    """Free those of `batch` that the books hold out (to `owner`, or under one of `leases`).

    Returns the others. Linear in the batch, whatever its order. An interrupt leaves it half done:
    each block is either freed or held.
    """
    refused: list[Block] = []
    freed: dict[Lease, list[Block]] = {}
    home, size = books._home, books._block_size
    n_gave = n_closed = 0
    # The lease of the block before, and what belongs to it; Any, since its list was made a dict.
    lease: Any = None
    held: Any = None
    group: Any = None
    run: Any = None
    stream: Any = None
    tomb: Any = None
    room = 0
    try:
        for block in batch:
            if block._lease is not lease:
                lease = block._lease
                if (
                    lease._at is not home
                    or (owner is not None and lease._owner != owner)
                    or (leases is not None and lease not in leases)
                ):
                    refused.append(block)
                    lease = None
                    continue
                tomb = lease._tomb or lease.tomb()  # before the dict: no tomb means a list
                if lease._blocks.__class__ is list:
                    _index(lease)
                held, stream, group = lease._blocks, lease._stream, lease._group
                run = freed.setdefault(lease, [])
                room = len(held) * size
            if room == size:
                n_closed += _free_last(books, block, lease, run)
                n_gave += 1
                lease = None
                continue
            one = (block,)
            fill = block._fill
            room -= size
            # A fill that was told in tokens (`add_filled`) may be another than the blocks'.
            slack = lease._slack + fill - size
            if slack < 0:
                slack = 0
            elif slack > room:
                slack = room
            # commit, and no `if` at the end of it: the jump back that CPython 3.12 and 3.13 make
            # for one is outside of the `try`, and a signal there would skip the `finally`
            if 0 < fill < size:
                n_closed += 1
                lease._partial -= 1
            del held[block]
            if group is not None:
                del group.order[block]
            block._lease = tomb
            run += one
            stream.top += one
            stream.slack += slack - lease._slack
            lease._slack = slack
            n_gave += 1
    finally:
        gave, born, partial, peak, era = books._counts
        in_use = books._taken - gave
        if in_use > peak:
            peak = in_use
        books._counts = (gave + n_gave, born, partial - n_closed, peak, era)
        if n_gave:
            parts = tuple((lease, len(run), run) for lease, run in freed.items() if run)
            books._rare(books._entry(FREE, parts, n_gave, 0))
    return refused


def _index(lease: Lease) -> None:
    """Turn the list of a lease into an ordered dict, so that single frees are constant.

    Once a lease, at its first single free: what is freed singly is often freed so again.
    """
    group = lease._group
    if group is not None and group.order is None:
        order = dict.fromkeys(group.ordered())
        # commit
        group.order = order
        group.turns = []
    lease._blocks = dict.fromkeys(lease._blocks)


def _free_last(books: Books, block: Block, lease: Lease, run: list[Block]) -> int:
    """Free the only block of a lease, end the lease, and its owner if it was the last lease.

    Returns 1 if the block was partly filled.
    """
    owner, stream, group = lease._owner, lease._stream, lease._group
    heirs = [] if group is None else [kin for kin in group.leases if kin is not lease]
    turn_of = {kin._stream: (kin,) for kin in heirs}
    key = (lease.stream, lease._format)
    one = (block,)
    marks = books._cached.marks
    marked = marks.get(owner)
    # commit
    lease._at = None
    lease._group = None
    lease._blocks = NOTHING
    run += one
    stream.top += one
    stream.slack -= lease._slack
    if heirs and group is not None:
        group.leases = heirs
        group.turn_of = turn_of
        del group.by_key[key]
        if group.order is not None:
            del group.order[block]
        books._owners[owner] = heirs[0]
        if marked is lease:
            marks[owner] = heirs[0]
    else:
        del books._owners[owner]
        if owner in books._explicit:
            del books._explicit[owner]
            books._waiting[owner] = None
    return lease._partial


def free_and_count(books: Books, batch: list[Block], owner: Owner | None) -> None:
    """`free_batch`, with the refused blocks counted by reason."""
    refused = free_batch(books, batch, owner, None)
    if refused:
        # A block freed by this very call and refused after is repeated, not free already.
        # By id: a subclass could bring a hash that calls the pool.
        freed = Counter(map(id, batch))
        freed.subtract(map(id, refused))
        for block in refused:
            reason = "repeated" if freed[id(block)] > 0 else books._reason(block, owner)
            books._incidents.refuse([reason or "stale"])


def retire(books: Books, stream: Stream, n: int, ids: list[int]) -> None:
    """Take the `n` coldest free blocks of `stream` out for good, their ids onto `ids`."""
    while n > 0:
        n_ids = min(n, stream.end_id - stream.next_id)
        step = list(range(stream.end_id - n_ids, stream.end_id))
        source = [] if n_ids else stream.coldest()
        gone = source[:n]
        count = n_ids + len(gone)
        from_below = bool(stream.below) and source is stream.below[0]
        emptied = from_below and count == len(source)
        gave, born, partial, peak, era = books._counts
        peak = max(peak, books._taken - gave)
        era = era._replace(n_blocks=era.n_blocks - count, n_retired=era.n_retired + count)
        counts = (gave, born, partial, peak, era)
        # commit
        stream.end_id -= n_ids
        del source[:n]
        if from_below:
            stream.n_below -= count
        if emptied:
            del stream.below[0]
        stream.managed -= count
        books._counts = counts
        n -= count
        for block in gone:
            block._lease = stream.retired
            step += (block._id,)
        ids += step
    books._rare(books._entry(SHRINK, ((stream.retired, len(ids), None),), len(ids), 0))
