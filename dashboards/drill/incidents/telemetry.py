"""Telemetry: who watches is gone, or tells of something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dashboards.drill.benchmark_pages import regressed_page
from dashboards.drill.common import BEGIN, FULL, SHORT, live, storage, write_rows
from dashboards.drill.scenario import HOUR, MINUTE, Scenario
from dashboards.drill.sidecar import Sidecar
from dashboards.drill.stage import Part, Stage
from dashboards.drill.traffic import Traffic
from dashboards.drill.worker import GB, Worker

__all__ = ["TELEMETRY"]


def worker_killed(stage: Stage) -> None:
    """The system kills a worker whose pool and memory are full."""
    sidecar = stage.keep(Sidecar())
    workers = [Worker(f"worker-{n}") for n in range(2)]
    for n, worker in enumerate(workers):
        pool = worker.add_pool(512, storage=storage if n == 0 else None)
        Traffic(stage, pool, SHORT, load=1.3 if n == 0 else 0.5)
        stage.every(15, sidecar.add(worker).publish)
    write_rows(stage, workers[0])
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
        stage.play(until(BEGIN if n == 0 else 10 * HOUR, stage, published.publish))
    stage.add_target(sidecar.page())


def sidecar_silent(stage: Stage) -> None:
    """Nobody answers the scrape any more."""
    worker = live(stage)
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
    worker = live(stage)
    Traffic(stage, worker.add_pool(1024), SHORT, load=0.3)


def until(end_s: float, stage: Stage, call: Callable[[], None]) -> Part:
    while stage.now_s < end_s:
        call()
        yield 15.0


TELEMETRY: Final = (
    Scenario(
        name="worker-killed",
        title="worker killed by the system at full memory",
        act=worker_killed,
        seconds=40 * MINUTE,
        alert="VeloxQuantWorkerDown",
        within_s=3 * MINUTE,
        says=(r"/debug/last/worker-0\b", r"pool main: (4[5-9]\d|5\d\d) of 512 blocks"),
        labels=(("process", "worker-0"),),
        companions=(*FULL, "VeloxQuantMlxMemoryNearLimit"),
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
