"""Self-check: does a pool's bookkeeping still add up? Counted and logged, never raised."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.memory.audit import audit
from veloxquant_mlx.memory.journal import ALLOCATE, EXHAUSTED, FREE, FREE_ALL, SHRINK, newest

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.journal import Entry
    from veloxquant_mlx.memory.stream import Stream
    from veloxquant_mlx.telemetry.probe import Probe

__all__ = ["check_pool", "describe", "self_check"]

_log = logging.getLogger("veloxquant_mlx.telemetry")

EVERY_S: Final = 10.0
LOG_EVERY_S: Final = 60.0
# A full audit takes about 1 us a block under the lock; larger pools get the checks of constant cost.
AUDITED_BLOCKS: Final = 2048
# Free blocks looked at on top of each stream of a larger pool: those handed out next.
LOOKED_AT: Final = 256
LAST_OPERATIONS: Final = 8

_NAMES: Final = {
    ALLOCATE: "allocate",
    FREE: "free",
    FREE_ALL: "free_all",
    SHRINK: "shrink",
    EXHAUSTED: "exhausted",
}


def self_check(probe: Probe) -> None:
    """Check the pool of `probe`, at most every 10 s; faults go into its meters and the log.

    Called with every scrape, by whatever thread scrapes. A pool whose lock is taken for long, or
    whose call is under way in this very thread, is left for the next time.
    """
    now = time.monotonic()
    pool = probe.pool
    if pool is None or now < probe.next_check_s:
        return
    lock: Any = pool._lock
    if lock._is_owned():
        return
    probe.next_check_s = now + EVERY_S
    try:
        if not lock.acquire(timeout=EVERY_S / 10):
            return
        faults = check_pool(pool)
        probe.check_owners(pool, pool._clock())
    finally:
        if lock._is_owned():
            lock.release()
    probe.note_faults(faults)
    if faults and now >= probe.next_log_s:
        probe.next_log_s = now + LOG_EVERY_S
        _report(probe.name, faults, newest(pool._journal, LAST_OPERATIONS))


def check_pool(pool: BlockPoolAllocator) -> list[tuple[str, str]]:
    """What is wrong with the books, as (check, text); empty when all is well.

    Takes the pool's lock. In tests and CI, `assert not check_pool(pool)` is the strict form of what
    a server only counts.
    """
    with pool._lock:
        gave, _, partial, _, era = pool._counts
        faults: list[tuple[str, str]] = []
        managed = sum(stream.managed for stream in pool._streams)
        if managed != era.n_blocks:
            faults.append(("managed", f"streams manage {managed} blocks, the pool {era.n_blocks}"))
        in_use = managed - sum(stream.n_free for stream in pool._streams)
        if in_use != pool._taken - gave:
            faults.append(
                ("free_list", f"{in_use} blocks are not free, {pool._taken - gave} are in use")
            )
        for stream in pool._streams:
            faults += [("free_list", fault) for fault in _top_faults(stream)]
        if not 0 <= partial <= max(in_use, 0):
            faults.append(("counters", f"{partial} of {in_use} blocks are partly filled"))
        if not faults and _n_made(pool) <= AUDITED_BLOCKS:
            faults += [("owners", fault) for fault in audit(pool)]
    return faults


def _n_made(pool: BlockPoolAllocator) -> int:
    """Blocks that an audit visits: those in use, and the free ones that exist as objects."""
    unmade = sum(stream.end_id - stream.next_id for stream in pool._streams)
    return pool._counts[4].n_blocks - unmade


def _top_faults(stream: Stream) -> list[str]:
    top = stream.top[-LOOKED_AT:]
    faults = []
    if len(set(top)) != len(top):
        faults.append(f"stream {stream.name}: a block is on the free list twice")
    n_held = sum(block._lease._at is not None for block in top)
    if n_held:
        faults.append(f"stream {stream.name}: {n_held} held blocks are on the free list")
    return faults


def _report(name: str, faults: list[tuple[str, str]], entries: list[Entry]) -> None:
    last = "; ".join(map(describe, entries))
    for check, fault in faults:
        _log.error(
            "pool %r is inconsistent (%s): %s; last operations, oldest first: %s",
            name, check, fault, last or "none",
        )  # fmt: skip


def describe(entry: Entry) -> str:
    """A journal entry as text: what was done to whose blocks, and how many."""
    at_ns, operation, what, n_blocks, n_tokens, _, _ = entry
    leases = [lease for lease, _, _ in what] if isinstance(what, tuple) else [what]
    names = ", ".join(f"{x.stream}/{x.format} of owner {x.owner!r:.64}" for x in leases)
    name = _NAMES.get(operation, str(operation))
    return f"{name} of {n_blocks} blocks ({n_tokens} tokens; {names}) at {at_ns / 1e9:.6f} s"
