"""The incidents: each of them was reported by somebody who ran a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from dashboards.drill.benchmark_pages import regressed_page
from dashboards.drill.faults import Contended, slow_down
from dashboards.drill.scenario import HOUR, MINUTE, Scenario
from dashboards.drill.sidecar import Sidecar
from dashboards.drill.stage import Part, Stage
from dashboards.drill.traffic import Shape, Traffic
from dashboards.drill.worker import GB, MB, Worker
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.memory.journal import ALLOCATE, FREE_ALL

__all__ = ["INCIDENTS"]

BEGIN: Final = 20 * MINUTE
# For small pools, so that chance alone does not fill them.
SHORT: Final = Shape(prompt=64, output=32, step=32, seconds=60)


def _live(stage: Stage) -> Worker:
    """A worker that exports by itself."""
    worker = Worker()
    stage.add_target(worker.page())
    return worker


# -- leaks ---------------------------------------------------------------------------------------


def aborted_requests_leak(stage: Stage) -> None:
    """One in 200 requests is aborted, and its cleanup never runs."""
    pool = _live(stage).add_pool(4096)

    def end(pool: BlockPoolAllocator, owner: str) -> None:
        if stage.now_s < BEGIN or stage.random.random() > 0.005:
            pool.free_all(owner)

    Traffic(stage, pool, load=0.45, end=end)


def prefill_only_leak(stage: Stage) -> None:
    """Requests that only want a first token keep their last block: cleanup follows decoding."""
    pool = _live(stage).add_pool(4096)

    def end(pool: BlockPoolAllocator, owner: str) -> None:
        blocks = pool.blocks_for(owner)
        last = {block.stream: block.block_id for block in blocks}
        kept = set(last.values()) if stage.now_s >= BEGIN else set()
        pool.free([block for block in blocks if block.block_id not in kept], owner=owner)

    Traffic(stage, pool, Shape(seconds=100), load=0.40)
    Traffic(stage, pool, Shape(prompt=384, output=0, seconds=0.5), load=0.0003, end=end)


# -- capacity ------------------------------------------------------------------------------------


def keys_exhausted(stage: Stage) -> None:
    """Keys stay in fp16 while values are packed to a quarter: the halves of the pool do not fit."""
    pool = _live(stage).add_pool(4096)

    def take(pool: BlockPoolAllocator, owner: str, n_tokens: int) -> None:
        pool.allocate("k", n_tokens, owner)
        pool.allocate("v", max(1, n_tokens // 4), owner)

    Traffic(stage, pool, load=_step(0.6, 1.06, BEGIN), take=take)


def traffic_doubles(stage: Stage) -> None:
    """Twice the requests within three quarters of an hour, each of them honest."""
    pool = _live(stage).add_pool(8192)
    Traffic(stage, pool, Shape(seconds=120), load=_ramp(0.5, 1.1, BEGIN, BEGIN + 45 * MINUTE))


def block_size_too_large(stage: Stage) -> None:
    """Chats of a hundred tokens, in blocks of 256."""
    pool = _live(stage).add_pool(512, block_size=256)
    mean_s = 60.0

    def chat() -> Part:
        owner, n_tokens = stage.fresh_id("chat"), int(stage.random.uniform(60, 140))
        try:
            pool.allocate_kv(n_tokens, owner)
        except BlockPoolExhaustedError:
            return
        yield stage.random.uniform(0.5, 1.5) * mean_s
        pool.free_all(owner)

    load = _step(0.4, 1.02, BEGIN)
    stage.play(_arrivals(stage, chat, lambda now_s: load(now_s) * 256 / mean_s))


# -- memory outside the pool ---------------------------------------------------------------------


def cache_grows_while_idle(stage: Stage) -> None:
    """Requests have ended, and MLX's buffer cache goes on growing."""
    worker = _live(stage)
    traffic = Traffic(stage, worker.add_pool(512, storage=_storage), SHORT, load=0.5)

    def stop() -> None:
        traffic.is_on = False

    def grow() -> None:
        if stage.now_s > BEGIN + 2 * MINUTE:
            worker.memory.cache += 6 * MB

    stage.at(BEGIN, stop)
    stage.every(15, grow)
    _write_rows(stage, worker)


