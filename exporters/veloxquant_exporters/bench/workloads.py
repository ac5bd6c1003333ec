"""Workloads: the calls whose cost is watched, each over sizes on one axis.

A workload makes a `Round`, whose `ready` restores the start (untimed), `run` does `calls` calls, and
`check` raises when the work was not done: a benchmark of nothing is fast.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from veloxquant_exporters.bench.target import BLOCK_SIZE, Factory

__all__ = ["WORKLOADS", "NotDoneError", "Round", "UnsupportedError", "Workload"]

Kind = Literal["flat", "linear"]
OWNER, POOL, OWNERS = "blocks an owner", "blocks a pool", "owners"


class NotDoneError(AssertionError):
    """A round ended without having done its work."""


class UnsupportedError(Exception):
    """The target lacks a method that the workload calls."""


class Round(Protocol):
    """One repeatable piece of work."""

    def ready(self) -> None:
        """Restore the start; not timed."""

    def run(self) -> None:
        """Do the calls; timed."""

    def check(self) -> None:
        """Raise `NotDoneError` unless `run` did its work."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is called, over what, and what shape it should have.

    Attributes:
        name: As in the budgets and in every report.
        axis: What the size counts.
        kind: "flat" or "linear" in the size.
        calls: Calls a timed round; so many that a round is well above the clock's grain.
        blocks: Blocks a call touches, as text for reports; "n" is the size.
        sizes: Sizes of the timed layer.
        prepare: `(factory, size, calls) -> Round`.
        methods: What the target must have.
        needs_ours: True when it watches the pool through `veloxquant_mlx.telemetry`.
    """

    name: str
    axis: str
    kind: Kind
    calls: int
    blocks: str
    sizes: tuple[int, ...]
    prepare: Callable[[Factory, int, int], Round]
    methods: tuple[str, ...] = ()
    needs_ours: bool = False

    def start(self, factory: Factory, size: int, calls: int | None = None) -> Round:
        """A round of this workload on a new pool.

        Raises:
            UnsupportedError: The target lacks one of `methods`.
        """
        pool = factory(1)
        missing = [name for name in self.methods if not hasattr(pool, name)]
        if missing:
            raise UnsupportedError(f"{self.name}: the target has no {', '.join(missing)}")
        return self.prepare(factory, size, self.calls if calls is None else calls)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise NotDoneError(f"{what} is {found!r} after the round, expected {expected!r}")


class FreeAll:
    """Release of `calls` owners of `n` blocks each, in a pool of `spare` blocks more."""

    def __init__(self, factory: Factory, n: int, calls: int, *, others: int = 0) -> None:
        self.n, self.owners = n, range(1, calls + 1)
        self.pool = factory(n * calls + others)
        if others:
            self.pool.allocate("k", others * BLOCK_SIZE, 0)

    def ready(self) -> None:
        """All owners hold their blocks."""
        for owner in self.owners:
            self.pool.allocate("k", self.n * BLOCK_SIZE, owner)
        _expect("n_free at the start", self.pool.n_free("k"), 0)

    def run(self) -> None:
        """Release each."""
        free_all = self.pool.free_all
        for owner in self.owners:
            free_all(owner)

    def check(self) -> None:
        """All is free."""
        _expect("n_free", self.pool.n_free("k"), self.n * len(self.owners))


class FreeAllMixed(FreeAll):
    """Release of owners whose blocks are of two formats in turns, the first freed singly.

    What an owner holds is then no plain list any more.
    """

    def ready(self) -> None:
        """All owners hold their blocks, but one each."""
        turn = self.n // 8
        for owner in self.owners:
            first = self.pool.allocate("k", turn * BLOCK_SIZE, owner, "fp16")[:1]
            for n_turn in range(1, 8):
                self.pool.allocate("k", turn * BLOCK_SIZE, owner, ("fp16", "int4")[n_turn % 2])
            self.pool.free(first)
        _expect("n_free at the start", self.pool.n_free("k"), len(self.owners))


class FreeAllAmongOwners:
    """Release of `calls` of `n` owners, each of 4 blocks."""

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        self.pool = factory(4 * n)
        self.owners = range(0, n, max(1, n // calls))[:calls]
        for owner in range(n):
            self.pool.allocate("k", 4 * BLOCK_SIZE, owner)
        for owner in self.owners:
            self.pool.free_all(owner)

    def ready(self) -> None:
        """The chosen owners hold their blocks again."""
        for owner in self.owners:
            self.pool.allocate("k", 4 * BLOCK_SIZE, owner)

    def run(self) -> None:
        """Release each."""
        free_all = self.pool.free_all
        for owner in self.owners:
            free_all(owner)

    def check(self) -> None:
        """What they held is free."""
        _expect("n_free", self.pool.n_free("k"), 4 * len(self.owners))


class Allocate:
    """One allocation of `n` blocks for each of `calls` owners."""

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        self.n, self.owners = n, range(1, calls + 1)
        self.pool = factory(n * calls)
        self.run()  # every block was handed out once: the first time makes it

    def ready(self) -> None:
        """All is free."""
        for owner in self.owners:
            self.pool.free_all(owner)

    def run(self) -> None:
        """Allocate."""
        allocate, n_tokens = self.pool.allocate, self.n * BLOCK_SIZE
        for owner in self.owners:
            allocate("k", n_tokens, owner)

    def check(self) -> None:
        """Nothing is free."""
        _expect("n_free", self.pool.n_free("k"), 0)


class GrowOne:
    """Growth by one block, `calls` times, of an owner of `n` blocks: the decode step."""

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        self.n, self.calls = n, calls
        self.pool = factory(n + calls)
        self.pool.allocate("k", (n + calls) * BLOCK_SIZE, 1)

    def ready(self) -> None:
        """The owner holds `n` blocks."""
        self.pool.free_all(1)
        self.pool.allocate("k", self.n * BLOCK_SIZE, 1)

    def run(self) -> None:
        """Grow."""
        allocate = self.pool.allocate
        for _ in range(self.calls):
            allocate("k", BLOCK_SIZE, 1)

    def check(self) -> None:
        """Nothing is free."""
        _expect("n_free", self.pool.n_free("k"), 0)


class FreeList:
    """`free` of a list of `n` blocks, oldest first, or newest first."""

    def __init__(self, factory: Factory, n: int, calls: int, *, newest_first: bool) -> None:
        self.n, self.owners, self.newest_first = n, range(1, calls + 1), newest_first
        self.pool = factory(n * calls)
        self.lists: list[list[Any]] = []

    def ready(self) -> None:
        """Each owner holds its blocks, and they are listed."""
        self.lists = [self.pool.allocate("k", self.n * BLOCK_SIZE, o) for o in self.owners]
        if self.newest_first:
            self.lists = [blocks[::-1] for blocks in self.lists]

    def run(self) -> None:
        """Free each list."""
        free = self.pool.free
        for blocks in self.lists:
            free(blocks)

    def check(self) -> None:
        """All is free."""
        _expect("n_free", self.pool.n_free("k"), self.n * len(self.lists))


class BlocksFor:
    """The list of an owner's `n` blocks, `calls` times."""

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        self.n, self.calls, self.seen = n, calls, 0
        self.pool = factory(n)
        self.pool.allocate("k", n * BLOCK_SIZE, 1)

    def ready(self) -> None:
        """Nothing was seen."""
        self.seen = 0

    def run(self) -> None:
        """Ask."""
        blocks_for = self.pool.blocks_for
        for _ in range(self.calls):
            self.seen += len(blocks_for(1))

    def check(self) -> None:
        """All were listed."""
        _expect("blocks listed", self.seen, self.n * self.calls)


