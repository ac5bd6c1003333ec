"""Taking: how blocks go out to an owner, and how the pool makes room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block import Block, Lease, Owner
from veloxquant_mlx.memory.books import Books
from veloxquant_mlx.memory.journal import EXHAUSTED
from veloxquant_mlx.memory.lease import Group
from veloxquant_mlx.memory.stream import Stream, make_blocks
from veloxquant_mlx.memory.summary import summarize

__all__ = ["make_room", "take"]

# A Block and its place in a list, at least.
BLOCK_BYTES: Final = 64

_CAUSE = {
    "limit": "growth would pass max_blocks, or what memory can hold",
    "stranded": "the other stream has enough free blocks; separate_kv=False would share them",
    "full": "the pool may not grow",
}


def take(
    books: Books, stream: Stream, n_tokens: int, owner: Owner, fmt: str, n_filled: int
) -> list[Block]:
    """Hand out the blocks for `n_tokens`, of which `make_room` made sure that they are free.

    The caller enters it in the journal. Linear in blocks, by slices and one loop with two stores.
    """
    size = books._block_size
    n = -(-n_tokens // size)
    books._spent.clear()
    taken, n_born = _pick(stream, n)
    lease, group = _lease_for(books, stream, owner, fmt)
    held: Any = lease._blocks
    order = None if group is None else group.order
    keys = {} if order is None and held.__class__ is list else dict.fromkeys(taken)
    last_fill = n_tokens - (n - 1) * size
    is_partial = last_fill < size
    slack = n * size - n_filled
    gave, n_ever, partial, peak, era = books._counts
    counts = (gave, n_ever + n_born, partial + is_partial, peak, era)
    started = lease._at is None
    alone, key = (lease,), (stream.name, fmt)
    turn = (lease, n - 1) if n > 1 else alone
    reused, born = slice(n_born - n, None), slice(-n_born, None)
    _mark(taken, lease, size)
    # commit: returning from a function is no point where CPython looks at signals
    if n_born < n:
        del stream.top[reused]
    if n_born:
        del stream.unborn[born]
    taken[-1]._fill = last_fill
    if held.__class__ is list:
        held += taken
    else:
        held |= keys
    if group is not None:
        if started:
            group.leases += alone
            group.by_key[key] = lease
        group.turn_of[stream] = alone
        if order is None:
            group.turns += turn
        else:
            order |= keys
    if started:
        lease._at = books._home
        lease._born_ns = books._now
        if owner not in books._owners:
            books._owners[owner] = lease
            if owner in books._waiting:
                del books._waiting[owner]
                books._explicit[owner] = None
        else:
            books._owners[owner]._group = lease._group = group
    books._taken += n
    books._counts = counts
    stream.slack += slack
    lease._slack += slack
    lease._partial += is_partial
    return taken


def _pick(stream: Stream, n: int) -> tuple[list[Block], int]:
    """The next `n` free blocks, left where they are, and how many of them were never handed out."""
    stream.expose(n)
    n_reused = min(n, len(stream.top))
    n_born = n - n_reused
    picked = stream.top[-n_reused:] if n_reused else []
    picked.reverse()
    if n_born:
        stream.mint(n_born)
        born = stream.unborn[-n_born:]
        born.reverse()
        picked += born
    return picked, n_born


def _lease_for(books: Books, stream: Stream, owner: Owner, fmt: str) -> tuple[Lease, Group | None]:
    """The lease to take under, dead if it is new, and its group, detached if it is new."""
    first = books._owners.get(owner)
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


def _mark(taken: Sequence[Block], lease: Lease, size: int) -> None:
    """Point `taken`, still on the free list, to `lease`."""
    try:
        # The one loop over blocks of an allocation: two stores, about 20 ns a block.
        for block in taken:
            block._lease = lease
            block._fill = size
    except BaseException:
        # Interrupted: free blocks must not point to a lease that lives.
        if lease._at is not None:
            tomb = lease.tomb()
            for block in taken:
                block._lease = tomb
        raise


def make_room(books: Books, streams: tuple[Stream, ...], n_tokens: int, owner: Owner) -> None:
    """Grow each of `streams` by what it lacks for `n_tokens`, or raise and change nothing.

    A stream named twice has to have room twice.

    Raises:
        BlockPoolExhaustedError: The pool may not grow, or not that far.
    """
    n = -(-n_tokens // books._block_size)
    need: dict[Stream, int] = {}
    for stream in streams:
        need[stream] = need.get(stream, 0) + n
    short = {stream: n - stream.n_free for stream, n in need.items() if n > stream.n_free}
    if not short:
        return
    config = books._config
    limit = config.max_blocks if config.grow_on_exhaustion else 0
    n_more = sum(short.values())
    over = limit is not None and books._counts[4].n_blocks + n_more > limit
    if over or not _fits_in_memory(n_more):
        _fail(books, need, short, n_tokens, owner)
    for stream, n_short in short.items():
        _grow(books, stream, n_short)
    if config.grow_on_exhaustion:
        books._incidents.grow_attempts["full"] += 1


def _fits_in_memory(n_blocks: int) -> bool:
    """Whether the system would give memory for so many blocks at all.

    Growth without a limit must end in an error, not in the kernel's choice of a process to kill.
    """
    try:
        bytes(n_blocks * BLOCK_BYTES)  # asked for and given back, never touched
    except (MemoryError, OverflowError):
        return False
    return True


def _grow(books: Books, stream: Stream, n: int) -> None:
    """Add `n` blocks to `stream`."""
    made = make_blocks(range(books._next_id, books._next_id + n))
    made.reverse()
    # Ids left to mint would have to go first, and growth means that none are free.
    stream.mint(stream.n_free)
    unborn = made + stream.unborn
    gave, born, partial, peak, era = books._counts
    era = era._replace(n_blocks=era.n_blocks + n, n_grown=era.n_grown + n)
    counts = (gave, born, partial, peak, era)
    # commit
    stream.unborn = unborn
    stream.managed += n
    books._next_id += n
    books._counts = counts


def _fail(
    books: Books, need: dict[Stream, int], short: dict[Stream, int], n_tokens: int, owner: Owner
) -> NoReturn:
    """Count an exhaustion and raise it."""
    stream, n_short = next(iter(short.items()))
    others = sum(other.n_free for other in books._streams if other not in short)
    if books._config.grow_on_exhaustion:
        reason = "limit"
        books._incidents.grow_attempts["denied"] += 1
    else:
        reason = "stranded" if others >= sum(short.values()) else "full"
    books._incidents.exhaust(stream.name, reason, n_short)
    gave, born, partial, peak, era = books._counts
    era = era._replace(n_exhausted=era.n_exhausted + 1)
    books._counts = (gave, born, partial, peak, era)
    summary = summarize(books)
    # Every stream that was asked, the one that fell short first: so a trace can ask again.
    asked = [stream, *(other for other in need if other is not stream)]
    parts = tuple([(Lease(one, owner, "fp16"), need[one], None) for one in asked])
    books._rare(books._entry(EXHAUSTED, parts, 0, n_tokens))
    raise BlockPoolExhaustedError(
        f"stream {stream.name!r} has {stream.n_free} of {need[stream]} blocks that owner "
        f"{owner!r} needs for {n_tokens} tokens ({_CAUSE[reason]}; pool of "
        f"{era.n_blocks} blocks, {books._n_in_use()} in use)",
        stream=stream.name,
        requested=need[stream],
        free=stream.n_free,
        owner=owner,
        reason=reason,
        summary=summary,
    )
