"""What watching costs: every bound that issue C sets, with what was measured and how noisy it was.

    python benchmarks/bench_telemetry.py [--quick] [--check] [--json FILE] [--peer PYTHON]
    python -m pytest benchmarks/bench_telemetry.py     # the snapshot and the hooked cycle alone

Times are CPU time of the thread (`time.thread_time`) unless a row says wall. What is compared runs by
turns in one process, in an order that changes, and the median of the paired ratios counts. "noise" is
what the same code differs by when it is compared with itself in the same way. Decoding takes mlx-lm;
with VELOXQUANT_TEST_MODEL the model of that folder decodes too. The peer gets an environment of its
own (see `against_peer.py`), or `--peer` names an interpreter that has it.

Exit status: 0, or with `--check` 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "exporters")]

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig  # noqa: E402
from veloxquant_mlx.telemetry import CATALOGUE, instrument, take_snapshot, uninstrument  # noqa: E402

SIZE: Final = 16  # tokens a block


@dataclass(frozen=True, slots=True)
class Row:
    """One bound.

    Attributes:
        label: What is bounded.
        value: Measured.
        target: At most; None of a row that only informs.
        unit: Written after the numbers.
        noise: What the same code differs by, in the same unit; None where that was not measured.
        note: What else there is to know.
    """

    label: str
    value: float
    target: float | None
    unit: str
    noise: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether the bound is kept."""
        return self.target is None or self.value <= self.target


def pool_of(n_blocks: int, **options: Any) -> BlockPoolAllocator:
    """A pool with one free list."""
    options.setdefault("separate_kv", False)
    return BlockPoolAllocator(PoolConfig(SIZE, n_blocks, **options))


@contextmanager
def watched(n_blocks: int, **options: Any) -> Iterator[BlockPoolAllocator]:
    """A pool that is watched meanwhile."""
    pool = pool_of(n_blocks, **options)
    instrument(pool)
    yield pool
    uninstrument(pool)


# -- the cycle ------------------------------------------------------------------------------------


def cycle_ns(pool: BlockPoolAllocator, n_blocks: int, rounds: int) -> float:
    """An allocation and the release of its owner."""
    allocate, release, n_tokens = pool.allocate, pool.free_all, SIZE * n_blocks
    began = time.thread_time_ns()
    for _ in range(rounds):
        allocate("k", n_tokens, 7)
        release(7)
    return (time.thread_time_ns() - began) / rounds


def by_turns(lanes: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Samples of each lane, by turns in a random order."""
    rng = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in lanes}
    names = list(lanes)
    for turn in range(rounds + 2):
        rng.shuffle(names)
        for name in names:
            took = lanes[name]()
            if turn >= 2:
                samples[name].append(took)
    return samples


def ratio(over: list[float], under: list[float]) -> float:
    """Median of the paired ratios."""
    return median(a / b for a, b in zip(over, under, strict=True))


# Pools of a kind: where a pool's blocks happen to lie in memory moves a cycle of 1,024 blocks by 3 %.
TRIPLETS: Final = 4


def cycles(rounds: int) -> list[Row]:
    """Hooks on against hooks off, over several pools of each kind and as many that are off."""
    rows: list[Row] = []
    with ExitStack() as stack:
        pools = {
            "off": [pool_of(8192) for _ in range(TRIPLETS)],
            "twin": [pool_of(8192) for _ in range(TRIPLETS)],
            "on": [stack.enter_context(watched(8192)) for _ in range(TRIPLETS)],
        }
        for n_blocks, calls, target in ((1, 4000, 1.15), (64, 800, 1.07), (1024, 100, 1.02)):
            lanes = {
                name: (lambda some=some, n=n_blocks, c=calls: over_pools(some, n, c))
                for name, some in pools.items()
            }
            s = by_turns(lanes, rounds)
            noise = abs(ratio(s["twin"], s["off"]) - 1)
            note = f"off {min(s['off']):.0f} ns, on {min(s['on']):.0f} ns at best"
            on_off = ratio(s["on"], s["off"])
            rows.append(
                Row(f"cycle of {n_blocks} blocks, on/off", on_off, target, "x", noise, note)
            )
            if n_blocks == 1:
                added = median(a - b for a, b in zip(s["on"], s["off"], strict=True)) / 2
                wobble = abs(median(a - b for a, b in zip(s["twin"], s["off"], strict=True))) / 2
                rows.append(Row("added a call", added, 120, "ns", wobble))
    return rows


def over_pools(pools: Sequence[BlockPoolAllocator], n_blocks: int, calls: int) -> float:
    """The mean cycle over pools that lie in different places."""
    return sum(cycle_ns(pool, n_blocks, calls // len(pools)) for pool in pools) / len(pools)


PEER_CYCLE: Final = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from allocator_work import cycle\n"
    "print(min(cycle() for _ in range(9)))"
)


def against_peer(python: str, pairs: int) -> list[Row]:
    """Our watched cycle against the peer's bare one, each in processes of its own, by turns."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ours = {**plain, "PYTHONPATH": str(HERE.parent), "VELOXQUANT_INSTRUMENT": "1"}

    def run(interpreter: str, environment: dict[str, str]) -> float:
        command = [interpreter, "-c", PEER_CYCLE, str(HERE)]
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, cwd=HERE
        )
        return float(done.stdout)

    bare = {**plain, "PYTHONPATH": str(HERE.parent)}
    runs = [
        (run(sys.executable, ours), run(python, plain), run(sys.executable, bare))
        for _ in range(pairs)
    ]
    ratios = [watched / peer for watched, peer, _ in runs]
    spread = max(ratios) - min(ratios)
    note = f"unwatched {median(bare / peer for _, peer, bare in runs):.3f} x"
    return [Row("watched cycle over the peer's bare one", median(ratios), 0.42, "x", spread, note)]


