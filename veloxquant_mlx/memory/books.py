"""Books: who holds which block, what is free, and the counters; with what can be read off them.

The changes are in `taking` and `giving`. A change comes in two halves: first everything that may
fail or be interrupted, then a commit without a single call. CPython looks at signals only at calls,
loops and function entries, so a Ctrl-C falls before or after a commit, never into it. The comments
`# commit` mark where calls must stop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory.block import Block, Lease, Owner, detached_reason
from veloxquant_mlx.memory.cached_owners import CachedOwners
from veloxquant_mlx.memory.incidents import Incidents
from veloxquant_mlx.memory.journal import HISTORY, Counts, Entry, Era, Part
from veloxquant_mlx.memory.lease import Group
from veloxquant_mlx.memory.pool_config import PoolConfig
from veloxquant_mlx.memory.stream import Stream

__all__ = ["NOTHING", "Books"]

NOTHING: Final[list[Block]] = []  # what a dead lease holds; never changed


class Books:
    """State of a pool. It changes under the pool's lock only."""

    __slots__ = (
        "_block_size",
        "_cached",  # owners whose blocks a prompt cache keeps
        "_clock",
        "_config",
        "_counts",  # gave, born, partial, peak (as of the last release), era
        "_explicit",  # owners of register_owner that hold blocks
        "_home",  # the pool's token in its live leases
        "_incidents",
        "_journal",
        "_next_id",
        "_now",  # the clock as last read; the one-block path does not pay for reading it
        "_owners",  # the first lease of each owner that holds blocks
        "_rare",  # journal slot of calls with several parts and of failures
        "_spent",  # groups of released owners, whose order is yet to be dropped
        "_streams",
        "_taken",
        "_timed",  # told of bulk calls, growth and formats but fp16, when instrumented
        "_waiting",  # owners of register_owner that hold none
    )

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._block_size = config.block_size
        self._home = object()
        self._clock: Callable[[], int] = time.monotonic_ns
        self._now = self._clock()
        self._journal: deque[Entry] = deque(maxlen=HISTORY)
        log = self._journal.append
        self._rare: Callable[[Entry], None] = log
        self._timed: Callable[[int, int, int], None] | None = None
        n = config.n_blocks
        if config.separate_kv:
            n_keys = n - n // 2
            self._streams: tuple[Stream, ...] = (
                Stream("k", self._home, 0, n_keys, log),
                Stream("v", self._home, n_keys, n - n_keys, log),
            )
        else:
            self._streams = (Stream("kv", self._home, 0, n, log),)
        self._next_id = n
        self._owners: dict[Owner, Lease] = {}
        self._cached = CachedOwners(self._owners)
        self._waiting: dict[Owner, None] = {}
        self._explicit: dict[Owner, None] = {}
        self._spent: list[Group] = []
        self._taken = 0
        self._counts: Counts = (0, 0, 0, 0, Era(n_blocks=n))
        self._incidents = Incidents([stream.name for stream in self._streams])

    def _entry(
        self, operation: int, what: Lease | tuple[Part, ...], n: int, n_tokens: int
    ) -> Entry:
        return (self._now, operation, what, n, n_tokens, self._taken, self._counts)

    def _n_in_use(self) -> int:
        return self._taken - self._counts[0]

    def _n_held(self, owner: Owner) -> int:
        lease = self._owners.get(owner)
        if lease is None:
            return 0
        leases = [lease] if lease._group is None else lease._group.leases
        return sum(len(lease._blocks) for lease in leases)

    def _held(self, owner: Owner) -> list[Block]:
        """The blocks of `owner`, in the order of allocation."""
        lease = self._owners.get(owner)
        if lease is None:
            return []
        return list(lease._blocks if lease._group is None else lease._group.ordered())

    def _reason(self, block: Block, owner: Owner | None) -> str | None:
        """Why `block` is not held (by `owner`), or None when it is; needs no lock."""
        if not isinstance(block, Block):
            raise ArgumentTypeError(f"block must be a Block, got {block!r}")
        lease = block._lease
        detached = detached_reason(lease)
        if detached is not None:
            return detached
        stream = lease._stream
        if stream.home is not self._home:
            return "foreign"
        if lease._at is None:
            return "retired" if lease is stream.retired else "free"
        return None if owner is None or lease._owner == owner else "stale"
