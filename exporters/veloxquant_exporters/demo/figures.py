"""What the demo shows of a pool and of MLX, read at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["Figures", "read_figures"]


@dataclass(frozen=True, slots=True)
class Figures:
    """The state of a pool and of MLX's memory.

    Attributes:
        n_blocks: Blocks managed.
        in_use: Blocks held.
        peak: Most blocks held at one time.
        free: Free blocks by stream.
        n_allocated: Blocks handed out so far.
        n_reused: Those of them that had been handed out before.
        exhausted: Allocations refused so far.
        slots_allocated: Token slots of the blocks held.
        slots_used: Those of them that hold a token.
        mlx_active_bytes: Memory of live arrays.
        mlx_peak_bytes: The most there was of it.
    """

    n_blocks: int
    in_use: int
    peak: int
    free: dict[str, int]
    n_allocated: int
    n_reused: int
    exhausted: int
    slots_allocated: int
    slots_used: int
    mlx_active_bytes: int
    mlx_peak_bytes: int

    @property
    def usage(self) -> float:
        """Blocks held over blocks managed, 0 to 1."""
        return self.in_use / self.n_blocks if self.n_blocks else 0.0

    @property
    def fill(self) -> float:
        """Token slots used over token slots allocated, 0 to 1; 0 while nothing is held."""
        return self.slots_used / self.slots_allocated if self.slots_allocated else 0.0

    @property
    def reuse(self) -> float:
        """Share of the blocks handed out that had been handed out before."""
        return self.n_reused / self.n_allocated if self.n_allocated else 0.0


def read_figures(pool: BlockPoolAllocator) -> Figures:
    """The figures of a pool, under its lock; from any thread."""
    with pool._lock:  # noqa: SLF001 - until there is a public snapshot with the token fill
        stats = pool.stats.snapshot()
        streams = pool._streams  # noqa: SLF001
        free = {stream.name: stream.n_free for stream in streams}
        slack = sum(stream.slack for stream in streams)
    slots = stats.blocks_in_use() * pool.config.block_size
    return Figures(
        n_blocks=stats.n_blocks,
        in_use=stats.blocks_in_use(),
        peak=stats.peak_blocks_in_use,
        free=free,
        n_allocated=stats.n_allocations,
        n_reused=stats.n_reused,
        exhausted=stats.n_exhausted,
        slots_allocated=slots,
        slots_used=slots - slack,
        mlx_active_bytes=mx.get_active_memory(),
        mlx_peak_bytes=mx.get_peak_memory(),
    )
