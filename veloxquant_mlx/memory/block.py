"""Block and Lease: what a pool hands out, and the holding it belongs to.

A block stores its id, the lease it was last given to, and its fill. Everything else that a caller
reads of it (owner, stream, format) is its lease's. So a release marks one lease dead instead of
visiting its blocks: a block is in use exactly while its lease is live.

A lease is one continuous holding of one owner in one stream and format. Dead leases stay dead;
who holds again gets a new one, which is how a storage tells a new holder from the old.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from veloxquant_mlx.memory.stream import Stream

__all__ = ["COPIED", "DETACHED", "Block", "Lease", "Owner", "detached_reason"]

Owner = int | str

DETACHED: Final = "foreign"
COPIED: Final = "copied"


class Lease:
    """One continuous holding; opaque to callers, who may compare identity and read properties.

    The books' fields are private to `veloxquant_mlx.memory` and change under the pool's lock only.
    """

    # Fields in order of use by the one-block path. `_at` is the pool's token, not the pool: a
    # reference back would make a dropped pool live until a full garbage collection.
    __slots__ = (
        "_at",  # the token of the pool while the lease lives, else None
        "_blocks",  # list, or an insertion-ordered dict once a block was freed singly
        "_born_ns",
        "_format",
        "_group",  # the owner's Group, when it has several leases
        "_owner",
        "_plain",  # its stream while it is the owner's one lease and a list, else None
        "_partial",  # blocks with 0 < n_used < block_size
        "_slack",  # token slots held but not filled
        "_stream",
        "_tomb",  # dead twin that singly freed blocks point to
    )

    def __init__(self, stream: Stream | None, owner: Owner | None, fmt: str) -> None:
        self._stream = stream
        self._owner = owner
        self._format = fmt
        self._blocks: list[Block] | dict[Block, None] = []
        self._at: object | None = None
        self._plain: Stream | None = stream
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
        return self._owner

    @property
    def stream(self) -> str:
        """"k", "v" or "kv"; "" of an owner that is registered and holds nothing yet."""
        return "" if self._stream is None else self._stream.name

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

    __slots__ = ("by_key", "leases", "order", "turns")

    def __init__(self, first: Lease) -> None:
        self.leases = [first]
        self.by_key = {(first.stream, first.format): first}
        # Alternating lease, count. Replaced by `order` at the first single free.
        self.turns: list[Lease | int] | None = []
        self.order: dict[Block, None] | None = None
        if isinstance(first._blocks, dict):
            self.turns, self.order = None, dict(first._blocks)
        elif first._blocks:
            self.turns = [first, len(first._blocks)]

    def ordered(self) -> Iterable[Block]:
        """Every held block, in the order of allocation over all leases."""
        if self.turns is None:
            return self.order or ()
        heads = {lease: iter(lease._blocks) for lease in self.leases}
        blocks: list[Block] = []
        for lease, count in zip(self.turns[::2], self.turns[1::2], strict=True):
            blocks.extend(islice(heads[lease], count))  # type: ignore[index, arg-type]
        return blocks

    def forget_the_dead(self) -> None:
        """Drop from the order what leases no longer in the group took."""
        if self.order is not None:
            self.order = dict.fromkeys(b for b in self.order if b._lease in self.leases)
        elif self.turns is not None:
            pairs = zip(self.turns[::2], self.turns[1::2], strict=True)
            self.turns = [x for pair in pairs if pair[0] in self.leases for x in pair]


class Block:
    """One fixed-size block of KV-cache storage: a handle that only its pool can change.

    One object stands for a block id for the pool's life, compared by identity. Fields are
    read-only. A block built by hand, copied or unpickled is a detached value: it shows what it was
    given and no pool accepts it.

    Args:
        block_id: Index into the pool's backing storage, stable for the pool's life.
        stream: "k" or "v", or "kv" in a unified pool.
        format: Format tag of the data stored in the block, e.g. "fp16" or "int4".
        n_used: Token slots occupied, 0..block_size.
        owner: Request the block is checked out to; None when it is free.
        ever_allocated: True once the block was handed out.
    """

    __slots__ = ("_fill", "_id", "_lease")

    def __init__(
        self,
        block_id: int,
        stream: str = "kv",
        format: str = "fp16",
        n_used: int = 0,
        owner: Owner | None = None,
        ever_allocated: bool = False,
    ) -> None:
        self._id = block_id
        self._fill = n_used
        self._lease: Lease = _DetachedLease(stream, format, owner, ever_allocated, DETACHED)

    @property
    def block_id(self) -> int:
        """Index into the backing storage."""
        return self._id

    @property
    def stream(self) -> str:
        """Logical stream, "k", "v" or "kv"."""
        return self._lease.stream

    @property
    def format(self) -> str:
        """Format tag; of a free block, the tag it had last."""
        return self._lease._format

    @property
    def n_used(self) -> int:
        """Occupied token slots; 0 of a free block, unless `mark_used` said otherwise."""
        lease = self._lease
        return self._fill if lease._at is not None or isinstance(lease, _ShownLease) else 0

    @property
    def owner(self) -> Owner | None:
        """Present holder, or None."""
        lease = self._lease
        return lease._owner if lease._at is not None or isinstance(lease, _DetachedLease) else None

    @property
    def ever_allocated(self) -> bool:
        """True of every block that a pool handed out."""
        lease = self._lease
        return lease.ever_allocated if isinstance(lease, _DetachedLease) else True

    @property
    def lease(self) -> Lease:
        """The holding that the block belongs to, dead if the block is free."""
        return self._lease

    def __repr__(self) -> str:
        return (
            f"Block(block_id={self.block_id}, stream={self.stream!r}, format={self.format!r}, "
            f"n_used={self.n_used}, owner={self.owner!r}, ever_allocated={self.ever_allocated})"
        )

    def __copy__(self) -> Block:
        return _detached_copy(*_fields(self))

    def __deepcopy__(self, memo: object) -> Block:
        return self.__copy__()

    def __reduce__(self) -> tuple[object, ...]:
        return _detached_copy, _fields(self)


class _ShownLease(Lease):
    """A dead lease whose blocks show their stored fill."""

    __slots__ = ()


class _DetachedLease(_ShownLease):
    """The lease of a block that belongs to no pool."""

    __slots__ = ("_stream_name", "ever_allocated", "why")

    def __init__(
        self, stream: str, fmt: str, owner: Owner | None, ever_allocated: bool, why: str
    ) -> None:
        super().__init__(None, owner, fmt)
        self._stream_name = stream
        self.ever_allocated = ever_allocated
        self.why = why

    @property
    def stream(self) -> str:
        return self._stream_name


def shown_lease(lease: Lease) -> Lease:
    """A dead lease like `lease` under which a free block shows the fill that it was told."""
    return _ShownLease(lease._stream, lease._owner, lease._format)


def detached_reason(lease: Lease) -> str | None:
    """"foreign" or "copied" when the block of this lease belongs to no pool, else None."""
    return lease.why if isinstance(lease, _DetachedLease) else None


def _fields(block: Block) -> tuple[int, str, str, int, Owner | None, bool]:
    return (
        block.block_id,
        block.stream,
        block.format,
        block.n_used,
        block.owner,
        block.ever_allocated,
    )


def _detached_copy(
    block_id: int, stream: str, fmt: str, n_used: int, owner: Owner | None, ever_allocated: bool
) -> Block:
    copied = Block(block_id, stream, fmt, n_used, owner, ever_allocated)
    copied._lease = _DetachedLease(stream, fmt, owner, ever_allocated, COPIED)
    return copied
