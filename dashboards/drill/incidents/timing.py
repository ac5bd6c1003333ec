"""Timing: calls that take long, and calls that wait."""

from __future__ import annotations

from typing import Any, Final, cast

from dashboards.drill.common import BEGIN, live, ramp
from dashboards.drill.faults import Contended, slow_down
from dashboards.drill.scenario import HOUR, MINUTE, Scenario
from dashboards.drill.stage import Stage
from dashboards.drill.traffic import Shape, Traffic
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.memory.journal import ALLOCATE, FREE_ALL

__all__ = ["TIMING"]


def free_all_slow(stage: Stage) -> None:
    """A release that visits each block, and requests that get ever longer."""
    _slow(stage, FREE_ALL)


def allocate_slow(stage: Stage) -> None:
    """An allocation that looks through the free list for each block."""
    _slow(stage, ALLOCATE)


def _slow(stage: Stage, operation: int) -> None:
    pool = live(stage).add_pool(32768)
    slow_down(pool, operation, 4_000)
    tokens = ramp(500, 8000, BEGIN, BEGIN + 40 * MINUTE)
    Traffic(
        stage,
        pool,
        lambda now_s: Shape(prompt=int(tokens(now_s)), output=int(tokens(now_s)) // 16),
        load=0.5,
    )


def lock_contention(stage: Stage) -> None:
    """A batch job frees and allocates in a tight loop; everybody else waits for the lock."""
    lock = Contended(0.0, 5_000_000, stage.random)

    def prepare(pool: BlockPoolAllocator) -> None:
        pool._lock = cast("Any", lock)

    def begin() -> None:
        lock.share = 0.3

    Traffic(stage, live(stage).add_pool(4096, prepare=prepare), load=0.5)
    stage.at(BEGIN, begin)


TIMING: Final = (
    *(
        Scenario(
            name=f"{operation.replace('_', '-')}-slow",
            title=f"{operation} gets slow as requests get long",
            act=act,
            seconds=80 * MINUTE,
            alert="VeloxQuantPoolOperationSlow",
            within_s=55 * MINUTE,
            says=(rf"{operation} of pool main",),
            labels=(("operation", operation),),
        )
        for operation, act in (("free_all", free_all_slow), ("allocate", allocate_slow))
    ),
    Scenario(
        name="lock-contention",
        title="lock contention from one bulk caller",
        act=lock_contention,
        seconds=HOUR,
        alert="VeloxQuantPoolLockContention",
        within_s=20 * MINUTE,
    ),
)