class Shrink:
    """Retiring `n` blocks that were used and given back; each round on new pools."""

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        self.factory, self.n, self.calls = factory, n, calls
        self.pools: list[Any] = []
        self.retired = 0

    def ready(self) -> None:
        """New pools, all free, every block handed out before."""
        self.pools = [self.factory(self.n) for _ in range(self.calls)]
        self.retired = 0
        for pool in self.pools:
            pool.allocate("k", self.n * BLOCK_SIZE, 1)
            pool.free_all(1)

    def run(self) -> None:
        """Retire everything."""
        for pool in self.pools:
            self.retired += pool.shrink("k", 0)

    def check(self) -> None:
        """All is retired."""
        _expect("blocks retired", self.retired, self.n * self.calls)


class MarkUsed:
    """`mark_used` on `calls` of `n` held blocks."""

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        pool = factory(n)
        apart = max(1, n // calls)
        # Up to the last one: a search from the front must not find its block at once.
        self.blocks = pool.allocate("k", n * BLOCK_SIZE, 1)[apart - 1 :: apart]
        self.pool, self.fills = pool, itertools.cycle((7, 9))
        self.fill = 0

    def ready(self) -> None:
        """Another fill than before."""
        self.fill = next(self.fills)

    def run(self) -> None:
        """Mark."""
        mark_used, fill = self.pool.mark_used, self.fill
        for block in self.blocks:
            mark_used(block, fill)

    def check(self) -> None:
        """The last one has its fill, where blocks are objects."""
        last = self.blocks[-1]
        _expect("n_used", getattr(last, "n_used", self.fill), self.fill)


class Read:
    """A read of the pool, `calls` times, with `n` blocks held by one owner."""

    def __init__(
        self, factory: Factory, n: int, calls: int, read: Callable[[Any], int], expected: int = -1
    ) -> None:
        self.calls, self.seen, self.read = calls, 0, read
        self.expected = n if expected < 0 else expected
        self.pool = factory(n + 1)
        self.pool.allocate("k", n * BLOCK_SIZE, 1)

    def ready(self) -> None:
        """Nothing was seen."""
        self.seen = 0

    def run(self) -> None:
        """Read."""
        read, pool = self.read, self.pool
        for _ in range(self.calls):
            self.seen += read(pool)

    def check(self) -> None:
        """Each read told the truth."""
        _expect("what was read", self.seen, self.expected * self.calls)


class Registration:
    """`register_owner` and `release_owner` beside `n` owners, `calls` times."""

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        self.pool, self.calls, self.n = factory(n), calls, n
        for owner in range(n):
            self.pool.allocate("k", BLOCK_SIZE, owner)

    def ready(self) -> None:
        """Nobody else is registered."""

    def run(self) -> None:
        """Register and release."""
        register, release = self.pool.register_owner, self.pool.release_owner
        for _ in range(self.calls):
            register("newcomer")
            release("newcomer")

    def check(self) -> None:
        """The newcomer is gone: it can be registered, which an active owner cannot."""
        self.pool.register_owner("newcomer")
        self.pool.release_owner("newcomer")


def _instrument(pool: Any) -> Any:
    """Watch the pool; what telemetry does not know is left out, and said."""
    try:
        return importlib.import_module("veloxquant_mlx.telemetry").instrument(pool)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"veloxquant_mlx.telemetry cannot be imported: {error}") from error
    except TypeError as error:
        raise UnsupportedError(f"telemetry watches no such pool: {error}") from error