def active_climbs_outside(stage: Stage) -> None:
    """A server keeps arrays of every request, beside a pool whose buffers stay as they are."""
    worker = _live(stage)
    Traffic(stage, worker.add_pool(512, storage=_storage), SHORT, load=0.5)

    def grow() -> None:
        if stage.now_s > BEGIN:
            worker.memory.outside += 5 * MB

    stage.every(15, grow)
    _write_rows(stage, worker)


# -- time ----------------------------------------------------------------------------------------


def free_all_slow(stage: Stage) -> None:
    """A release that visits each block, and requests that get ever longer."""
    _slow(stage, FREE_ALL)


def allocate_slow(stage: Stage) -> None:
    """An allocation that looks through the free list for each block."""
    _slow(stage, ALLOCATE)


def _slow(stage: Stage, operation: int) -> None:
    pool = _live(stage).add_pool(32768)
    slow_down(pool, operation, 4_000)
    tokens = _ramp(500, 8000, BEGIN, BEGIN + 40 * MINUTE)
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

    Traffic(stage, _live(stage).add_pool(4096, prepare=prepare), load=0.5)
    stage.at(BEGIN, begin)


# -- pool life -----------------------------------------------------------------------------------


def grow_shrink_chase(stage: Stage) -> None:
    """Bursts make the pool grow, and a timer shrinks it to what is used."""
    pool = _live(stage).add_pool(512, grow_on_exhaustion=True, max_blocks=4096)

    def load(now_s: float) -> float:
        return 2.5 if now_s > BEGIN and now_s % 240 < 90 else 0.4

    def shrink() -> None:
        for stream in ("k", "v"):
            pool.shrink(stream, 0)

    Traffic(stage, pool, Shape(seconds=20), load=load)
    stage.every(60, shrink, after_s=BEGIN)


def double_free(stage: Stage) -> None:
    """Two code paths both release a request, and one mixes up the pools."""
    worker = _live(stage)
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


# -- telemetry itself ----------------------------------------------------------------------------


def worker_killed(stage: Stage) -> None:
    """The system kills a worker whose pool and memory are full."""
    sidecar = stage.keep(Sidecar())
    workers = [Worker(f"worker-{n}") for n in range(2)]
    for n, worker in enumerate(workers):
        pool = worker.add_pool(512, storage=_storage if n == 0 else None)
        Traffic(stage, pool, SHORT, load=1.3 if n == 0 else 0.5)
        stage.every(15, sidecar.add(worker).publish)
    _write_rows(stage, workers[0])
    workers[0].memory.outside = 15 * GB

    def kill() -> None:
        sidecar.workers[0].kill()

    def ask() -> None:
        last = sidecar.last_state("worker-0")
        pool = last["file"]["snapshot"]["pools"][0]
        if last["state"] != "dead" or pool["n_allocations"] - pool["n_frees"] < 450:
            stage.problems.append("/debug/last/worker-0 does not tell of a full pool")

    stage.add_target(sidecar.page())
    stage.at(BEGIN + 5, kill)
    stage.at(BEGIN + 10 * MINUTE, ask)


def publisher_silent(stage: Stage) -> None:
    """A worker lives and publishes no more; its last figures are not those of now."""
    sidecar = stage.keep(Sidecar())
    for n in range(2):
        worker = Worker(f"worker-{n}")
        Traffic(stage, worker.add_pool(1024), SHORT, load=0.5)
        published = sidecar.add(worker)
        stage.play(_until(BEGIN if n == 0 else 10 * HOUR, stage, published.publish))
    stage.add_target(sidecar.page())


def sidecar_silent(stage: Stage) -> None:
    """Nobody answers the scrape any more."""
    worker = _live(stage)
    Traffic(stage, worker.add_pool(1024), SHORT, load=0.5)

    def fall_silent() -> None:
        worker.alive = False

    stage.at(BEGIN, fall_silent)


def sidecar_never_was(stage: Stage) -> None:
    """Prometheus scrapes other things, and was never told of the sidecar."""
    stage.add_target(list, job="node")


def benchmark_regresses(stage: Stage) -> None:
    """CI compares a commit with its base, and free_all takes half as long again."""
    stage.add_target(regressed_page(stage, BEGIN), job="node")
    worker = _live(stage)
    Traffic(stage, worker.add_pool(1024), SHORT, load=0.3)


