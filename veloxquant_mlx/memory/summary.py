"""Summary: what a pool looks like when an allocation fails, in a few lines and in bounded time."""

from __future__ import annotations

from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.memory.journal import (
    ALLOCATE,
    EXHAUSTED,
    FREE,
    FREE_ALL,
    SHRINK,
    newest,
)

if TYPE_CHECKING:
    from veloxquant_mlx.memory.books import Books
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.memory.lease import Owner

__all__ = ["summarize"]

# A failed allocation may be one of thousands, in a loop that waits for room: it looks at so many
# owners, the oldest ones, and never at all of them.
LOOKED_AT: Final = 32
SHOWN: Final = 3
EVENTS: Final = 4
MAX_OWNER_CHARS: Final = 40

_NAMES: Final = {
    ALLOCATE: "allocate",
    EXHAUSTED: "refused",
    FREE: "free",
    FREE_ALL: "free_all",
    SHRINK: "shrink",
}


def summarize(books: Books) -> str:
    """By stream, top holders, last events: a line each. The pool's lock is held."""
    return "\n".join((_streams(books), _holders(books), _events(books)))


def _streams(books: Books) -> str:
    parts = []
    for stream in books._streams:
        free = stream.n_free
        slots = (stream.managed - free) * books._block_size
        filled = min(slots, max(0, slots - stream.slack))
        share = f"{100 * filled // slots}% filled" if slots else "none in use"
        parts.append(f"{stream.name} {free} of {stream.managed} blocks free, {share}")
    return f"streams: {'; '.join(parts)}"


def _holders(books: Books) -> str:
    n_owners = len(books._owners)
    held: list[tuple[int, Owner]] = []
    for owner, lease in islice(books._owners.items(), LOOKED_AT):
        group = lease._group
        n = len(lease._blocks)
        if group is not None:
            n = sum([len(kin._blocks) for kin in group.leases])
        held.append((n, owner))
    top = nlargest(SHOWN, held, key=_blocks)
    among = f", among the {LOOKED_AT} oldest" if n_owners > LOOKED_AT else ""
    shown = ", ".join([f"{_shown(owner)} {n} blocks" for n, owner in top])
    return f"top holders of {n_owners} owners{among}: {shown or 'none'}"


def _blocks(held: tuple[int, object]) -> int:
    return held[0]


def _shown(owner: object) -> str:
    if isinstance(owner, int):  # Python writes none of more than 4300 digits
        return str(owner) if owner.bit_length() < 128 else f"an int of {owner.bit_length()} bits"
    # A slice first: an owner id may be a page of text.
    return repr(owner[:MAX_OWNER_CHARS] if isinstance(owner, str) else owner)


def _events(books: Books) -> str:
    events = map(_event, newest(books._journal, EVENTS))
    return f"last events: {', '.join(events) or 'none'}"


def _event(entry: Entry) -> str:
    _, operation, what, n, n_tokens, _, _ = entry
    lease = what[0][0] if isinstance(what, tuple) else what
    asked = f" for {n_tokens} tokens" if operation in (ALLOCATE, EXHAUSTED) else ""
    blocks = what[0][1] if operation == EXHAUSTED and isinstance(what, tuple) else n
    name = _NAMES.get(operation, str(operation))
    return f"{name} of {blocks} {lease._stream.name}{asked} ({_shown(lease._owner)})"
