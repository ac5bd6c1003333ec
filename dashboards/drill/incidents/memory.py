"""Memory outside the pool."""

from __future__ import annotations

from typing import Final

from dashboards.drill.common import BEGIN, SHORT, live, storage, write_rows
from dashboards.drill.scenario import HOUR, MINUTE, Scenario
from dashboards.drill.stage import Stage
from dashboards.drill.traffic import Traffic
from dashboards.drill.worker import MB

__all__ = ["MEMORY"]


def cache_grows_while_idle(stage: Stage) -> None:
    """Requests have ended, and MLX's buffer cache goes on growing."""
    worker = live(stage)
    traffic = Traffic(stage, worker.add_pool(512, storage=storage), SHORT, load=0.5)

    def stop() -> None:
        traffic.is_on = False

    def grow() -> None:
        if stage.now_s > BEGIN + 2 * MINUTE:
            worker.memory.cache += 6 * MB

    stage.at(BEGIN, stop)
    stage.every(15, grow)
    write_rows(stage, worker)


def active_climbs_outside(stage: Stage) -> None:
    """A server keeps arrays of every request, beside a pool whose buffers stay as they are."""
    worker = live(stage)
    Traffic(stage, worker.add_pool(512, storage=storage), SHORT, load=0.5)

    def grow() -> None:
        if stage.now_s > BEGIN:
            worker.memory.outside += 5 * MB

    stage.every(15, grow)
    write_rows(stage, worker)


MEMORY: Final = (
    Scenario(
        name="cache-grows-while-idle",
        title="MLX's buffer cache grows while the pool is idle",
        act=cache_grows_while_idle,
        seconds=75 * MINUTE,
        alert="VeloxQuantMlxCacheGrowing",
        within_s=40 * MINUTE,
        says=(r"outside the pool",),
    ),
    Scenario(
        name="active-climbs-outside",
        title="active memory climbs outside the KV pool",
        act=active_climbs_outside,
        seconds=2 * HOUR,
        alert="VeloxQuantMlxMemoryDrift",
        within_s=90 * MINUTE,
        says=(r"outside the KV pool",),
    ),
)
