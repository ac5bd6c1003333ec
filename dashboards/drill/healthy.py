"""The healthy workloads: ways in which good servers look bad. No alert may fire on any."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

from dashboards.drill.common import SHORT, live
from dashboards.drill.scenario import HOUR, MINUTE, Scenario
from dashboards.drill.sidecar import Sidecar
from dashboards.drill.stage import Part, Stage
from dashboards.drill.traffic import Shape, Traffic
from dashboards.drill.worker import Worker
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["HEALTHY"]

DAY: Final = 24 * HOUR


def idle(stage: Stage) -> None:
    """A server that nobody asks."""
    live(stage).add_pool(4096)


def warm_prompt_cache(stage: Stage) -> None:
    """An hour of load leaves entries in the prompt cache, kept through an idle night."""
    pool = live(stage).add_pool(4096)
    kept: list[str] = []

    def end(pool: BlockPoolAllocator, owner: str) -> None:
        while pool.stats.blocks_in_use() > 0.7 * pool.stats.n_blocks and kept:
            pool.free_all(kept.pop(0))
        pool.mark_cached(owner)
        kept.append(owner)

    traffic = Traffic(stage, pool, load=0.2, end=end)

    def stop() -> None:
        traffic.is_on = False

    stage.at(HOUR, stop)


def steady(stage: Stage) -> None:
    """Seven tenths of the pool, hour after hour."""
    Traffic(stage, live(stage).add_pool(4096), load=0.7)


def short_chats(stage: Stage) -> None:
    """Chats of fifty tokens at the caches' own growth step: mostly empty slots, in a pool with room."""
    pool = live(stage).add_pool(2048)
    step = 256

    def chat() -> Part:
        owner, n_prompt = stage.fresh_id("chat"), int(stage.random.uniform(20, 60))
        keys, values = pool.allocate_kv(step, owner, n_filled=n_prompt)
        for _ in range(3):
            yield stage.random.uniform(2, 6)
            pool.add_filled(16, keys[0].lease, values[0].lease)
        pool.free_all(owner)

    def arrivals() -> Part:
        a_second = 0.55 * pool.stats.n_blocks / (2 * step / 16) / 12
        while True:
            yield stage.random.expovariate(a_second)
            stage.play(chat())

    stage.play(arrivals())


def daily_wave(stage: Stage) -> None:
    """A night at a tenth, a noon at nine tenths."""

    def load(now_s: float) -> float:
        return 0.47 - 0.37 * math.cos(2 * math.pi * now_s / DAY)

    shape = Shape(seconds=150)
    Traffic(stage, live(stage).add_pool(4096), shape, load=load, most=0.88)


def burst_and_drain(stage: Stage) -> None:
    """Every twenty minutes as many requests as fit, then none."""
    pool = live(stage).add_pool(4096)

    def burst() -> None:
        for _ in range(42):
            stage.play(_exact_request(stage, pool), after_s=stage.random.uniform(0, 90))

    stage.every(20 * MINUTE, burst, after_s=5 * MINUTE)


def _exact_request(stage: Stage, pool: BlockPoolAllocator) -> Part:
    owner = stage.fresh_id()
    try:
        pool.allocate_kv(512, owner)
        for _ in range(4):
            yield stage.random.uniform(20, 60)
            pool.allocate_kv(64, owner)
        yield 30.0
    except BlockPoolExhaustedError:
        pass
    pool.free_all(owner)


def rolling_restart(stage: Stage) -> None:
    """Three workers are replaced one after the other, each drained and stopped in good order."""
    sidecar = stage.keep(Sidecar())
    stage.add_target(sidecar.page())

    def serve(slot: int, until_s: float) -> Part:
        worker = Worker(f"worker-{slot}")
        traffic = Traffic(stage, worker.add_pool(1024), SHORT, load=0.6)
        published = sidecar.add(worker)
        while stage.now_s < until_s:
            published.publish()
            traffic.is_on = stage.now_s < until_s - 90
            yield 15.0
        published.stop()

    for slot in range(3):
        handover_s = (20 + 5 * slot) * MINUTE
        stage.play(serve(slot, handover_s))
        stage.play(serve(slot, 10 * HOUR), after_s=handover_s + 10)


