"""What several scenarios share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dashboards.drill.scenario import MINUTE
from dashboards.drill.stage import Stage
from dashboards.drill.traffic import Shape
from dashboards.drill.worker import Worker
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["BEGIN", "FULL", "SHORT", "live", "ramp", "step", "storage", "write_rows"]

BEGIN: Final = 20 * MINUTE
# For small pools, so that chance alone does not fill them.
SHORT: Final = Shape(prompt=64, output=32, step=32, seconds=60)
FULL: Final = (
    "VeloxQuantPoolNearCapacity",
    "VeloxQuantPoolExhausted",
    "VeloxQuantPoolExhaustionSustained",
)


def live(stage: Stage) -> Worker:
    """A worker that exports by itself."""
    worker = Worker()
    stage.add_target(worker.page())
    return worker


def step(low: float, high: float, at_s: float) -> Callable[[float], float]:
    """A value that changes at `at_s`."""
    return lambda now_s: high if now_s >= at_s else low


def ramp(low: float, high: float, from_s: float, to_s: float) -> Callable[[float], float]:
    """A value that goes straight from `low` to `high` in that time."""

    def value(now_s: float) -> float:
        return low + (high - low) * min(1.0, max(0.0, (now_s - from_s) / (to_s - from_s)))

    return value


def storage(pool: BlockPoolAllocator) -> Any:
    """A real storage."""
    from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage

    return MLXBlockStorage(pool, head_dim=128)


def write_rows(stage: Stage, worker: Worker) -> None:
    """Have a row written to blocks that are held, and their buffers made: real bytes."""
    import mlx.core as mx

    storage = worker.storages[0]
    row = mx.ones((1, storage.head_dim), dtype=mx.float16)

    def write() -> None:
        for first in list(storage.pool._owners.values()):
            for block in storage.pool.blocks_for(first.owner)[:2]:
                storage.write(block, 0, row)
        storage.evaluate()

    stage.every(60, write)
