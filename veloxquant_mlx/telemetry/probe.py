"""Probe: the telemetry of one instrumented pool, from which its snapshots are taken."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.telemetry.calibration import hook_cost_ns
from veloxquant_mlx.telemetry.elders import Elders
from veloxquant_mlx.telemetry.hooks import Hooks
from veloxquant_mlx.telemetry.meters import Meters
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot, StreamSnapshot
from veloxquant_mlx.telemetry.storages import NO_BYTES, StorageBytes, Storages

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.memory.journal import Counts

__all__ = ["LOCK_TIMEOUT_S", "OTHER", "Probe"]

# Label of the pools beyond those told apart.
OTHER: Final = "other"
# A scrape waits so long for a pool's lock, and then tells what it last knew.
LOCK_TIMEOUT_S: Final = 1.0
# Above this, a recount of formats would hold the lock for longer than a call may wait.
RECOUNTED_OWNERS: Final = 1000


class Probe:
    """Watches one pool; made by `instrument`. Any thread may take snapshots.

    Args:
        pool: Held weakly.
        name: Its name.
        label: What its series are called: its name, or "other".
        numbered: True if nobody chose the name, so that it gives way to one that is chosen.
    """

    def __init__(
        self,
        pool: BlockPoolAllocator,
        name: str,
        label: str | None = None,
        *,
        numbered: bool = False,
    ) -> None:
        self.name = name
        self.numbered = numbered
        self.label = name if label is None else label
        self.next_check_s = self.next_log_s = 0.0  # of the self-check, in time.monotonic()
        self._config = pool.config
        self._incidents = pool._incidents
        self._meters = Meters()
        self._hooks = Hooks(pool, self._meters, name)
        self._elders = Elders()
        self._storages = Storages()
        self._sequence = 0
        self._snapshot_ns = 0
        self._installed = False
        self._last: PoolSnapshot | None = None
        self._end: list[tuple[int, Counts]] = []
        self._pool = weakref.ref(pool, self._when_gone())

    def _when_gone(self) -> Callable[[object], None]:
        """What notes the last counters of the pool; may run on any thread, at any moment."""
        end = self._end
        hooks, meters, elders = self._hooks, self._meters, self._elders

        def note(_: object) -> None:
            if hooks.journal:
                end.append(hooks.journal[-1][5:7])
            hooks.end()
            meters.let_go()
            elders.let_go()

        return note

    @property
    def hooks(self) -> Hooks:
        """The hooks, for the recorder."""
        return self._hooks

    @property
    def installed(self) -> bool:
        """Whether the hooks are in."""
        return self._installed

    @property
    def pool(self) -> BlockPoolAllocator | None:
        """The pool, or None once it was collected."""
        return self._pool()

    def install(self) -> None:
        """Put the hooks in."""
        pool = self._pool()
        if pool is not None:
            with pool._lock:
                if not self._installed:
                    self._meters.recount_formats(pool)
                    self._hooks.install()
                    self._installed = True

    def remove(self) -> bool:
        """Take the hooks out; False if they were out already."""
        pool = self._pool()
        if pool is None:
            return False
        with pool._lock:
            if not self._installed:
                return False
            pool._settle()
            self._last = self._copy(pool, NO_BYTES)
            self._hooks.remove()
            self._installed = False
            self._hooks.let_go()
            self._meters.let_go()
            self._elders.let_go()
        return True

    def add_storage(self, storage: Any) -> None:
        """Count the bytes of `storage` with the pool; held weakly."""
        self._storages.add(storage)

    # -- the telemetry's own account ------------------------------------------------------------

    def note_faults(self, faults: list[tuple[str, str]]) -> None:
        """Count what the self-check found."""
        for check, _ in faults:
            self._meters.violations[check] += 1
        if faults:
            self._hooks.violated()

    def check_owners(self, pool: BlockPoolAllocator, now_ns: int) -> None:
        """Look at the oldest owners, and count the formats anew; the pool's lock is held."""
        self._elders.watch(pool, now_ns)
        # A Ctrl-C inside a hook loses what it was about to count.
        if len(pool._owners) <= RECOUNTED_OWNERS:
            self._meters.recount_formats(pool)

    def errors(self) -> Mapping[str, int]:
        """Failures of the telemetry itself, by reason."""
        return dict(self._meters.errors)

    def n_idle_samples_dropped(self) -> int:
        """Freed blocks that were watched for their reuse and given up for others."""
        return self._meters.n_unwatched

    def overhead_s(self) -> float:
        """Seconds spent on telemetry so far: samples and snapshots as timed, calls estimated."""
        plain_ns = hook_cost_ns() * self._hooks.n_calls()
        return (self._hooks.spent_ns + self._snapshot_ns + plain_ns) / 1e9

    # -- snapshots ------------------------------------------------------------------------------

    def snapshot(self, timeout_s: float = LOCK_TIMEOUT_S) -> PoolSnapshot | None:
        """Everything at one moment, or None once the pool was collected or is watched no more.

        Takes the pool's lock for some microseconds, whatever the number of blocks and owners. If
        it cannot be had within `timeout_s`, because a thread is stuck with it, the snapshot is the
        one before (counted in `errors`), or there is none. Inside a call of this very thread (a
        signal handler, a finalizer) it tells the state that the call is in.
        """
        pool = self._pool()
        if pool is None:
            return None
        storage = self._storages.usage(pool, self._meters.errors)
        lock: Any = pool._lock
        if lock._is_owned():
            return self._locked_snapshot(pool, storage)
        snapshot = self._last
        try:
            # Not `with`: it knows no timeout. A Ctrl-C between these two lines finds the lock owned.
            if lock.acquire(timeout=timeout_s):
                snapshot = self._locked_snapshot(pool, storage)
            else:
                self._meters.errors["lock_timeout"] += 1
        finally:
            if lock._is_owned():
                lock.release()
        return snapshot

    def final(self) -> PoolSnapshot | None:
        """The counters that the pool had come to when it was last watched, its blocks given back.

        What a pool still held when it ended can be given back by nobody any more. Counted as freed,
        blocks allocated less blocks freed go on being the blocks in use, whoever has the name next.
        """
        last = self._last
        if self._installed and self._end:
            taken, counts = self._end[-1]
            if last is None or taken >= last.n_allocations:
                last = self._build(0, taken, counts, (), 0, NO_BYTES)
        return None if last is None else replace(last, n_frees=last.n_allocations)

    def _locked_snapshot(
        self, pool: BlockPoolAllocator, storage: StorageBytes
    ) -> PoolSnapshot | None:
        if not self._installed:
            return None
        began = time.perf_counter_ns()
        pool._settle()
        self._last = self._copy(pool, storage)
        self._snapshot_ns += time.perf_counter_ns() - began
        return self._last

    def _copy(self, pool: BlockPoolAllocator, storage: StorageBytes) -> PoolSnapshot:
        """The snapshot; the lock is held, so nothing is done here that can wait."""
        pool._now = now = pool._clock()
        self._hooks.settle()
        oldest_ns = self._elders.oldest_ns(pool)
        return self._build(
            now,
            pool._taken,
            _counts_by_lists(pool) if pool._busy else pool._counts,
            pool._streams,
            len(pool._owners) + len(pool._waiting),
            storage,
            0.0 if oldest_ns is None else max(0, now - oldest_ns) / 1e9,
            pool._cached.n_blocks(),
        )

    def _build(
        self,
        now: int,
        taken: int,
        counts: Counts,
        live_streams: tuple[Any, ...],
        owners_active: int,
        storage: StorageBytes,
        oldest_owner_age_s: float = 0.0,
        cached_blocks: int = 0,
    ) -> PoolSnapshot:
        config, incidents, meters = self._config, self._incidents, self._meters
        gave, born, partial, peak, era = counts
        in_use = taken - gave
        self._sequence += 1
        return PoolSnapshot(
            name=self.label,
            sequence=self._sequence,
            wall_s=time.time(),
            monotonic_ns=now,
            block_size=config.block_size,
            separate_kv=config.separate_kv,
            grow_on_exhaustion=config.grow_on_exhaustion,
            max_blocks=config.max_blocks,
            initial_blocks=config.n_blocks,
            n_blocks=era.n_blocks,
            n_allocations=taken,
            n_frees=gave,
            n_reused=taken - born,
            n_exhausted=era.n_exhausted,
            n_grown=era.n_grown,
            n_retired=era.n_retired,
            peak_blocks_in_use=max(peak, in_use),
            partial_blocks=partial,
            streams=self._streams(live_streams),
            owners_active=owners_active,
            oldest_owner_age_s=oldest_owner_age_s,
            cached_blocks=cached_blocks,
            formats=self._formats(in_use),
            calls=self._hooks.calls(),
            grow_attempts=dict(incidents.grow_attempts),
            rejected=dict(incidents.rejected),
            owner_collisions=incidents.collisions,
            invariant_violations=dict(meters.violations),
            durations={name: h.snapshot() for name, h in meters.durations.items()},
            lock_wait=meters.lock_wait.snapshot(),
            block_lifetime=meters.block_lifetime.snapshot(),
            block_idle=meters.block_idle.snapshot(),
            request_blocks=meters.request_blocks.snapshot(),
            occupancy=meters.occupancy.snapshot(),
            storage=storage.by_kind,
            last_exhaustion=meters.last_exhaustion,
            lease_lifetime=meters.lease_lifetime.snapshot(),
            idle_owner_blocks=self._elders.idle_blocks,
            storage_formats=storage.by_format,
        )

    def _streams(self, live: tuple[Any, ...]) -> dict[str, StreamSnapshot]:
        """By stream; those of a pool that is gone keep their counters."""
        incidents, size = self._incidents, self._config.block_size
        exhausted: dict[str, dict[str, int]] = {name: {} for name in incidents.shortfall}
        for (name, reason), n in incidents.exhausted.items():
            exhausted[name][reason] = n
        levels = {s.name: (s.managed, s.n_free, s.slack) for s in live}
        streams = {}
        for name, by_reason in exhausted.items():
            managed, free, slack = levels.get(name, (0, 0, 0))
            held = (managed - free) * size
            streams[name] = StreamSnapshot(
                managed=managed,
                free=free,
                slots_used=min(held, max(0, held - slack)),
                allocate_requests=self._hooks.allocates(name) + sum(by_reason.values()),
                shortfall=incidents.shortfall[name],
                exhausted=by_reason,
                slots_held=held,
            )
        return streams

    def _formats(self, in_use: int) -> dict[str, int]:
        """Blocks in use by format: fp16, which is not counted, is the rest."""
        formats = dict(self._meters.formats)
        formats["fp16"] = 0
        formats["fp16"] = max(0, in_use - sum(formats.values()))
        return formats


def _counts_by_lists(pool: BlockPoolAllocator) -> Counts:
    """The counters of a pool whose call is under way: `free` moves block by block and counts last."""
    in_use = sum(stream.managed - stream.n_free for stream in pool._streams)
    _, born, partial, peak, era = pool._counts
    return (pool._taken - in_use, born, partial, peak, era)
