"""Leaks: blocks that nobody will give back."""

from __future__ import annotations

from typing import Final

from dashboards.drill.common import BEGIN, FULL, live
from dashboards.drill.scenario import HOUR, MINUTE, Scenario
from dashboards.drill.stage import Stage
from dashboards.drill.traffic import Shape, Traffic
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["LEAKS"]


def aborted_requests_leak(stage: Stage) -> None:
    """One in 200 requests is aborted, and its cleanup never runs."""
    pool = live(stage).add_pool(4096)

    def end(pool: BlockPoolAllocator, owner: str) -> None:
        if stage.now_s < BEGIN or stage.random.random() > 0.005:
            pool.free_all(owner)

    Traffic(stage, pool, load=0.45, end=end)


def prefill_only_leak(stage: Stage) -> None:
    """Requests that only want a first token keep their last block: cleanup follows decoding."""
    pool = live(stage).add_pool(4096)

    def end(pool: BlockPoolAllocator, owner: str) -> None:
        blocks = pool.blocks_for(owner)
        last = {block.stream: block.block_id for block in blocks}
        kept = set(last.values()) if stage.now_s >= BEGIN else set()
        pool.free([block for block in blocks if block.block_id not in kept], owner=owner)

    Traffic(stage, pool, Shape(seconds=100), load=0.40)
    Traffic(stage, pool, Shape(prompt=384, output=0, seconds=0.5), load=0.0003, end=end)


LEAKS: Final = (
    Scenario(
        name="aborted-requests-leak",
        title="requests aborted, blocks never given back",
        act=aborted_requests_leak,
        seconds=2 * HOUR,
        alert="VeloxQuantPoolBlockLeak",
        within_s=60 * MINUTE,
        says=(r"oldest owner\b.* for (\dh )?\d+m",),
        companions=(*FULL, "VeloxQuantPoolExhaustionPredicted"),
    ),
    Scenario(
        name="prefill-only-leak",
        title="prefill-only traffic leaks a block a request",
        act=prefill_only_leak,
        seconds=9 * HOUR,
        interval_s=60,
        alert="VeloxQuantPoolBlockLeak",
        within_s=60 * MINUTE,
        says=(r"slope is [1-9]\d+ blocks an hour",),
        companions=(*FULL, "VeloxQuantPoolExhaustionPredicted"),
        before="veloxquant_block_pool_exhausted_total",
        ahead_s=4 * HOUR,
    ),
)
