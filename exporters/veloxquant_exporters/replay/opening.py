"""Opening: a pool in the state in which a trace begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry.trace import TraceError

if TYPE_CHECKING:
    from veloxquant_mlx.memory.pool_config import PoolConfig
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["MAX_BLOCKS", "bounded", "opening_pool", "refuse_giants"]

# What is replayed is really allocated, at about 100 bytes a block.
MAX_BLOCKS: Final = 1 << 25


def refuse_giants(trace: Trace, config: PoolConfig) -> None:
    """Raise if replaying would take more memory than a trace should be able to ask for.

    Raises:
        TraceError: The pool has, or would have, too many blocks.
    """
    if not trace.consistent:
        raise TraceError(
            "the pool was inconsistent when this was dumped, so it can be looked at and not replayed"
        )
    levels = trace.header.opening.levels
    most = sum(level.managed for level in levels) + int(trace.growth.sum())
    scaled = most * trace.header.config.block_size // config.block_size
    if max(most, scaled, config.n_blocks) > MAX_BLOCKS:
        raise TraceError(
            f"a pool of {max(most, scaled, config.n_blocks)} blocks is too large to be replayed; "
            f"at most {MAX_BLOCKS} are"
        )


def bounded(config: PoolConfig) -> PoolConfig:
    """`config`, with an end to its growth: a refused call may have asked for any number of tokens."""
    limit = config.max_blocks
    if config.grow_on_exhaustion and (limit is None or limit > MAX_BLOCKS):
        return replace(config, max_blocks=MAX_BLOCKS)
    return config


def opening_pool(
    trace: Trace, make: Callable[[PoolConfig], BlockPoolAllocator] = BlockPoolAllocator
) -> BlockPoolAllocator:
    """A pool that manages what the recorded one did at the beginning, all of it free."""
    config = bounded(trace.header.config)
    managed = [level.managed for level in trace.header.opening.levels]
    if len(managed) == 1:
        return make(replace(config, n_blocks=managed[0]))
    k, v = managed
    if k - v in (0, 1):
        return make(replace(config, n_blocks=k + v))
    # It grew or shrank by one stream: `PoolConfig` knows even shares only.
    pool = make(replace(config, n_blocks=2 * max(k, v)))
    pool.shrink("k", k)
    pool.shrink("v", v)
    return pool
