"""Audit: recompute a pool's books from its lists. Linear in blocks; for checks, not for serving."""

from __future__ import annotations

from veloxquant_mlx.memory.block import Block
from veloxquant_mlx.memory.books import Books
from veloxquant_mlx.memory.stream import Stream

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
            if not lease._live or not blocks:
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
    in_use = books._taken - books._gave
    if in_use != sum(held.values()):
        faults.append(f"{in_use} blocks in use by the counters, {sum(held.values())} by the lists")
    if books._partial != partial:
        faults.append(f"{books._partial} partial blocks counted, {partial} by lease")
    if books._era.n_blocks != sum(stream.managed for stream in books._streams):
        faults.append("the streams do not add up to the managed blocks")
    return faults


def _audit_stream(stream: Stream, held: int, slack: int, seen: set[Block]) -> list[str]:
    faults = []
    free = stream.free_blocks()
    n_free = len(free) + stream.end_id - stream.next_id
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
    if any(getattr(block, "_lease", stream.retired)._live for block in free):
        faults.append(f"stream {stream.name}: a free block points to a live lease")
    if stream.slack != slack:
        faults.append(f"stream {stream.name}: slack {stream.slack}, by lease {slack}")
    return faults


def heal(books: Books) -> None:
    """Finish what a fork cut off: free blocks that another thread was marking point nowhere."""
    for stream in books._streams:
        for block in stream.free_blocks():
            lease = getattr(block, "_lease", stream.retired)
            if lease._live:
                block._lease = lease.tomb()
