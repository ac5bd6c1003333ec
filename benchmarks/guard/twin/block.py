"""Block: what a pool hands out.

A block stores its id, the lease it was last given to, and its fill. Everything else that a caller
reads of it (owner, stream, format) is its lease's. So a release marks one lease dead instead of
visiting its blocks: a block is in use exactly while its lease is live.
"""

from __future__ import annotations

from typing import Final

from benchmarks.guard.twin.lease import Lease, Owner

__all__ = ["COPIED", "DETACHED", "Block", "Lease", "Owner", "detached_reason", "shown_lease"]

DETACHED: Final = "foreign"
COPIED: Final = "copied"


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
        # No stream: the books ask `detached_reason` before they look at one.
        self._at = None
        self._owner = owner
        self._format = fmt
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
    """Why the block of this lease belongs to no pool, "foreign" or "copied"; None if it does."""
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