def _watched(factory: Factory) -> Factory:
    """The same pools, instrumented."""

    def make(n_blocks: int) -> Any:
        pool = factory(n_blocks)
        _instrument(pool)
        return pool

    return make


class WatchedSnapshot:
    """`calls` telemetry snapshots of one pool with `n` blocks held.

    Through the pool's own probe: a snapshot of the process would read the pools of the other sizes
    as well, and cost the same at every size however it grew.
    """

    def __init__(self, factory: Factory, n: int, calls: int) -> None:
        self.pool, self.calls, self.n_taken = factory(n), calls, 0
        self.probe = _instrument(self.pool)
        self.pool.allocate("k", n * BLOCK_SIZE, 1)

    def ready(self) -> None:
        """None was taken."""
        self.n_taken = 0

    def run(self) -> None:
        """Take them."""
        snapshot = self.probe.snapshot
        for _ in range(self.calls):
            self.n_taken += snapshot() is not None

    def check(self) -> None:
        """Each was taken."""
        _expect("snapshots taken", self.n_taken, self.calls)


WIDE: Final = tuple(1024 * 2**k for k in range(7))
STEPS: Final = tuple(1024 * 4**k for k in range(4))
FEW: Final = tuple(256 * 4**k for k in range(4))

_ALL: Final = (
    Workload("free_all", OWNER, "flat", 8, "n", WIDE, FreeAll),
    Workload(
        "free_all_in_pool", POOL, "flat", 8, "256", STEPS,
        lambda factory, n, calls: FreeAll(factory, 256, calls, others=n),
    ),
    Workload("free_all_among_owners", OWNERS, "flat", 32, "4", FEW, FreeAllAmongOwners),
    Workload("free_all_mixed", OWNER, "flat", 8, "n", STEPS, FreeAllMixed, ("free",)),
    Workload(
        "free_all_watched", OWNER, "flat", 8, "n", STEPS,
        lambda factory, n, calls: FreeAll(_watched(factory), n, calls),
        needs_ours=True,
    ),
    Workload("allocate", OWNER, "linear", 2, "n", STEPS, Allocate),
    Workload("grow_one", OWNER, "flat", 32, "1", STEPS, GrowOne),
    Workload(
        "free_list", OWNER, "linear", 1, "n", STEPS,
        lambda factory, n, calls: FreeList(factory, n, calls, newest_first=False),
        ("free",),
    ),
    Workload(
        "free_list_newest", OWNER, "linear", 1, "n", STEPS,
        lambda factory, n, calls: FreeList(factory, n, calls, newest_first=True),
        ("free",),
    ),
    Workload("blocks_for", OWNER, "linear", 8, "n", STEPS, BlocksFor, ("blocks_for",)),
    Workload("shrink", POOL, "linear", 1, "n", STEPS, Shrink, ("shrink",)),
    Workload("mark_used", POOL, "flat", 128, "1", STEPS, MarkUsed, ("mark_used",)),
    Workload(
        "n_free", POOL, "flat", 128, "0", STEPS,
        lambda factory, n, calls: Read(factory, n, calls, lambda pool: int(pool.n_free("k")), 1),
    ),
    Workload(
        "stats_snapshot", POOL, "flat", 32, "0", STEPS,
        lambda factory, n, calls: Read(
            factory, n, calls, lambda pool: int(pool.stats.snapshot().blocks_in_use())
        ),
        ("stats",),
    ),
    Workload(
        "telemetry_snapshot", POOL, "flat", 4, "0", STEPS,
        WatchedSnapshot,
        needs_ours=True,
    ),
    Workload(
        "registration", OWNERS, "flat", 32, "0", FEW, Registration,
        ("register_owner", "release_owner"),
    ),
)  # fmt: skip

WORKLOADS: Final[dict[str, Workload]] = {workload.name: workload for workload in _ALL}