def first_scrape(stage: Stage) -> None:
    """Prometheus comes to a server that has been at work, and had its troubles, for hours."""
    worker = Worker()
    pool = worker.add_pool(1024)
    for _ in range(50):
        owner = stage.fresh_id()
        blocks = pool.allocate("k", 160, owner)
        pool.free(blocks)
        pool.free(blocks)
        try:
            pool.allocate("k", 20_000, owner)
        except BlockPoolExhaustedError:
            pool.free_all(owner)
    worker.snapshot()
    Traffic(stage, pool, SHORT, load=0.6)

    def appear() -> None:
        stage.add_target(worker.page())

    stage.at(2 * MINUTE, appear)


def shrunk_to_zero(stage: Stage) -> None:
    """A pool that an idle server gave up whole, and grows anew with the next requests."""
    pool = live(stage).add_pool(1024, grow_on_exhaustion=True, max_blocks=4096)
    traffic = Traffic(stage, pool, load=0.5, n_blocks=1024)

    def stop() -> None:
        traffic.is_on = False

    def shrink() -> None:
        for stream in ("k", "v"):
            pool.shrink(stream, 0)

    def start() -> None:
        Traffic(stage, pool, load=0.5, n_blocks=1024)

    stage.at(20 * MINUTE, stop)
    stage.at(30 * MINUTE, shrink)
    stage.at(75 * MINUTE, start)


def counter_resets(stage: Stage) -> None:
    """A server that is restarted every forty minutes, and one that makes its pool anew."""
    running: list[tuple[Worker, Traffic]] = []
    pages: list[Callable[[], Iterable[Any] | None]] = []

    def restart() -> None:
        for _, traffic in running:
            traffic.is_on = False
        worker = Worker()
        running[:] = [(worker, Traffic(stage, worker.add_pool(1024), SHORT, load=0.6))]
        pages[:] = [worker.page()]

    stage.every(40 * MINUTE, restart)
    stage.add_target(lambda: pages[0]() if pages else None)

    worker = Worker()
    stage.add_target(worker.page(), instance="counter-resets-pool")
    remade: list[Traffic] = []

    def remake() -> None:
        """Its requests go on with the pool that they know, and end with it."""
        for traffic in remade:
            traffic.is_on = False
            worker.registry.remove(traffic.pool)
        pool = worker.add_pool(1024)
        remade[:] = [Traffic(stage, pool, SHORT, load=0.4)]

    stage.every(45 * MINUTE, remake)


HEALTHY: Final = (
    Scenario(name="idle", title="idle", act=idle, seconds=6 * HOUR, interval_s=60),
    Scenario(
        name="warm-prompt-cache",
        title="idle with a warm prompt cache for 12 h",
        act=warm_prompt_cache,
        seconds=13 * HOUR,
        interval_s=60,
    ),
    Scenario(name="steady", title="steady load at 70 %", act=steady, seconds=2 * HOUR),
    Scenario(
        name="short-chats",
        title="short chats at the default growth step",
        act=short_chats,
        seconds=2 * HOUR,
    ),
    Scenario(
        name="daily-wave",
        title="daily wave to 90 %",
        act=daily_wave,
        seconds=DAY,
        interval_s=60,
    ),
    Scenario(
        name="burst-and-drain", title="burst and drain", act=burst_and_drain, seconds=2 * HOUR
    ),
    Scenario(
        name="rolling-restart",
        title="rolling restart of workers",
        act=rolling_restart,
        seconds=HOUR,
    ),
    Scenario(
        name="first-scrape",
        title="first scrape after start",
        act=first_scrape,
        seconds=HOUR,
    ),
    Scenario(
        name="shrunk-to-zero",
        title="pool shrunk to zero",
        act=shrunk_to_zero,
        seconds=2 * HOUR,
    ),
    Scenario(
        name="counter-resets",
        title="counter resets",
        act=counter_resets,
        seconds=2 * HOUR,
    ),
)
