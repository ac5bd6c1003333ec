"""Worker: a serving process with watched pools, and the memory that MLX would tell of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from veloxquant_exporters.prometheus import PoolCollector
from veloxquant_exporters.sources import Reading
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.registry import Registry

__all__ = ["GB", "MB", "Memory", "Worker"]

MB: Final = 2**20
GB: Final = 2**30


@dataclass(slots=True)
class Memory:
    """What MLX holds beside the pool, in bytes; scenarios move it.

    Attributes:
        weights: The model.
        outside: Arrays of nobody's pool.
        cache: Buffers that MLX keeps for reuse.
        limit: What the device should give.
        other: The rest of the process.
    """

    weights: int = 8 * GB
    outside: int = 200 * MB
    cache: int = 600 * MB
    limit: int = 24 * GB
    other: int = 900 * MB
    peak: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class _Usage:
    """Bytes as a storage would tell them, reckoned from the pool: for long plays."""

    resident_bytes: int
    in_use_bytes: int
    logical_bytes: int
    bytes_by_format: dict[str, int]
    retired_bytes: int = 0

    @property
    def written_bytes(self) -> int:
        return self.resident_bytes

    evaluated_bytes = fp16_equivalent_bytes = written_bytes

    @property
    def free_cached_bytes(self) -> int:
        return self.resident_bytes - self.in_use_bytes


class Reckoned:
    """Stands in for a storage where no incident asks for real bytes: the peak stays resident.

    Args:
        pool: Whose blocks.
        block_bytes: Bytes of a block's buffer.
    """

    def __init__(self, pool: BlockPoolAllocator, block_bytes: int) -> None:
        self._pool = pool
        self._block_bytes = block_bytes

    def usage(self) -> _Usage:
        """As `MLXBlockStorage.usage`."""
        stats = self._pool.stats
        resident = min(stats.peak_blocks_in_use, stats.n_blocks) * self._block_bytes
        in_use = stats.blocks_in_use() * self._block_bytes
        return _Usage(resident, in_use, in_use, {"fp16": resident})


class Worker:
    """One serving process. A source as `veloxquant_exporters.sources` has them.

    Args:
        process: Its label; "" where the process exports by itself.
    """

    labels_processes = False

    def __init__(self, process: str = "") -> None:
        self.process = process
        self.memory = Memory()
        self.registry = Registry()
        self.storages: list[Any] = []
        self.alive = True

    def add_pool(
        self,
        n_blocks: int,
        *,
        name: str = "main",
        block_size: int = 16,
        storage: Callable[[BlockPoolAllocator], Any] | None = None,
        prepare: Callable[[BlockPoolAllocator], None] | None = None,
        **config: Any,
    ) -> BlockPoolAllocator:
        """Make a pool and watch it.

        Args:
            n_blocks: As for `PoolConfig`.
            name: Label `pool`.
            block_size: As for `PoolConfig`.
            storage: Makes its storage; None reckons the bytes.
            prepare: Called with the pool before it is watched.
            **config: The rest of a `PoolConfig`.
        """
        pool = BlockPoolAllocator(PoolConfig(n_blocks=n_blocks, block_size=block_size, **config))
        if prepare is not None:
            prepare(pool)
        made = Reckoned(pool, block_size * 256 * 1024 // 16) if storage is None else storage(pool)
        self.storages.append(made)
        self.registry.add(pool, name, made)
        return pool

    def snapshot(self) -> ProcessSnapshot:
        """The process now, with the memory of the scenario."""
        memory = self.memory
        found = self.registry.collect()
        stored = sum(pool.storage.get("resident", 0) for pool in found.pools)
        active = memory.weights + memory.outside + stored
        memory.peak = max(memory.peak, active)
        footprint = active + memory.cache + memory.other
        return replace(
            found,
            process=self.process,
            mlx_active_bytes=active,
            mlx_cache_bytes=memory.cache,
            mlx_peak_bytes=memory.peak,
            mlx_limit_bytes=memory.limit,
            footprint_bytes=footprint,
            resident_bytes=footprint - memory.weights // 2,
        )

    def read(self) -> Reading:
        """See `veloxquant_exporters.sources.SnapshotSource`."""
        return Reading(processes=(self.snapshot(),), up={self.process: 1})

    def page(self) -> Callable[[], Iterable[Any] | None]:
        """What a scrape of this process gives: nothing while it is not alive."""
        collector = PoolCollector(self)
        return lambda: list(collector.collect()) if self.alive else None
