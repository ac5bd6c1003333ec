"""Lease: one continuous holding, and the Group of an owner that has several.

A lease is one continuous holding of one owner in one stream and format. Dead leases stay dead;
who holds again gets a new one, which is how a storage tells a new holder from the old.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.guard.twin.block import Block
    from benchmarks.guard.twin.stream import Stream

__all__ = ["Group", "Lease", "Owner"]

Owner = int | str


class Lease:
    """One continuous holding; opaque to callers, who may compare identity and read properties.

    The books' fields are private to `benchmarks.guard.twin` and change under the pool's lock only.
    """

    # `_at` is the pool's token, not the pool: a reference back would make a dropped pool live
    # until a full garbage collection.
    __slots__ = (
        "_at",  # the token of the pool while the lease lives, else None
        "_blocks",  # list, or an insertion-ordered dict once a block was freed singly
        "_born_ns",
        "_format",
        "_group",  # the owner's Group, when it has several leases
        "_owner",
        "_partial",  # blocks with 0 < n_used < block_size
        "_slack",  # token slots held but not filled
        "_stream",
        "_tomb",  # dead twin that singly freed blocks point to
    )

    def __init__(self, stream: Stream, owner: Owner | None, fmt: str) -> None:
        self._stream = stream
        # None in leases that never live, so the books may take it for an Owner.
        self._owner: Any = owner
        self._format = fmt
        self._blocks: list[Block] | dict[Block, None] = []
        self._at: object | None = None
        self._partial = 0
        self._slack = 0
        self._born_ns = 0
        self._group: Group | None = None
        self._tomb: Lease | None = None

    @property
    def live(self) -> bool:
        """True until released; never True again after."""
        return self._at is not None

    @property
    def owner(self) -> Owner | None:
        """The holder, also after the release."""
        owner: Owner | None = self._owner
        return owner

    @property
    def stream(self) -> str:
        """Name of the stream: k, v or kv."""
        return self._stream.name

    @property
    def format(self) -> str:
        """The tag given at allocation."""
        return self._format

    def tomb(self) -> Lease:
        """The dead twin that blocks freed singly point to."""
        if self._tomb is None:
            self._tomb = Lease(self._stream, self._owner, self._format)
        return self._tomb

    def __repr__(self) -> str:
        state = "live" if self._at is not None else "dead"
        return f"<Lease {state} owner={self._owner!r} {self.stream}/{self._format}>"


class Group:
    """The leases of an owner that has more than one, and the order in which they took blocks."""

    __slots__ = ("by_key", "leases", "order", "step_of", "turns")

    def __init__(self, first: Lease) -> None:
        self.leases = [first]
        self.by_key = {(first.stream, first.format): first}
        # Per stream the lease that took last, as a turn of one block: made once, so that growth by
        # one block makes nothing.
        self.step_of: dict[Stream, tuple[Lease, int]] = {first._stream: (first, 1)}
        # Lease, count, lease, count, ... until the first single free, and a dict from then on.
        self.turns: list[Any] = []
        self.order: dict[Block, None] | None = None
        if isinstance(first._blocks, dict):
            self.order = dict(first._blocks)
        elif first._blocks:
            self.turns = [first, len(first._blocks)]

    def ordered(self) -> Iterable[Block]:
        """Every held block, in the order of allocation over all leases."""
        if self.order is not None:
            return self.order
        heads: dict[Any, Any] = {lease: iter(lease._blocks) for lease in self.leases}
        blocks: list[Block] = []
        for lease, count in zip(self.turns[::2], self.turns[1::2], strict=True):
            blocks.extend(islice(heads[lease], count))
        return blocks

    def forget_the_dead(self) -> None:
        """Drop from the order what leases no longer in the group took."""
        if self.order is not None:
            self.order = dict.fromkeys(b for b in self.order if b._lease in self.leases)
        else:
            pairs = zip(self.turns[::2], self.turns[1::2], strict=True)
            self.turns = [x for pair in pairs if pair[0] in self.leases for x in pair]
