"""Probe: the telemetry of one instrumented pool, from which its snapshots are taken."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from veloxquant_mlx.telemetry.histogram import thaw_histogram
from veloxquant_mlx.telemetry.hooks import Hooks
from veloxquant_mlx.telemetry.meters import Meters
from veloxquant_mlx.telemetry.snapshot import OPERATIONS, PoolSnapshot, StreamSnapshot

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["Probe", "StorageLike"]

# What a plain hooked call costs, measured by benchmarks/bench_telemetry.py. An estimate for the
# overhead counter: timing each call would cost more than the call.
HOOK_NS = 90


class StorageLike:
    """What a storage must offer to be watched: `usage()` in constant time, from any thread."""

    def usage(self) -> Any:
        """See `MLXBlockStorage.usage`."""


class Probe:
    """Watches one pool; made by `instrument`. Any thread may take snapshots.

    Args:
        pool: Held weakly.
        name: Its name.
    """

    def __init__(self, pool: BlockPoolAllocator, name: str) -> None:
        self.name = name
        self._pool = weakref.ref(pool)
        self._meters = Meters()
        self._hooks = Hooks(pool, self._meters, name)
        self._storages: list[weakref.ref[Any]] = []
        self._sequence = 0
        self._snapshot_ns = 0
        self.next_check_s = 0.0  # of the self-check, in time.monotonic()
        with pool._lock:
            self._meters.recount_formats(pool)
            self._hooks.install()

    @property
    def pool(self) -> BlockPoolAllocator | None:
        """The pool, or None once it was collected."""
        return self._pool()

    def add_storage(self, storage: Any) -> None:
        """Count the bytes of `storage` with the pool; held weakly."""
        if all(known() is not storage for known in self._storages):
            self._storages.append(weakref.ref(storage))

    def remove(self) -> None:
        """Take the hooks out."""
        pool = self._pool()
        if pool is not None:
            with pool._lock:
                self._hooks.remove()

    def note_faults(self, faults: list[tuple[str, str]]) -> None:
        """Count what the self-check found."""
        for check, _ in faults:
            self._meters.violations[check] += 1

    def errors(self) -> Mapping[str, int]:
        """Failures of the telemetry itself, by reason."""
        return dict(self._meters.errors)

    def overhead_s(self) -> float:
        """Seconds spent on telemetry so far: samples and snapshots as timed, calls estimated."""
        calls = sum(self._hooks.calls().values())
        return (self._hooks.spent_ns + self._snapshot_ns + HOOK_NS * calls) / 1e9

    def snapshot(self) -> PoolSnapshot | None:
        """Everything at one moment, or None once the pool was collected.

        Takes the pool's lock for a few microseconds, whatever the number of blocks and owners.
        """
        began = time.perf_counter_ns()
        pool = self._pool()
        if pool is None:
            return None
        storage = self._storage_bytes()
        with pool._lock:
            pool._settle()
            raw = self._copy(pool)
        snapshot = self._build(pool, raw, storage)
        self._snapshot_ns += time.perf_counter_ns() - began
        return snapshot

    def _copy(self, pool: BlockPoolAllocator) -> dict[str, Any]:
        """The raw numbers; under the lock, so nothing is built here that can wait."""
        self._sequence += 1
        pool._now = now = pool._clock()
        meters, hooks, incidents = self._meters, self._hooks, pool._incidents
        meters.settle_idle(now)
        return {
            "sequence": self._sequence,
            "monotonic_ns": now,
            "taken": pool._taken,
            "counts": pool._counts,
            "streams": [
                (s.name, s.managed, s.n_free, s.slack, hooks.allocates(s.name))
                for s in pool._streams
            ],
            "owners_active": len(pool._owners) + len(pool._waiting),
            "oldest_ns": self._oldest_ns(pool, now),
            "formats": dict(meters.formats),
            "calls": hooks.calls(),
            "exhausted": dict(incidents.exhausted),
            "shortfall": dict(incidents.shortfall),
            "grow_attempts": dict(incidents.grow_attempts),
            "rejected": dict(incidents.rejected),
            "owner_collisions": incidents.collisions,
            "violations": dict(meters.violations),
            "durations": [meters.durations[name].raw() for name in OPERATIONS],
            "lock_wait": meters.lock_wait.raw(),
            "block_lifetime": meters.block_lifetime.raw(),
            "block_idle": meters.block_idle.raw(),
            "request_blocks": meters.request_blocks.raw(),
            "occupancy": meters.occupancy.raw(),
            "last_exhaustion": meters.last_exhaustion,
        }

    def _oldest_ns(self, pool: BlockPoolAllocator, now: int) -> int:
        """Age of the owner that began first: owners stand in the order of their beginning."""
        for lease in pool._owners.values():
            return now - lease._born_ns
        return 0

    def _build(
        self, pool: BlockPoolAllocator, raw: dict[str, Any], storage: Mapping[str, int]
    ) -> PoolSnapshot:
        config, size = pool.config, pool.config.block_size
        gave, born, partial, peak, era = raw["counts"]
        taken, in_use = raw["taken"], raw["taken"] - gave
        exhausted: dict[str, dict[str, int]] = {name: {} for name in raw["shortfall"]}
        for (name, reason), n in raw["exhausted"].items():
            exhausted[name][reason] = n
        streams = {
            name: StreamSnapshot(
                managed=managed,
                free=free,
                slots_used=max(0, (managed - free) * size - slack),
                allocate_requests=n_allocates + sum(exhausted[name].values()),
                shortfall=raw["shortfall"][name],
                exhausted=exhausted[name],
            )
            for name, managed, free, slack, n_allocates in raw["streams"]
        }
        formats = raw["formats"]
        formats["fp16"] = 0
        formats["fp16"] = in_use - sum(formats.values())
        return PoolSnapshot(
            name=self.name,
            sequence=raw["sequence"],
            wall_s=time.time(),
            monotonic_ns=raw["monotonic_ns"],
            block_size=size,
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
            streams=streams,
            owners_active=raw["owners_active"],
            oldest_owner_age_s=raw["oldest_ns"] / 1e9,
            cached_blocks=0,
            formats=formats,
            calls=raw["calls"],
            grow_attempts=raw["grow_attempts"],
            rejected=raw["rejected"],
            owner_collisions=raw["owner_collisions"],
            invariant_violations=raw["violations"],
            durations=dict(zip(OPERATIONS, map(thaw_histogram, raw["durations"]), strict=True)),
            lock_wait=thaw_histogram(raw["lock_wait"]),
            block_lifetime=thaw_histogram(raw["block_lifetime"]),
            block_idle=thaw_histogram(raw["block_idle"]),
            request_blocks=thaw_histogram(raw["request_blocks"]),
            occupancy=thaw_histogram(raw["occupancy"]),
            storage=storage,
            last_exhaustion=raw["last_exhaustion"],
        )

    def _storage_bytes(self) -> Mapping[str, int]:
        """Bytes of the storages together, by kind; empty without one."""
        sums: dict[str, int] = {}
        for weakly in list(self._storages):
            storage = weakly()
            if storage is None:
                self._storages.remove(weakly)
                continue
            try:
                usage = storage.usage()
            except Exception:  # noqa: BLE001 - a storage's fault costs its own series only
                self._meters.count_error("storage")
                continue
            for kind in STORAGE_KINDS:
                sums[kind] = sums.get(kind, 0) + getattr(usage, f"{kind}_bytes")
        return sums


STORAGE_KINDS = (
    "resident",
    "written",
    "evaluated",
    "in_use",
    "free_cached",
    "retired",
    "logical",
    "fp16_equivalent",
)
