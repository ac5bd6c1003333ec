"""Summary: what a pool looks like when an allocation fails, noted in bounded time, told when read."""

from __future__ import annotations

from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

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

__all__ = ["Summary", "summarize"]

# A failed allocation may be one of thousands, in a loop that waits for room: it looks at so many
# owners, the oldest ones, and never at all of them. What is noted becomes text when it is read.
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


class Summary(NamedTuple):
    """Numbers of a pool; as text, three lines. A tuple, since it is made under the pool's lock.

    Attributes:
        block_size: Token slots a block.
        streams: Name, free and managed blocks, and slots held but not filled, of each.
        n_owners: Owners that hold blocks.
        held: Blocks and owner, of the oldest owners.
        events: Operation, blocks, tokens of each stream, stream ("k+v" of both) and owner of the
            last calls, oldest first.
    """

    block_size: int
    streams: tuple[tuple[str, int, int, int], ...]
    n_owners: int
    held: tuple[tuple[int, Owner], ...]
    events: tuple[tuple[int, int, int, str, Owner | None], ...]

    def __str__(self) -> str:
        return f"{self._streams()}\n{self._holders()}\n{self._events()}"

    def _streams(self) -> str:
        parts = []
        for name, free, managed, slack in self.streams:
            slots = (managed - free) * self.block_size
            filled = min(slots, max(0, slots - slack))
            share = f"{100 * filled // slots}% filled" if slots else "none in use"
            parts.append(f"{name} {free} of {managed} blocks free, {share}")
        return f"streams: {'; '.join(parts)}"

    def _holders(self) -> str:
        top = nlargest(SHOWN, self.held, key=_blocks)
        among = f", among the {LOOKED_AT} oldest" if self.n_owners > LOOKED_AT else ""
        shown = ", ".join([f"{_shown(owner)} {n} blocks" for n, owner in top])
        return f"top holders of {self.n_owners} owners{among}: {shown or 'none'}"

    def _events(self) -> str:
        shown = []
        for operation, blocks, n_tokens, stream, owner in self.events:
            asked = f" for {n_tokens} tokens" if operation in (ALLOCATE, EXHAUSTED) else ""
            name = _NAMES.get(operation, str(operation))
            shown.append(f"{name} of {blocks} {stream}{asked} ({_shown(owner)})")
        return f"last events: {', '.join(shown) or 'none'}"


def summarize(books: Books) -> Summary:
    """Note what there is to be told. The pool's lock is held."""
    held = []
    for owner, lease in islice(books._owners.items(), LOOKED_AT):
        group = lease._group
        if group is None:
            held.append((len(lease._blocks), owner))
        else:
            held.append((sum([len(kin._blocks) for kin in group.leases]), owner))
    return Summary(
        books._block_size,
        tuple([(s.name, s.n_free, s.managed, s.slack) for s in books._streams]),
        len(books._owners),
        tuple(held),
        tuple([_event(entry) for entry in newest(books._journal, EVENTS)]),
    )


def _event(entry: Entry) -> tuple[int, int, int, str, Owner | None]:
    _, operation, what, n, n_tokens, _, _ = entry
    if isinstance(what, tuple):
        lease, asked, _ = what[0]
        if operation == EXHAUSTED:
            return operation, asked, n_tokens, lease.stream, lease.owner
        last = what[-1][0].stream
        stream = lease.stream if last == lease.stream else f"{lease.stream}+{last}"
        return operation, n, n_tokens, stream, lease.owner
    return operation, n, n_tokens, what._stream.name, what._owner


def _blocks(held: tuple[int, object]) -> int:
    return held[0]


def _shown(owner: object) -> str:
    if isinstance(owner, int):  # Python writes none of more than 4300 digits
        return str(owner) if owner.bit_length() < 128 else f"an int of {owner.bit_length()} bits"
    # A slice first: an owner id may be a page of text.
    return repr(owner[:MAX_OWNER_CHARS] if isinstance(owner, str) else owner)
