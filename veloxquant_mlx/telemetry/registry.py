"""Registry: which pools of this process are watched, and under which names.

Thread-safe. Pools are held weakly: a pool that is dropped leaves with its series. What a name
counted stays with the name, so that the next pool of it goes on where the last one ended.

The table of pools is replaced, never changed, and no pool's lock is taken while the registry's own
lock is held: a finalizer or signal handler inside a pool's call may instrument, uninstrument or
scrape without waiting for a thread that waits for that pool.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory import block_pool
from veloxquant_mlx.telemetry.carry import carry, merge
from veloxquant_mlx.telemetry.meters import ERROR_REASONS
from veloxquant_mlx.telemetry.probe import OTHER, Probe
from veloxquant_mlx.telemetry.process import (
    MlxMemory,
    ProcessSnapshot,
    footprint_bytes,
    mlx_memory,
    own_version,
    python_version,
    resident_bytes,
)
from veloxquant_mlx.telemetry.program_source import program_snapshot, refresh_program
from veloxquant_mlx.telemetry.self_check import self_check
from veloxquant_mlx.telemetry.table import MAX_POOLS, MAX_REMEMBERED, Table, check_name, free_name

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["MAX_POOLS", "Registry", "instrument", "instrument_all", "take_snapshot", "uninstrument"]

_log = logging.getLogger("veloxquant_mlx.telemetry")
_T = TypeVar("_T")

# Milliseconds before a name that is taken is refused.
WAITS: Final = 50


class Registry:
    """The watched pools of a process. There is one; others are for tests."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._table = Table()
        self._errors: dict[str, int] = dict.fromkeys(ERROR_REASONS, 0)
        self._gone_overhead_s = 0.0
        self._n_pools_merged = 0
        self._n_idle_samples_dropped = 0
        self._sequence = itertools.count(1)

    def add(self, pool: BlockPoolAllocator, name: str | None, storage: Any) -> Probe:
        """See `instrument`."""
        self._await_end_of(pool, name)
        while True:
            table = self._table
            probe = table.probe_of(pool)
            if probe is None:
                chosen = free_name(table) if name is None else check_name(table, name)
                parked = table.parked.get(chosen)
                if parked is not None and parked.pool is not pool:
                    self._forget(parked)
                    continue
                probe = parked or Probe(pool, chosen, table.label_for(chosen))
                if self._swap(table, table.with_probe(probe)):
                    probe.numbered = name is None
                    break
            elif name is None or name == probe.name:
                break
            elif probe.numbered:
                # Watched by `instrument_all` or another tool before the program came to name it.
                check_name(table, name)
                self.remove(pool)
            else:
                raise ValueError(
                    f"the pool is instrumented as {probe.name!r} already; "
                    "uninstrument it before giving it another name"
                )
        probe.numbered = probe.numbered and name is None
        probe.install()
        if storage is not None:
            probe.add_storage(storage)
        return probe

    def remove(self, pool: BlockPoolAllocator) -> None:
        """See `uninstrument`."""
        probe = self._table.probe_of(pool)
        # Of two threads that remove one pool, one takes the hooks out.
        if probe is None or not probe.remove():
            return
        # The sum of the pools beyond those told apart must not fall while one of them is parked.
        if probe.label == OTHER or len(self._table.parked) >= MAX_REMEMBERED:
            self._forget(probe)
            return
        while True:
            table = self._table
            if self._swap(table, table.parking(probe)):
                return

    def collect(self) -> ProcessSnapshot:
        """This process now. A pool whose snapshot fails is left out and counted."""
        self._sweep()
        self._guarded(refresh_program, None)
        table = self._table
        apart: list[PoolSnapshot] = []
        rest: list[PoolSnapshot] = []
        n_unread = 0
        for probe in table.probes.values():
            try:
                self._check(probe)
                snapshot = probe.snapshot()
            except Exception:  # noqa: BLE001 - one pool's fault costs its own series only
                self._count_error("snapshot")
                n_unread += 1
                continue
            if snapshot is not None:
                (rest if probe.label == OTHER else apart).append(snapshot)
        if rest:
            apart.append(merge(OTHER, rest))
        pools = [
            pool if (before := table.before.get(pool.name)) is None else carry(pool, before)
            for pool in apart
        ]
        mlx = self._guarded(mlx_memory, MlxMemory())
        return ProcessSnapshot(
            process="",
            sequence=next(self._sequence),
            wall_s=time.time(),
            version=own_version(),
            python=python_version(),
            mlx=mlx.version,
            resident_bytes=self._guarded(resident_bytes, None),
            footprint_bytes=self._guarded(footprint_bytes, None),
            mlx_active_bytes=mlx.active,
            mlx_cache_bytes=mlx.cache,
            mlx_peak_bytes=mlx.peak,
            mlx_limit_bytes=mlx.limit,
            errors=self._all_errors(),
            dropped=self._all_dropped(),
            overhead_s=self._overhead_s(),
            pools=tuple(pools),
            n_unread_pools=n_unread,
            mlx_device_total_bytes=mlx.device_total,
            mlx_device_free_bytes=mlx.device_free,
            program=self._guarded(program_snapshot, None),
        )

    # -- inside ---------------------------------------------------------------------------------

    def _probe_of(self, pool: BlockPoolAllocator) -> Probe | None:
        return self._table.probe_of(pool)

    def _swap(self, old: Table, new: Table) -> bool:
        """Put `new` in the place of `old`, unless another thread was faster."""
        merged = sum(p.label == OTHER and p.name not in old.probes for p in new.probes.values())
        with self._lock:
            if self._table is not old:
                return False
            self._table = new
            self._n_pools_merged += merged
            return True

    def _await_end_of(self, pool: BlockPoolAllocator, name: object) -> None:
        """Give a pool of that name which the program dropped the time to go.

        A scrape in another thread keeps it alive for as long as it reads it.
        """
        for _ in range(WAITS):
            self._sweep()
            other = self._table.probes.get(name) if isinstance(name, str) else None
            if other is None or other.pool is pool:
                return
            time.sleep(0.001)

    def _sweep(self) -> None:
        """Forget pools that were collected."""
        table = self._table
        for probe in (*table.probes.values(), *table.parked.values()):
            if probe.pool is None:
                self._forget(probe)

    def _forget(self, probe: Probe) -> None:
        while True:
            table = self._table
            if probe not in (table.probes.get(probe.name), table.parked.get(probe.name)):
                return
            if self._swap(table, table.without(probe)):
                break
        overhead_s, errors = probe.overhead_s(), probe.errors()
        n_dropped = probe.n_idle_samples_dropped()
        with self._lock:
            self._gone_overhead_s += overhead_s
            self._n_idle_samples_dropped += n_dropped
            for reason, n in errors.items():
                self._errors[reason] += n

    def _all_probes(self) -> tuple[Probe, ...]:
        table = self._table
        return (*table.probes.values(), *table.parked.values())

    def _check(self, probe: Probe) -> None:
        try:
            self_check(probe)
        except Exception:  # noqa: BLE001 - a pool too broken to be checked may still be counted
            self._count_error("self_check")

    def _guarded(self, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except Exception:  # noqa: BLE001 - what the process cannot tell of itself, it leaves out
            self._count_error("process")
            return otherwise

    def _count_error(self, reason: str) -> None:
        with self._lock:
            self._errors[reason] += 1

    def _all_errors(self) -> dict[str, int]:
        errors = dict(self._errors)
        for probe in self._all_probes():
            for reason, n in probe.errors().items():
                errors[reason] += n
        return errors

    def _all_dropped(self) -> dict[str, int]:
        live = sum(probe.n_idle_samples_dropped() for probe in self._all_probes())
        return {
            "pools_merged": self._n_pools_merged,
            "idle_samples": self._n_idle_samples_dropped + live,
        }

    def _overhead_s(self) -> float:
        return self._gone_overhead_s + sum(probe.overhead_s() for probe in self._all_probes())

    def _after_fork(self) -> None:
        """In the child: a thread that was inside `_swap` does not exist here; tables are whole."""
        self._lock = threading.RLock()


_registry = Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry._after_fork)


