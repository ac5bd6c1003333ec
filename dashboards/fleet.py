"""Fleet: an evening on three machines, for the boards' pictures and for the tests of their queries.

    python -m dashboards.fleet OUT.om [--minutes 180] [--interval 15] [--end SECONDS]

Acted out as the incident drill is (`dashboards.drill`): real pools, hooks, sidecars and collectors
under a virtual clock. Writes all series as OpenMetrics, the last scrape at `--end`. Something
happens on every panel: a pool fills up, another leaks, one has its calls slowed down and its lock
contended, workers are killed and come again, and the smallest machine goes away before the end.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dashboards.drill.clock import CLOCK

if __name__ == "__main__":
    REAL_END_S: Final = time.time() // 60 * 60
    CLOCK.install()  # before what is imported below takes hold of the time

from prometheus_client.core import GaugeMetricFamily

from dashboards.drill.faults import Contended, slow_down
from dashboards.drill.sidecar import Published, Sidecar
from dashboards.drill.stage import Stage
from dashboards.drill.traffic import Call, Shape, Traffic, give_back
from dashboards.drill.worker import MB, Reckoned, Worker
from dashboards.served import ServedRequests, ServingWorker
from veloxquant_mlx.core.exceptions import OwnerAlreadyActiveError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.memory.journal import ALLOCATE, FREE, FREE_ALL

__all__ = ["Fleet"]

Pool = BlockPoolAllocator
Page = Callable[[], Iterable[Any] | None]
# When what happens, as shares of the evening.
CONTENDED: Final = (0.3, 0.45)
KILLED: Final = 0.6
RESTARTED: Final = 0.66
GONE: Final = 0.85

# About what a snapshot of a pool takes, fifteen times: workers here publish each 15 s, not each second.
SNAPSHOT_NS: Final = 1_500_000

CHAT: Final = Shape(prompt=700, output=300, seconds=45.0)
SHORT: Final = Shape(prompt=90, output=60, seconds=20.0)
DOCUMENT: Final = Shape(prompt=6000, output=400, seconds=90.0, step=128)


class Fleet:
    """The machines, on a stage.

    Args:
        stage: Where; its scrapes see the fleet.
        seconds: How long the evening is.
    """

    def __init__(self, stage: Stage, seconds: float) -> None:
        self.stage = stage
        self.seconds = seconds
        self._exits = ExitStack()
        self._studio_1()
        self._studio_2()
        self._mini()

    def close(self) -> None:
        """End the processes that stand for the workers."""
        self._exits.close()

    # -- machines -------------------------------------------------------------------------------

    def _studio_1(self) -> None:
        """A chat server with a draft model that goes up and down, and batches that come and go."""
        sidecar = self._sidecar("studio-1:9465")
        api, batch = ServingWorker("api"), self._worker(sidecar, "batch")
        self._publish(sidecar, api)
        chat = self._pool(api, 4096, "chat")
        self._serve(api, chat, self._wave(0.35, 0.8), Take(self.stage, 0.9), give_back)
        draft = self._pool(api, 512, "draft", format="int8")
        Traffic(self.stage, draft, SHORT, self._wave(0.2, 0.5), take=Take(self.stage, 0.8, "int8"))
        bulk = self._pool(batch, 512, "bulk", separate_kv=False, grow_on_exhaustion=True,
                          max_blocks=6144)  # fmt: skip
        load = self._bursts(0.0, 4.0)
        Traffic(self.stage, bulk, DOCUMENT, load, n_blocks=512, take=Take(self.stage, 0.97))
        self.stage.every(self.seconds / 12, lambda: bulk.shrink("kv", 64))
        self.stage.every(20.0, lambda: self._breathe(api, 0.2))
        self.stage.every(20.0, lambda: self._breathe(batch, 0.6))

    def _studio_2(self) -> None:
        """A chat server whose traffic doubles, with every fault there is; a worker that is killed."""
        sidecar = self._sidecar("studio-2:9465")
        api = ServingWorker("api")
        self._publish(sidecar, api)
        batch = self._worker(sidecar, "batch")
        lock = Contended(0.0, 1_500_000, self.stage.random)
        chat = self._pool(api, 2048, "chat", format="int8", lock=lock, grow_on_exhaustion=True,
                          max_blocks=4096)  # fmt: skip
        take = Take(self.stage, 0.85, "int8", lopsided=0.1)
        self._serve(
            api, chat, self._ramp(0.25, 1.0), take, Forgetful(self.stage, self.seconds / 12)
        )
        for share in (0.25, 0.5):
            self.stage.at(share * self.seconds, lambda: _shrink(chat))
        for share in CONTENDED:
            self.stage.at(share * self.seconds, lambda: setattr(lock, "share", 0.2 - lock.share))
            self.stage.at(share * self.seconds, lambda: _misuse(chat))
        self.stage.at(0.15 * self.seconds, lambda: _keep(chat))
        self._embed(batch)
        again = Worker("batch")
        self.stage.at(KILLED * self.seconds, sidecar.workers[-1].kill)
        self.stage.at(RESTARTED * self.seconds, lambda: self._publish(sidecar, again))
        self.stage.at(RESTARTED * self.seconds, lambda: self._embed(again))
        self.stage.at(0.2 * self.seconds, lambda: self._spoil(sidecar))
        self.stage.every(20.0, lambda: self._breathe(api, 0.2))

    def _mini(self) -> None:
        """A small machine that exports by itself: short chats in large blocks, a leak, an end."""
        worker = Worker()
        worker.memory.limit //= 2
        worker.memory.weights //= 3
        small = self._pool(worker, 768, "chat", block_size=32, format="int4")
        end = Forgetful(self.stage, self.seconds / 40)
        take = Take(self.stage, 0.45, "int4", lopsided=0.25)
        Traffic(self.stage, small, SHORT, self._wave(0.3, 0.75), take=take, end=end)
        self.stage.add_target(_counted(worker.page()), instance="mini:9464")
        self.stage.every(20.0, lambda: self._breathe(worker, 0.4))
        self.stage.at(GONE * self.seconds, lambda: setattr(worker, "alive", False))

    def _embed(self, worker: Worker) -> None:
        """A small pool of short requests."""
        worker.memory.weights //= 4
        self.stage.every(20.0, lambda: self._breathe(worker, 0.2))
        pool = self._pool(worker, 1024, "embed")
        Traffic(self.stage, pool, SHORT, self._wave(0.3, 0.6), take=Take(self.stage, 0.85))

    def _serve(
        self,
        worker: ServingWorker,
        pool: Pool,
        load: Callable[[float], float],
        take: Take,
        end: Call,
    ) -> None:
        """Chats on a pool of 4,096 blocks, told of as a server's requests."""
        requests = worker.requests = ServedRequests(self.stage, take, end)
        Traffic(self.stage, pool, CHAT, load, n_blocks=4096, take=requests.take, end=requests.end)

    # -- what they are made of ------------------------------------------------------------------

    def _sidecar(self, instance: str) -> Sidecar:
        sidecar = self._exits.enter_context(Sidecar())
        read = sidecar.source.read_with_dead

        def read_slowly() -> Any:
            """Reading files takes time, of which the virtual clock knows nothing."""
            CLOCK.pass_ns(int(self.stage.random.uniform(2.0, 3.0) * 1e6))
            return read()

        sidecar.source.read_with_dead = read_slowly  # type: ignore[method-assign]
        self.stage.add_target(_counted(sidecar.page()), instance=instance)
        return sidecar

    def _worker(self, sidecar: Sidecar, process: str) -> Worker:
        worker = Worker(process)
        self._publish(sidecar, worker)
        return worker

    def _publish(self, sidecar: Sidecar, worker: Worker) -> Published:
        published = sidecar.add(worker)
        self.stage.every(15.0, published.publish)
        return published

    def _pool(
        self,
        worker: Worker,
        n_blocks: int,
        name: str,
        *,
        format: str = "fp16",
        lock: Contended | None = None,
        **config: Any,
    ) -> Pool:
        """A watched pool with a storage, whose calls take time by the block."""

        def prepare(pool: Pool) -> None:
            if lock is not None:
                pool._lock = lock  # type: ignore[assignment] # noqa: SLF001 - it is one to the pool

        def storage(pool: Pool) -> Quantised:
            return Quantised(pool, 16 * 1024 * pool.config.block_size, format)

        pool = worker.add_pool(n_blocks, name=name, storage=storage, prepare=prepare, **config)
        for operation, ns_a_block in ((ALLOCATE, 300), (FREE, 100), (FREE_ALL, 40)):
            slow_down(pool, operation, ns_a_block)
        return pool

    def _wave(self, low: float, high: float) -> Callable[[float], float]:
        """Two ups and downs an evening."""
        middle, height = (low + high) / 2, (high - low) / 2
        turn = 4 * math.pi / self.seconds
        return lambda now_s: middle - height * math.cos(turn * now_s)

    def _ramp(self, begin: float, end: float) -> Callable[[float], float]:
        return lambda now_s: begin + (end - begin) * now_s / self.seconds

    def _bursts(self, low: float, high: float) -> Callable[[float], float]:
        """Six jobs an evening, each of half the time to the next."""
        return lambda now_s: high if (6 * now_s / self.seconds) % 1 < 0.5 else low

    def _breathe(self, worker: Worker, depth: float) -> None:
        """Let what MLX holds beside the pools move, as activations come and go."""
        chance = self.stage.random
        memory = worker.memory
        memory.cache = int(memory.cache * 0.9 + 0.1 * chance.uniform(300, 1800) * MB)
        memory.outside = int(200 * MB * (1 + depth * chance.random()))
        memory.other += int(chance.uniform(-1.0, 1.2) * 10 * depth * MB)

    def _spoil(self, sidecar: Sidecar) -> None:
        """A file that cannot be read, for a while."""
        (known,) = [path for path in sidecar.folder.glob("api*") if path.suffix == ".json"][:1]
        bad = known.with_name(known.name.replace("api", "torn"))
        bad.write_text("{")
        self.stage.at(self.stage.now_s + self.seconds / 10, bad.unlink)


