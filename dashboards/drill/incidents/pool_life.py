"""Pool life: what callers do to a pool."""

from __future__ import annotations

from typing import Final

from dashboards.drill.common import BEGIN, live
from dashboards.drill.scenario import MINUTE, Scenario
from dashboards.drill.stage import Stage
from dashboards.drill.traffic import Shape, Traffic

__all__ = ["POOL_LIFE"]


def grow_shrink_chase(stage: Stage) -> None:
    """Bursts make the pool grow, and a timer shrinks it to what is used."""
    pool = live(stage).add_pool(512, grow_on_exhaustion=True, max_blocks=4096)

    def load(now_s: float) -> float:
        return 2.5 if now_s > BEGIN and now_s % 240 < 90 else 0.4

    def shrink() -> None:
        for stream in ("k", "v"):
            pool.shrink(stream, 0)

    Traffic(stage, pool, Shape(seconds=20), load=load)
    stage.every(60, shrink, after_s=BEGIN)


def double_free(stage: Stage) -> None:
    """Two code paths both release a request, and one mixes up the pools."""
    worker = live(stage)
    pool, other = worker.add_pool(2048), worker.add_pool(256, name="draft")

    def wrong() -> None:
        owner = stage.fresh_id("twice")
        blocks = pool.allocate("k", 64, owner)
        pool.free(blocks)
        pool.free(blocks)
        foreign = other.allocate("v", 16, owner)
        pool.free(foreign)
        other.free_all(owner)

    Traffic(stage, pool, load=0.5)
    stage.every(45, wrong, after_s=BEGIN)


POOL_LIFE: Final = (
    Scenario(
        name="grow-shrink-chase",
        title="grow and shrink chase each other",
        act=grow_shrink_chase,
        seconds=75 * MINUTE,
        alert="VeloxQuantPoolChurnGrowShrink",
        within_s=45 * MINUTE,
    ),
    Scenario(
        name="double-free",
        title="double and foreign free in the caller",
        act=double_free,
        seconds=45 * MINUTE,
        alert="VeloxQuantPoolDoubleFree",
        within_s=5 * MINUTE,
        says=(r"the caller has a bug",),
    ),
)
