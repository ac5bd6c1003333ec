"""What the demo shows of a watched pool and of MLX, read at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from veloxquant_mlx.telemetry import Probe

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


def read_figures(probe: Probe) -> Figures:
    """The figures of a watched pool, consistent with each other; from any thread.

    Raises:
        ReferenceError: The pool was dropped.
    """
    pool = probe.snapshot()
    if pool is None:
        raise ReferenceError(f"the pool {probe.name!r} was dropped")
    return Figures(
        n_blocks=pool.n_blocks,
        in_use=pool.blocks_in_use,
        peak=pool.peak_blocks_in_use,
        free={name: stream.free for name, stream in pool.streams.items()},
        n_allocated=pool.n_allocations,
        n_reused=pool.n_reused,
        exhausted=pool.n_exhausted,
        slots_allocated=pool.blocks_in_use * pool.block_size,
        slots_used=sum(stream.slots_used for stream in pool.streams.values()),
        mlx_active_bytes=mx.get_active_memory(),
        mlx_peak_bytes=mx.get_peak_memory(),
    )
