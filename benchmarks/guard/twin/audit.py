"""Audit: recompute a pool's books from its lists. Linear in blocks; for checks, not for serving."""

from __future__ import annotations

from benchmarks.guard.twin.block import Block, Lease, Owner
from benchmarks.guard.twin.books import Books
from benchmarks.guard.twin.stream import Stream

__all__ = ["audit", "heal"]


def audit(books: Books) -> list[str]:
    """What is wrong with the books, a line each; the caller has the pool's lock."""
    faults: list[str] = []
    held: dict[str, int] = {stream.name: 0 for stream in books._streams}
    slack = dict(held)
    partial = 0
    seen: set[Block] = set()
    for owner, first in books._owners.items():
        leases = [first] if first._group is None else first._group.leases
        if first not in leases:
            faults.append(f"owner {owner!r} is filed under a lease outside its group")
        for lease in leases:
            blocks = list(lease._blocks)
            held[lease.stream] += len(blocks)
            slack[lease.stream] += lease._slack
            partial += lease._partial
            if lease._at is None or not blocks:
                faults.append(f"{lease!r} of owner {owner!r} is dead or empty")
            if lease._owner != owner:
                faults.append(f"{lease!r} is filed under owner {owner!r}")
            astray = sum(block._lease is not lease for block in blocks)
            if astray:
                faults.append(f"{astray} blocks of {lease!r} point elsewhere")
            if not seen.isdisjoint(blocks):
                faults.append(f"{lease!r} shares blocks with another lease")
            seen.update(blocks)
        if first._group is not None and sorted(b._id for b in first._group.ordered()) != sorted(
            b._id for lease in leases for b in lease._blocks
        ):
            faults.append(f"the order of owner {owner!r} names other blocks than its leases")
    for stream in books._streams:
        faults += _audit_stream(stream, held[stream.name], slack[stream.name], seen)
    gave, _, n_partial, _, era = books._counts
    in_use = books._taken - gave
    if in_use != sum(held.values()):
        faults.append(f"{in_use} blocks in use by the counters, {sum(held.values())} by the lists")
    if n_partial != partial:
        faults.append(f"{n_partial} partial blocks counted, {partial} by lease")
    if era.n_blocks != sum(stream.managed for stream in books._streams):
        faults.append("the streams do not add up to the managed blocks")
    return faults


def _audit_stream(stream: Stream, held: int, slack: int, seen: set[Block]) -> list[str]:
    faults = []
    free = stream.free_blocks()
    n_free = len(free) + stream.end_id - stream.next_id
    if stream.n_below != sum(map(len, stream.below)):
        faults.append(f"stream {stream.name}: {stream.n_below} blocks counted below the top")
    if stream.n_free != n_free:
        faults.append(f"stream {stream.name}: {stream.n_free} free counted, {n_free} listed")
    if n_free + held != stream.managed:
        faults.append(
            f"stream {stream.name}: {n_free} free + {held} held != {stream.managed} managed"
        )
    if len(set(free)) != len(free):
        faults.append(f"stream {stream.name}: a block is on the free list twice")
    if not seen.isdisjoint(free):
        faults.append(f"stream {stream.name}: a held block is on the free list")
    if any(getattr(block, "_lease", stream.retired)._at is not None for block in free):
        faults.append(f"stream {stream.name}: a free block points to a live lease")
    if stream.slack != slack:
        faults.append(f"stream {stream.name}: slack {stream.slack}, by lease {slack}")
    return faults


def heal(books: Books) -> None:
    """Finish what a fork cut off in another thread's call, by counting anew from the lists."""
    for owner, first in list(books._owners.items()):
        _heal_owner(books, owner, [first] if first._group is None else first._group.leases)
    partial = 0
    for stream in books._streams:
        stream.slack = 0
        for block in stream.free_blocks():
            lease = getattr(block, "_lease", stream.retired)
            if lease._at is not None:  # it was being marked
                block._lease = lease.tomb()
    for first in books._owners.values():
        for lease in [first] if first._group is None else first._group.leases:
            fills = [block._fill for block in lease._blocks]
            lease._partial = sum(0 < fill < books._block_size for fill in fills)
            partial += lease._partial
            lease._stream.slack += lease._slack
    in_use = sum(stream.managed - stream.n_free for stream in books._streams)
    _, born, _, peak, era = books._counts
    books._counts = (books._taken - in_use, born, partial, peak, era)


def _heal_owner(books: Books, owner: Owner, leases: list[Lease]) -> None:
    alive = [lease for lease in leases if lease._at is not None and lease._blocks]
    for lease in leases:
        if lease not in alive:
            lease._at = None
    if not alive:
        del books._owners[owner]
        if books._explicit.pop(owner, "") is None:
            books._waiting[owner] = None
    elif alive[0]._group is not None:
        group = alive[0]._group
        group.leases = alive
        group.forget_the_dead()
        group.by_key = {(lease.stream, lease._format): lease for lease in alive}
        books._owners[owner] = alive[0]