# -- helpers -------------------------------------------------------------------------------------


def _step(low: float, high: float, at_s: float) -> Callable[[float], float]:
    return lambda now_s: high if now_s >= at_s else low


def _ramp(low: float, high: float, from_s: float, to_s: float) -> Callable[[float], float]:
    def value(now_s: float) -> float:
        return low + (high - low) * min(1.0, max(0.0, (now_s - from_s) / (to_s - from_s)))

    return value


def _until(end_s: float, stage: Stage, call: Callable[[], None]) -> Part:
    while stage.now_s < end_s:
        call()
        yield 15.0


def _arrivals(
    stage: Stage, request: Callable[[], Part], a_second: Callable[[float], float]
) -> Part:
    while True:
        yield stage.random.expovariate(a_second(stage.now_s))
        stage.play(request())


def _storage(pool: BlockPoolAllocator) -> Any:
    from veloxquant_mlx.memory.mlx_storage import MLXBlockStorage

    return MLXBlockStorage(pool, head_dim=128)


def _write_rows(stage: Stage, worker: Worker) -> None:
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


_FULL: Final = (
    "VeloxQuantPoolNearCapacity",
    "VeloxQuantPoolExhausted",
    "VeloxQuantPoolExhaustionSustained",
)

INCIDENTS: Final = (
    Scenario(
        name="aborted-requests-leak",
        title="requests aborted, blocks never given back",
        act=aborted_requests_leak,
        seconds=2 * HOUR,
        alert="VeloxQuantPoolBlockLeak",
        within_s=60 * MINUTE,
        says=(r"oldest owner\b.* for (\dh )?\d+m",),
        companions=(*_FULL, "VeloxQuantPoolExhaustionPredicted"),
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
        companions=(*_FULL, "VeloxQuantPoolExhaustionPredicted"),
        before="veloxquant_block_pool_exhausted_total",
        ahead_s=4 * HOUR,
    ),
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
        companions=_FULL,
        before="veloxquant_block_pool_exhausted_total",
        ahead_s=10 * MINUTE,
    ),
    Scenario(
        name="block-size-too-large",
        title="many short requests in large blocks, pool full",
        act=block_size_too_large,
        seconds=75 * MINUTE,
        alert="VeloxQuantPoolTokenSlotWaste",
        within_s=40 * MINUTE,
        says=(r"block size of 16\b",),
        companions=_FULL,
    ),
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
    Scenario(
        name="worker-killed",
        title="worker killed by the system at full memory",
        act=worker_killed,
        seconds=40 * MINUTE,
        alert="VeloxQuantWorkerDown",
        within_s=3 * MINUTE,
        says=(r"/debug/last/worker-0\b", r"pool main: (4[5-9]\d|5\d\d) of 512 blocks"),
        labels=(("process", "worker-0"),),
        companions=(*_FULL, "VeloxQuantMlxMemoryNearLimit"),
    ),
    Scenario(
        name="publisher-silent",
        title="publisher silent: stale, not zero load",
        act=publisher_silent,
        seconds=45 * MINUTE,
        alert="VeloxQuantMetricsStale",
        within_s=5 * MINUTE,
        says=(r"boards show the past",),
        labels=(("process", "worker-0"),),
        companions=("VeloxQuantWorkerDown",),
    ),
    Scenario(
        name="sidecar-silent",
        title="sidecar silent: missing, not zero load",
        act=sidecar_silent,
        seconds=45 * MINUTE,
        alert="VeloxQuantExporterDown",
        within_s=7 * MINUTE,
        says=(r"missing, not zero",),
    ),
    Scenario(
        name="sidecar-never-was",
        title="sidecar that never was",
        act=sidecar_never_was,
        seconds=30 * MINUTE,
        alert="VeloxQuantExporterAbsent",
        begins_s=0,
        within_s=12 * MINUTE,
        says=(r"never configured",),
    ),
    Scenario(
        name="benchmark-regresses",
        title="a benchmark of a commit regresses",
        act=benchmark_regresses,
        seconds=45 * MINUTE,
        alert="VeloxQuantBenchmarkRegression",
        within_s=2 * MINUTE,
        says=(r"free_all\b", r"1\.5\d? times"),
        labels=(("benchmark", "free_all"),),
    ),
)