# -- recording ------------------------------------------------------------------------------------


def kv_cycle_ns(pool: BlockPoolAllocator, n_blocks: int, rounds: int) -> float:
    """A block of keys and one of values, and the release of their owner: the general path."""
    allocate, release, n_tokens = pool.allocate_kv, pool.free_all, SIZE * n_blocks
    began = time.thread_time_ns()
    for _ in range(rounds):
        allocate(n_tokens, 7)
        release(7)
    return (time.thread_time_ns() - began) / rounds


def recording(rounds: int) -> list[Row]:
    """A recorder on against a pool that is only watched, by turns; and what dumps take."""
    import tempfile

    try:
        from veloxquant_mlx.telemetry import record
        from veloxquant_mlx.telemetry.trace.libraries import load_library

        load_library("msgpack")
        load_library("zstandard")
    except ImportError as error:
        return [Row(f"recorder: not measured, {error}", float("nan"), None, "ns")]
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pools = {
            name: [stack.enter_context(watched(8192)) for _ in range(2)]
            for name in ("watched", "twin", "recorded")
        }
        for pool in pools["recorded"]:
            stack.callback(record(pool, folder=folder).stop)
        for label, cycle, target in (
            ("one-block call", cycle_ns, 60.0),
            ("allocate_kv or its free_all", kv_cycle_ns, None),
        ):
            lanes = {
                name: (lambda some=some, c=cycle: sum(c(pool, 1, 3000) for pool in some) / 2)
                for name, some in pools.items()
            }
            for lane in lanes.values():  # until the rings are full, which happens once
                for _ in range(12):
                    lane()
            s = by_turns(lanes, rounds)
            added = median(a - b for a, b in zip(s["recorded"], s["watched"], strict=True)) / 2
            wobble = abs(median(a - b for a, b in zip(s["twin"], s["watched"], strict=True))) / 2
            note = f"ratio {ratio(s['recorded'], s['watched']):.3f}, twin {ratio(s['twin'], s['watched']):.3f}"
            rows.append(Row(f"recorder, added to a {label}", added, target, "ns", wobble, note))
        rows += dumping(stack.enter_context(watched(200_000)), folder)
    return rows


def dumping(pool: BlockPoolAllocator, folder: str) -> list[Row]:
    """A full ring and ten thousand owners: under the lock, and in all; and a continuous file."""
    from veloxquant_mlx.telemetry import record
    from veloxquant_mlx.telemetry.recorder import Recorder

    def fill(n: int) -> None:
        for _ in range(n):
            pool.allocate_kv(SIZE, 7)
            pool.free_all(7)

    def held_us(recorder: Recorder) -> float:
        began = time.thread_time_ns()
        recorder._ring.copy(pool)
        return (time.thread_time_ns() - began) / 1000

    for owner in range(100, 10_100):
        pool.allocate("k", SIZE * 8, owner)
    recorder = record(pool, folder=folder)
    fill(40_000)
    locked = [held_us(recorder) for _ in range(9)]
    began = time.thread_time()
    path = recorder.dump(Path(folder) / "ring.vqtrace")
    took = time.thread_time() - began
    recorder.stop()
    size = path.stat().st_size
    began = time.process_time()
    fill(40_000)
    plain = time.process_time() - began
    recorder = record(pool, Path(folder) / "all.vqtrace", folder=folder)
    began = time.process_time()
    fill(40_000)
    recorder.stop()
    every = (time.process_time() - began - plain) / 80_000
    note = f"{size / 1024:.0f} KiB"
    spread = median(locked) - min(locked)
    return [
        Row("dump of 65,536 calls, 10,000 owners: lock held", median(locked), None, "us", spread),
        Row("  in all", took * 1000, None, "ms", None, note),
        Row("continuous file, CPU of all threads, a call of kv", every * 1e9, None, "ns"),
    ]