def instrument(pool: BlockPoolAllocator, *, name: str | None = None, storage: Any = None) -> Probe:
    """Watch `pool` from now on; its series appear in every exporter of this process.

    Args:
        pool: Held weakly. Instrumenting it again returns what watches it already; a name given
            now replaces one that was numbered.
        name: Value of the label `pool`; None takes `pool-<lowest free number>`.
        storage: What else holds bytes for it, for the byte series: anything with a `usage()` like
            that of `MLXBlockStorage`; held weakly. An `MLXBlockStorage` of the pool is found by
            itself.

    Raises:
        ValueError: A live pool has that name, this pool has another, or it is no name: a name has
            1 to 128 characters and is not "other", which beyond 64 pools stands for the rest.
        ArgumentTypeError: `pool` is no pool, or `name` no str.
    """
    if not isinstance(pool, block_pool.BlockPoolAllocator):
        raise ArgumentTypeError(f"pool must be a BlockPoolAllocator, got {pool!r}")
    return _registry.add(pool, name, storage)


def uninstrument(pool: BlockPoolAllocator) -> None:
    """Stop watching `pool`: its series disappear, its hooks cost nothing any more."""
    _registry.remove(pool)


def instrument_all() -> None:
    """Watch every pool made from now on, as `pool-0`, `pool-1`, ...

    `VELOXQUANT_INSTRUMENT=1` in the environment does the same from the start.
    """
    if _watch not in block_pool._observers:
        block_pool._observers.append(_watch)


def stop_instrumenting_all() -> None:
    """Undo `instrument_all`; pools that are watched stay so."""
    if _watch in block_pool._observers:
        block_pool._observers.remove(_watch)


def take_snapshot() -> ProcessSnapshot:
    """This process now, with all its watched pools."""
    return _registry.collect()


def _watch(pool: BlockPoolAllocator) -> None:
    try:
        instrument(pool)
    except Exception:  # noqa: BLE001 - making a pool must not fail for want of telemetry
        _registry._count_error("hook")
        _log.exception("a pool could not be instrumented")
