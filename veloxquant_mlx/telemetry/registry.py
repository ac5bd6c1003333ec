"""Registry: which pools of this process are watched, and under which names.

Thread-safe. Pools are held weakly: a pool that is dropped leaves with its series. What a name
counted stays with the name, so that the next pool of it goes on where the last one ended.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.memory import block_pool
from veloxquant_mlx.telemetry.carry import carry, merge
from veloxquant_mlx.telemetry.meters import ERROR_REASONS
from veloxquant_mlx.telemetry.probe import Probe
from veloxquant_mlx.telemetry.process import (
    ProcessSnapshot,
    footprint_bytes,
    mlx_memory,
    own_version,
    python_version,
    resident_bytes,
)
from veloxquant_mlx.telemetry.self_check import self_check

if TYPE_CHECKING:
    from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
    from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

__all__ = ["MAX_POOLS", "Registry", "instrument", "instrument_all", "take_snapshot", "uninstrument"]

# Pools told apart; the rest are summed as "other", so that series stay bounded.
MAX_POOLS: Final = 64
# Names whose counts are remembered after their pool is gone.
MAX_REMEMBERED: Final = 1024
MAX_NAME_CHARS: Final = 128


class Registry:
    """The watched pools of a process. There is one; others are for tests."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._probes: dict[str, Probe] = {}
        # Names that nobody chose; they give way to one that the program chooses.
        self._numbered: set[str] = set()
        self._last: dict[str, PoolSnapshot] = {}
        self._before: OrderedDict[str, PoolSnapshot] = OrderedDict()
        self._errors = dict.fromkeys(ERROR_REASONS, 0)
        self._gone_overhead_s = 0.0
        self._n_pools_merged = 0
        self._sequence = 0

    def add(self, pool: BlockPoolAllocator, name: str | None, storage: Any) -> Probe:
        """See `instrument`."""
        with self._lock:
            self._sweep()
            probe = self._probe_of(pool)
            if probe is not None and name is not None and probe.name in self._numbered:
                # Watched by `instrument_all` or another tool before the program came to name it.
                if name != probe.name:
                    self._check_name(name)
                    self.remove(pool)
                    probe = None
            if probe is not None:
                if name is not None and name != probe.name:
                    raise ValueError(
                        f"the pool is instrumented as {probe.name!r} already; "
                        "uninstrument it before giving it another name"
                    )
            else:
                if name is None:
                    name = self._free_name()
                    self._numbered.add(name)
                else:
                    name = self._check_name(name)
                probe = self._probes[name] = Probe(pool, name)
            if storage is not None:
                probe.add_storage(storage)
            return probe

    def remove(self, pool: BlockPoolAllocator) -> None:
        """See `uninstrument`."""
        with self._lock:
            probe = self._probe_of(pool)
            if probe is not None:
                self._read(probe)
                probe.remove()
                self._forget(probe.name)

    def collect(self) -> ProcessSnapshot:
        """This process now. A pool whose snapshot fails is left out and counted."""
        with self._lock:
            self._sweep()
            n_errors = self._errors["snapshot"]
            pools = [snapshot for probe in self._probes.values() if (snapshot := self._read(probe))]
            if len(pools) > MAX_POOLS:
                self._n_pools_merged = max(self._n_pools_merged, len(pools) - MAX_POOLS)
                pools = [*pools[:MAX_POOLS], merge("other", pools[MAX_POOLS:])]
            self._sequence += 1
            mlx = mlx_memory()
            return ProcessSnapshot(
                process="",
                sequence=self._sequence,
                wall_s=time.time(),
                version=own_version(),
                python=python_version(),
                mlx=mlx.version,
                resident_bytes=resident_bytes(),
                footprint_bytes=footprint_bytes(),
                mlx_active_bytes=mlx.active,
                mlx_cache_bytes=mlx.cache,
                mlx_peak_bytes=mlx.peak,
                mlx_limit_bytes=mlx.limit,
                errors=self._all_errors(),
                dropped={"pools_merged": self._n_pools_merged},
                overhead_s=self._overhead_s(),
                pools=tuple(pools),
                n_unread_pools=self._errors["snapshot"] - n_errors,
            )

    # -- inside ---------------------------------------------------------------------------------

    def _probe_of(self, pool: BlockPoolAllocator) -> Probe | None:
        return next((probe for probe in self._probes.values() if probe.pool is pool), None)

    def _free_name(self) -> str:
        return next(
            name for n in itertools.count() if (name := f"pool-{n}") not in self._probes
        )

    def _check_name(self, name: object) -> str:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name must be a str or None, got {name!r}")
        if not 0 < len(name) <= MAX_NAME_CHARS or name == "other":
            raise ValueError(
                f"name must have 1 to {MAX_NAME_CHARS} characters and not be 'other', got {name!r}"
            )
        if name in self._probes:
            raise ValueError(f"a live pool is named {name!r} already; give this one another name")
        return name

    def _read(self, probe: Probe) -> PoolSnapshot | None:
        try:
            self_check(probe)
            snapshot = probe.snapshot()
        except Exception:  # noqa: BLE001 - one pool's fault costs its own series only
            self._errors["snapshot"] += 1
            return None
        if snapshot is None:
            return None
        before = self._before.get(probe.name)
        if before is not None:
            snapshot = carry(snapshot, before)
        self._last[probe.name] = snapshot
        return snapshot

    def _sweep(self) -> None:
        """Forget pools that were collected."""
        for name in [name for name, probe in self._probes.items() if probe.pool is None]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        probe = self._probes.pop(name)
        self._numbered.discard(name)
        self._gone_overhead_s += probe.overhead_s()
        for reason, n in probe.errors().items():
            self._errors[reason] += n
        last = self._last.pop(name, None)
        if last is not None:
            self._before[name] = last
            self._before.move_to_end(name)
            while len(self._before) > MAX_REMEMBERED:
                self._before.popitem(last=False)

    def _all_errors(self) -> dict[str, int]:
        errors = dict(self._errors)
        for probe in self._probes.values():
            for reason, n in probe.errors().items():
                errors[reason] += n
        return errors

    def _overhead_s(self) -> float:
        return self._gone_overhead_s + sum(probe.overhead_s() for probe in self._probes.values())


_registry = Registry()


def instrument(
    pool: BlockPoolAllocator, *, name: str | None = None, storage: Any = None
) -> Probe:
    """Watch `pool` from now on; its series appear in every exporter of this process.

    Args:
        pool: Held weakly. Instrumenting it again returns what watches it already; a name given
            now replaces one that was numbered.
        name: Value of the label `pool`; None takes `pool-<lowest free number>`.
        storage: Its `MLXBlockStorage`, for the byte series; held weakly.

    Raises:
        ValueError: A live pool has that name, or this pool has another.
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
    instrument(pool)