# -- snapshots and scrapes ------------------------------------------------------------------------


def cpu_us(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median of the CPU times, and how far above the least it is, in us."""
    took = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        call()
        took.append((time.thread_time_ns() - began) / 1000)
    return median(took), median(took) - min(took)


def snapshots(rounds: int) -> list[Row]:
    """A pool of a million blocks and ten thousand owners."""
    with watched(1_000_000) as pool:
        for owner in range(10_000):
            pool.allocate("k", SIZE * 50, owner)
        probe = instrument(pool)
        value, noise = cpu_us(probe.snapshot, rounds)
        rows = [Row("snapshot, 1,000,000 blocks, 10,000 owners", value, 20, "us", noise)]
        for owner in range(5000):
            pool.free_all(owner)
            pool.allocate("k", SIZE, owner)
        value, noise = cpu_us(probe.snapshot, rounds)
        rows.append(Row("  the same after 5,000 of the oldest left", value, 20, "us", noise))
    return rows


def scrapes(rounds: int) -> list[Row]:
    """The page of one pool and of sixteen, small and large."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest

        from veloxquant_exporters.prometheus import PoolCollector
    except ImportError as error:
        return [Row(f"scrape: not measured, {error}", float("nan"), None, "ms")]
    registry = CollectorRegistry()
    registry.register(PoolCollector())

    def scrape() -> bytes:
        return generate_latest(registry)

    rows: list[Row] = []
    times: dict[str, float] = {}
    for name, n_pools, n_blocks, target in (
        ("one pool", 1, 1000, 5.0),
        ("one pool of 1,000,000 blocks", 1, 1_000_000, 5.0),
        ("4 pools", 4, 1000, None),
        ("16 pools", 16, 1000, 100.0),
    ):
        pools = [pool_of(n_blocks, separate_kv=True) for _ in range(n_pools)]
        for pool in pools:
            instrument(pool)
            pool.allocate_kv(SIZE * 8, 1)
        n_series = sum(not line.startswith(b"#") for line in scrape().splitlines())
        value, noise = cpu_us(scrape, rounds)
        times[name] = value / n_series
        note = f"{n_series} series, {value / n_series:.1f} us each"
        rows.append(Row(f"scrape of {name}", value / 1000, target, "ms", noise / 1000, note))
        for pool in pools:
            uninstrument(pool)
    linear = times["16 pools"] / times["4 pools"]
    rows.append(Row("us a series, 16 pools over 4", linear, 1.3, "x"))
    flat = times["one pool of 1,000,000 blocks"] / times["one pool"]
    rows.append(Row("us a series, 1,000,000 blocks over 1,000", flat, 1.3, "x"))
    return rows


def allocate_while_scraped(seconds: float) -> list[Row]:
    """p99 of an allocation while another thread scrapes every 100 ms, over that without."""

    def p99_us(pool: BlockPoolAllocator) -> float:
        took: list[int] = []
        clock, end = time.perf_counter_ns, time.perf_counter() + seconds / 2
        while time.perf_counter() < end:
            for _ in range(50):
                began = clock()
                pool.allocate("k", SIZE, 7)
                took.append(clock() - began)
            pool.free_all(7)
        took.sort()
        return took[len(took) * 99 // 100] / 1000

    with watched(8192) as pool:
        stop = threading.Event()

        def scrape() -> None:
            while not stop.wait(0.1):
                take_snapshot()

        p99_us(pool)
        idle, scraped = [], []
        for _ in range(3):
            idle.append(p99_us(pool))
            stop.clear()
            thread = threading.Thread(target=scrape, daemon=True)
            thread.start()
            scraped.append(p99_us(pool))
            stop.set()
            thread.join()
    spread = max(idle) / min(idle) - 1
    note = f"idle {median(idle):.2f} us, scraped {median(scraped):.2f} us (wall)"
    return [Row("p99 of allocate, scraped over idle", ratio(scraped, idle), 2, "x", spread, note)]


def flatness() -> list[Row]:
    """Series and bytes after 1,000 owners and after 50,000 owners and 5,000 invented formats."""
    import tracemalloc

    def n_series() -> int:
        pools = take_snapshot().pools
        readers = [metric.read_pool for metric in CATALOGUE if metric.read_pool is not None]
        return sum(len(list(read(pool))) for pool in pools for read in readers)

    with watched(512) as pool:

        def live(n: int) -> tuple[int, int]:
            for owner in range(n):
                pool.allocate("k", SIZE, owner, f"made-up-{owner % 5000}" if n > 1000 else "fp16")
                pool.free_all(owner)
            series = n_series()
            gc.collect()
            return series, tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        live(1000)
        series, held = live(1000)
        more_series, more_held = live(50_000)
        tracemalloc.stop()
    return [
        Row("series added by 50,000 owners, 5,000 formats", more_series - series, 0, ""),
        Row("bytes added by them", (more_held - held) / 1024, 64, "KiB"),
    ]


# -- decoding -------------------------------------------------------------------------------------


def decoding(rounds: int, folder: str | None) -> list[Row]:
    """CPU of a token through stock, pooled and watched caches, by turns."""
    try:
        import mlx.core as mx
        from bench_end_to_end import small_llama
        from mlx_lm import load
        from mlx_lm.generate import generate_step
        from mlx_lm.models.cache import make_prompt_cache

        from veloxquant_mlx.memory.pool_backed_cache import build_pooled_caches
    except ImportError as error:
        return [Row(f"decoding: not measured, {error}", float("nan"), None, "%")]
    name = "the small model" if folder is None else Path(folder).name
    model: Any = small_llama() if folder is None else load(folder)[0]
    n_tokens = 64 if folder is None else 24
    config = PoolConfig(SIZE, 8192)
    bare, hooked = BlockPoolAllocator(config), BlockPoolAllocator(config)
    instrument(hooked)
    walls: dict[str, list[float]] = {}

    def lane(kind: str, pool: BlockPoolAllocator | None) -> Callable[[], float]:
        def decode() -> float:
            caches: Any = (
                make_prompt_cache(model) if pool is None else build_pooled_caches(model, pool, 1)
            )
            steps = generate_step(mx.arange(16), model, max_tokens=n_tokens, prompt_cache=caches)
            cpu, wall = [], []
            a, b = time.thread_time(), time.perf_counter()
            for _ in steps:
                now, then = time.thread_time(), time.perf_counter()
                cpu.append(now - a)
                wall.append(then - b)
                a, b = now, then
            if pool is not None:
                caches.release()
            walls.setdefault(kind, []).append(median(wall[1:]))
            return median(cpu[1:])

        return decode

    lanes = {
        "stock": lane("stock", None),
        "stock again": lane("stock again", None),
        "pooled": lane("pooled", bare),
        "watched": lane("watched", hooked),
    }
    cpu = by_turns(lanes, rounds)
    uninstrument(hooked)
    token = median(walls["stock"])

    def share(over: str, under: str) -> float:
        return median(a - b for a, b in zip(cpu[over], cpu[under], strict=True)) / token * 100

    noise = abs(share("stock again", "stock"))
    speed = 1 / ratio(walls["watched"], walls["stock"])
    spread = abs(1 / ratio(walls["stock again"], walls["stock"]) - 1)
    note = f"token {token * 1e3:.2f} ms"
    watching, pooling = cache_calls(model, token, rounds)
    return [
        Row(f"{name}: hooks on - off, of a token", *watching, note),
        Row(f"{name}: pooled - stock, of a token", *pooling, note),
        Row(f"{name}: the same over whole tokens", share("watched", "pooled"), None, "%", noise),
        Row(f"{name}: the same over whole tokens", share("pooled", "stock"), None, "%", noise),
        Row(f"{name}: tokens/s, watched over stock", speed, None, "x", spread, "A/A as noise"),
    ]


Share = tuple[float, float, str, float]


def cache_calls(model: Any, token_s: float, rounds: int) -> tuple[Share, Share]:
    """What a token's cache calls add, watched over pooled and pooled over stock, of a token.

    The calls alone are timed, with arrays of the model's own shapes, evaluated in between. The CPU time
    of whole tokens differs by more between runs of the same code than any of this can cost.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from veloxquant_mlx.memory.pool_backed_cache import build_pooled_caches

    caches: Any = make_prompt_cache(model)
    mx.eval(model(mx.arange(4)[None], cache=caches))
    shape = caches[0].keys.shape
    rows = mx.zeros((shape[0], shape[1], 1, shape[3]), dtype=caches[0].keys.dtype)
    mx.eval(rows)
    config = PoolConfig(SIZE, 8192)
    bare, hooked = BlockPoolAllocator(config), BlockPoolAllocator(config)
    instrument(hooked)

    def lane(pool: BlockPoolAllocator | None) -> Callable[[], float]:
        def calls() -> float:
            made: Any = (
                make_prompt_cache(model) if pool is None else build_pooled_caches(model, pool, 1)
            )
            spent = []
            for _ in range(64):
                began = time.thread_time()
                fetched = [cache.update_and_fetch(rows, rows) for cache in made]
                spent.append(time.thread_time() - began)
                mx.eval(fetched)
            if pool is not None:
                made.release()
            return median(spent[1:])

        return calls

    lanes = {
        "stock": lane(None),
        "again": lane(None),
        "pooled": lane(bare),
        "watched": lane(hooked),
    }
    s = by_turns(lanes, max(rounds, 9))
    uninstrument(hooked)

    def share(over: str, under: str) -> float:
        gaps = (a - b for a, b in zip(s[over], s[under], strict=True))
        return median(gaps) / token_s * 100

    noise = abs(share("again", "stock"))
    return (
        (share("watched", "pooled"), 1, "%", noise),
        (share("pooled", "stock"), 1, "%", noise),
    )


# -- all of it ------------------------------------------------------------------------------------


def render(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = [f"{'':52} {'measured':>12} {'at most':>10} {'noise':>9}"]
    for row in rows:
        target = "-" if row.target is None else f"{row.target:g} {row.unit}"
        noise = "-" if row.noise is None else f"{row.noise:.3g}"
        verdict = "" if row.holds else "  MISSED"
        value = f"{row.value:.4g} {row.unit}"
        lines.append(f"{row.label:52} {value:>12} {target:>10} {noise:>9}{verdict}  {row.note}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge if asked to."""
    parser = argparse.ArgumentParser(description="Measure what watching costs.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--peer", help="an interpreter that has the peer; 'none' leaves it out")
    options = parser.parse_args(arguments)
    n = 1 if options.quick else 4
    load_before = os.getloadavg()[0]
    rows = cycles(20 * n) + recording(20 * n) + snapshots(200 * n) + scrapes(10 * n)
    rows += allocate_while_scraped(1.0 * n) + flatness()
    if options.peer != "none":
        from against_peer import peer_python

        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        try:
            python = options.peer or str(peer_python(cache / "veloxquant-peer"))
            rows += against_peer(python, 2 * n)
        except (OSError, subprocess.CalledProcessError) as error:
            rows.append(Row(f"peer: not measured, {error}", float("nan"), None, "x"))
    rows += decoding(5 * n, None)
    if os.environ.get("VELOXQUANT_TEST_MODEL"):
        rows += decoding(3 * n, os.environ["VELOXQUANT_TEST_MODEL"])
    print(render(rows))
    load = f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{os.cpu_count()} CPUs, load {load}; Python {sys.version.split()[0]}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(options.check and not all(row.holds for row in rows))


# -- with pytest-benchmark ------------------------------------------------------------------------


def test_snapshot(benchmark: Any) -> None:
    """A snapshot of a pool with 100,000 blocks and 1,000 owners."""
    with watched(100_000) as pool:
        for owner in range(1000):
            pool.allocate("k", SIZE * 50, owner)
        snapshot = benchmark(instrument(pool).snapshot)
        assert snapshot.blocks_in_use == 50_000


def test_watched_cycle(benchmark: Any) -> None:
    """One block for a new owner and its release, watched."""
    with watched(4096) as pool:
        calls = 1000
        benchmark.extra_info.update(n_blocks=1, calls=calls)
        benchmark.pedantic(cycle_ns, args=(pool, 1, calls), rounds=20, warmup_rounds=2)
        assert pool.stats.blocks_in_use() == 0
        assert pool.stats.n_frees == calls * 22


if __name__ == "__main__":
    sys.exit(main())
