"""Self-check: does a pool's bookkeeping still add up? Counted and logged, never raised."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.memory.audit import audit

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.telemetry.probe import Probe

__all__ = ["check_pool", "self_check"]

_log = logging.getLogger("veloxquant_mlx.telemetry")

EVERY_S: Final = 10.0
# A full audit takes about 1 us a block under the lock; larger pools get the constant checks only.
AUDITED_BLOCKS: Final = 2048
LAST_OPERATIONS: Final = 8


def self_check(probe: Probe) -> None:
    """Check the pool of `probe`, at most every 10 s; faults go into its meters and the log."""
    now = time.monotonic()
    pool = probe.pool
    if pool is None or now < probe.next_check_s:
        return
    probe.next_check_s = now + EVERY_S
    faults = check_pool(pool)
    probe.note_faults(faults)
    if faults:
        last = [entry[:5] for entry in list(pool._journal)[-LAST_OPERATIONS:]]
        for check, fault in faults:
            _log.error(
                "pool %r is inconsistent (%s): %s; last operations: %s",
                probe.name, check, fault, last,
            )  # fmt: skip


def check_pool(pool: BlockPoolAllocator) -> list[tuple[str, str]]:
    """What is wrong with the books, as (check, text). Takes the pool's lock."""
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
        if not 0 <= partial <= max(in_use, 0):
            faults.append(("counters", f"{partial} of {in_use} blocks are partly filled"))
        if not faults and in_use <= AUDITED_BLOCKS:
            faults += [("owners", fault) for fault in audit(pool)]
    return faults
