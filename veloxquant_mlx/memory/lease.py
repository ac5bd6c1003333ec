"""Lease: one continuous holding, and the Group of an owner that has several.

A lease is one continuous holding of one owner in one stream and format. Dead leases stay dead;
who holds again gets a new one, which is how a storage tells a new holder from the old.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block import Block
    from veloxquant_mlx.memory.stream import Stream

__all__ = ["Group", "Lease", "Owner"]

Owner = int | str


class Lease:
    """One continuous holding; opaque to callers, who may compare identity and read properties.

    The books' fields are private to `veloxquant_mlx.memory` and change under the pool's lock only.
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

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Lease cannot be copied or pickled: it is the identity of one holding. Keep the lease "
            "itself, or its owner, stream and format"
        )

    def __repr__(self) -> str:
        state = "live" if self._at is not None else "dead"
        return f"<Lease {state} owner={self._owner!r} {self.stream}/{self._format}>"


class Group:
    """The leases of an owner that has more than one, and the order in which they took blocks."""

    __slots__ = ("by_key", "leases", "order", "turn_of", "turns")

    def __init__(self, first: Lease) -> None:
        self.leases = [first]
        self.by_key = {(first.stream, first.format): first}
        # Per stream the lease that took last, as a turn: made once, so that growth makes nothing.
        self.turn_of: dict[Stream, tuple[Lease]] = {first._stream: (first,)}
        # Until the first single free: each lease that took, and after it how many blocks more than
        # one. From then on a dict of the blocks.
        self.turns: list[Lease | int] = []
        self.order: dict[Block, None] | None = None
        if isinstance(first._blocks, dict):
            self.order = dict(first._blocks)
        elif first._blocks:
            self.turns = [first, len(first._blocks) - 1]

    def ordered(self) -> Iterable[Block]:
        """Every held block, in the order of allocation over all leases."""
        if self.order is not None:
            return self.order
        heads = {lease: iter(lease._blocks) for lease in self.leases}
        head: Iterator[Block] = iter(())
        blocks: list[Block] = []
        for turn in self.turns:
            if isinstance(turn, Lease):
                head = heads[turn]
            blocks.extend(islice(head, 1 if isinstance(turn, Lease) else turn))
        return blocks

    def keep(self, alive: list[Lease]) -> None:
        """Go on with those of the leases that are `alive`."""
        self.order = dict.fromkeys(block for block in self.ordered() if block._lease in alive)
        self.turns = []
        self.leases = alive
        self.by_key = {(lease.stream, lease.format): lease for lease in alive}
        self.turn_of = {lease._stream: (lease,) for lease in alive}