class Quantised(Reckoned):
    """Reckons the bytes of a storage that packs what it keeps."""

    def __init__(self, pool: Pool, block_bytes: int, format: str) -> None:
        self.bits = {"fp16": 16, "int8": 8, "int4": 4}[format]
        self.format = format
        super().__init__(pool, block_bytes * self.bits // 16)

    def usage(self) -> Any:
        """As `MLXBlockStorage.usage`."""
        CLOCK.pass_ns(SNAPSHOT_NS)  # within the snapshot, whose time is told
        found = super().usage()
        return Usage(found, self.format, 16 // self.bits)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a packing storage would tell."""

    plain: Any
    format: str
    times: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @property
    def fp16_equivalent_bytes(self) -> int:
        """Unpacked."""
        return int(self.plain.resident_bytes) * self.times

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """All of one."""
        return {self.format: self.plain.resident_bytes}


@dataclass(frozen=True, slots=True)
class Take:
    """Takes blocks for a request, and fills a share of their slots.

    Attributes:
        stage: For its chance.
        filled: Share of the slots that get a token, on average.
        format: Tag of the blocks.
        lopsided: Share of the calls that want more of the keys than of the values.
    """

    stage: Stage
    filled: float
    format: str = "fp16"
    lopsided: float = 0.0

    def __call__(self, pool: Pool, owner: str, n_tokens: int) -> None:
        """See `Traffic`."""
        chance = self.stage.random
        share = min(1.0, chance.uniform(self.filled - 0.1, self.filled + 0.1))
        pool.allocate_kv(n_tokens, owner, self.format, n_filled=max(1, int(n_tokens * share)))
        if chance.random() < self.lopsided:
            pool.allocate("k", n_tokens, owner, self.format)


class Forgetful:
    """Ends requests, but for one now and then, whose blocks nobody gives back.

    Args:
        stage: Where.
        seconds: Between two that are forgotten.
    """

    def __init__(self, stage: Stage, seconds: float) -> None:
        self._forgets = False
        stage.every(seconds, self._forget_one, after_s=seconds)

    def __call__(self, pool: Pool, owner: str) -> None:
        """See `Traffic`."""
        if self._forgets:
            self._forgets = False
        else:
            pool.free_all(owner)

    def _forget_one(self) -> None:
        self._forgets = True


def _shrink(pool: Pool) -> None:
    for stream in ("k", "v"):
        pool.shrink(stream, 64)


def _keep(pool: Pool) -> None:
    """Prompts that a cache keeps for whoever comes with the same beginning."""
    for n in range(6):
        pool.allocate_kv(600, f"prefix-{n}", "int8")
        pool.mark_cached(f"prefix-{n}")


def _misuse(pool: Pool) -> None:
    """What a caller with a bug does."""
    blocks = pool.allocate("k", 100, "confused")
    pool.free(blocks)
    pool.free(blocks)
    pool.register_owner("twin")
    with suppress(OwnerAlreadyActiveError):
        pool.register_owner("twin")
    pool.release_owner("twin")


def _counted(page: Page) -> Page:
    """The page, and what Prometheus itself says of it."""

    def collect() -> Iterable[Any] | None:
        families = page()
        if families is None:
            return None
        found = list(families)
        n_samples = sum(len(family.samples) for family in found)
        scraped = GaugeMetricFamily("scrape_samples_scraped", "Samples of a scrape.", n_samples)
        return [*found, scraped]

    return collect


def main(arguments: list[str] | None = None) -> int:
    """Play, and write what was scraped; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.fleet")
    parser.add_argument("out", type=Path, help="OpenMetrics file to write")
    parser.add_argument("--minutes", type=float, default=180)
    parser.add_argument("--interval", type=int, default=15, help="seconds between scrapes")
    parser.add_argument("--end", type=float, default=None, help="time of the last scrape")
    options = parser.parse_args(arguments)
    stage = Stage("fleet", options.interval)
    fleet = Fleet(stage, options.minutes * 60)
    try:
        series = stage.run(options.minutes * 60)
    finally:
        fleet.close()
    with options.out.open("w", encoding="utf-8") as file:
        file.writelines(series.openmetrics(REAL_END_S if options.end is None else options.end))
    return 0


if __name__ == "__main__":
    sys.exit(main())
