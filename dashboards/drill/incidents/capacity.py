"""Capacity: pools that are full, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dashboards.drill.common import BEGIN, FULL, live, ramp, step
from dashboards.drill.scenario import HOUR, MINUTE, Scenario
from dashboards.drill.stage import Part, Stage
from dashboards.drill.traffic import Shape, Traffic
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["CAPACITY"]


def keys_exhausted(stage: Stage) -> None:
    """Keys stay in fp16 while values are packed to a quarter: the halves of the pool do not fit."""
    pool = live(stage).add_pool(4096)

    def take(pool: BlockPoolAllocator, owner: str, n_tokens: int) -> None:
        pool.allocate("k", n_tokens, owner)
        pool.allocate("v", max(1, n_tokens // 4), owner)

    Traffic(stage, pool, load=step(0.6, 1.06, BEGIN), take=take)


def traffic_doubles(stage: Stage) -> None:
    """Twice the requests within three quarters of an hour, each of them honest."""
    pool = live(stage).add_pool(8192)
    Traffic(stage, pool, Shape(seconds=120), load=ramp(0.5, 1.1, BEGIN, BEGIN + 45 * MINUTE))


def block_size_too_large(stage: Stage) -> None:
    """Chats of a hundred tokens, in blocks of 256."""
    pool = live(stage).add_pool(512, block_size=256)
    mean_s = 60.0

    def chat() -> Part:
        owner, n_tokens = stage.fresh_id("chat"), int(stage.random.uniform(60, 140))
        try:
            pool.allocate_kv(n_tokens, owner)
        except BlockPoolExhaustedError:
            return
        yield stage.random.uniform(0.5, 1.5) * mean_s
        pool.free_all(owner)

    load = step(0.4, 1.02, BEGIN)
    stage.play(arrivals(stage, chat, lambda now_s: load(now_s) * 256 / mean_s))


def arrivals(stage: Stage, request: Callable[[], Part], a_second: Callable[[float], float]) -> Part:
    while True:
        yield stage.random.expovariate(a_second(stage.now_s))
        stage.play(request())


CAPACITY: Final = (
    Scenario(
        name="keys-exhausted",
        title="K exhausted while V idles",
        act=keys_exhausted,
        seconds=HOUR,
        alert="VeloxQuantPoolStreamImbalance",
        within_s=15 * MINUTE,
        says=(r"split wrongly", r"Stream k\b"),
        companions=("VeloxQuantPoolExhausted", "VeloxQuantPoolExhaustionSustained"),
    ),
    Scenario(
        name="traffic-doubles",
        title="traffic doubles, the pool fills honestly",
        act=traffic_doubles,
        seconds=90 * MINUTE,
        alert="VeloxQuantPoolExhaustionPredicted",
        within_s=35 * MINUTE,
        companions=FULL,
        before="veloxquant_block_pool_exhausted_total",
        ahead_s=6 * MINUTE,
    ),
    Scenario(
        name="block-size-too-large",
        title="many short requests in large blocks, pool full",
        act=block_size_too_large,
        seconds=75 * MINUTE,
        alert="VeloxQuantPoolTokenSlotWaste",
        within_s=40 * MINUTE,
        says=(r"block size of 16\b",),
        companions=FULL,
    ),
)
