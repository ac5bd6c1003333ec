"""What publisher and sidecar cost, and how far one Prometheus goes: prints figures beside budgets.

    python benchmarks/bench_sidecar.py [--workers 200] [--scrape-seconds 60]

Everything runs on this machine over loopback, and is bounded in time. Figures are printed, never
asserted; on a busy machine they are upper bounds. CPU is that of the processes, not wall time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from veloxquant_exporters.sidecar import DirectorySource
from veloxquant_exporters.sidecar.serve import Settings, start_sidecar_server
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.identity import own_identity
from veloxquant_mlx.telemetry.publisher import Publisher
from veloxquant_mlx.telemetry.snapshot_json import FILE_SUFFIX, Header, SnapshotFile, encode_file

ROOT = Path(__file__).resolve().parent.parent
OURS = own_identity()
# Long enough for a scrape of 200 workers on a busy machine.
SCRAPE_S = 5.0
# A block of Prometheus holds two hours: 480 samples a series at 15 s. To see what a sample takes on
# disk, fewer workers are scraped more often, until each series has a good part of that.
DISK_SCRAPE_S = 0.25
DISK_WORKERS = 10

VICTIM = """
import sys, threading
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, publish
pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
instrument(pool)
publisher = publish(sys.argv[1], float(sys.argv[2]))
while not publisher.n_written:
    threading.Event().wait(0.01)
print("ready", flush=True)
threading.Event().wait()
"""


def say(what: str, figure: str, budget: str = "") -> None:
    """One line of the report."""
    print(f"{what:<58} {figure:>16}  {budget and 'budget ' + budget}", flush=True)


def snapshot(n_pools: int) -> SnapshotFile:
    """A file of this process with so many busy pools."""
    pools = [BlockPoolAllocator(PoolConfig(n_blocks=4096)) for _ in range(n_pools)]
    for n, pool in enumerate(pools):
        instrument(pool, name=f"bench-{secrets.token_hex(4)}-{n}")
        for owner in range(50):
            pool.allocate("k", 160, owner)
        pool.free_all(7)
    taken = take_snapshot()
    for pool in pools:
        uninstrument(pool)
    named = tuple(replace(pool, name=f"pool-{n}") for n, pool in enumerate(taken.pools[-n_pools:]))
    header = Header(
        state="running", sequence=1, interval_s=1.0, process="worker-0", born_s=1.0, identity=OURS
    )
    return SnapshotFile(header=header, snapshot=replace(taken, pools=named))


def put(folder: Path, file: SnapshotFile, process: str, **identity: Any) -> None:
    """Write ``file`` as another process' would be."""
    who = replace(file.header.identity, random_id=secrets.token_hex(8), **identity)
    header = replace(file.header, process=process, identity=who)
    (folder / f"{process}{FILE_SUFFIX}").write_bytes(encode_file(replace(file, header=header)))


def get(port: int, path: str = "/metrics") -> bytes:
    """The body of a request; an OSError unless it is answered with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        return answer.read()
    finally:
        connection.close()


@contextmanager
def sidecar(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """A real `vqmon serve`; its process and port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "veloxquant_exporters.cli", "serve"]
    running = subprocess.Popen(
        [*command, "--snapshot-dir", str(folder), "--port", str(port), "--log.level", "error"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "exporters")))},
    )
    try:
        until(lambda: reachable(port), "the sidecar")
        yield psutil.Process(running.pid), port
    finally:
        running.terminate()
        running.wait()


def reachable(port: int) -> bool:
    """Whether something answers there."""
    try:
        return bool(get(port, "/-/ready"))
    except OSError:
        return False


def until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> float:
    """Seconds until ``condition`` is true."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > limit_s:
            raise TimeoutError(f"waited {limit_s} s for {what}")
        time.sleep(0.005)
    return time.perf_counter() - began


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def bench_publisher(folder: Path) -> None:
    """CPU of the publishing thread at one write a second."""
    for n_pools in (1, 16):
        pools = [BlockPoolAllocator(PoolConfig(n_blocks=4096)) for _ in range(n_pools)]
        for pool in pools:
            instrument(pool)
            pool.allocate("k", 160, 1)
        publisher = Publisher(folder / f"publisher-{n_pools}")
        publisher._attempt("running")
        costs = []
        for _ in range(100):
            began = time.thread_time()
            publisher._attempt("running")
            costs.append(time.thread_time() - began)
        assert publisher.path is not None
        size = publisher.path.stat().st_size
        for pool in pools:
            uninstrument(pool)
        share = statistics.median(costs) * 100
        say(f"publisher, {n_pools} pools, each second: of a core", f"{share:.3f} %", "0.3 %")
        say(f"  file of {n_pools} pools", f"{size / 1024:.1f} KiB")


def bench_live(folder: Path) -> None:
    """Scrapes of live files, and what the sidecar takes."""
    for n_files, n_pools in ((1, 1), (16, 1), (64, 1), (64, 4)):
        one = folder / f"live-{n_files}-{n_pools}"
        one.mkdir()
        file = snapshot(n_pools)
        with sidecar(one) as (process, port):
            walls, costs = [], []
            for sequence in range(1, 8):
                changed = replace(file, header=replace(file.header, sequence=sequence))
                for n in range(n_files):
                    put(one, changed, f"worker-{n}")
                before, began = cpu_s(process), time.perf_counter()
                body = get(port)
                walls.append(time.perf_counter() - began)
                costs.append(cpu_s(process) - before)
            n_series = sum(1 for line in body.splitlines() if line and not line.startswith(b"#"))
            what = f"scrape of {n_files} live files with {n_pools} pools ({n_series} series)"
            budget = "500 ms" if (n_files, n_pools) == (64, 1) else ""
            say(what, f"{statistics.median(walls) * 1e3:.0f} ms", budget)
            say("  CPU of it", f"{statistics.median(costs) * 1e3:.0f} ms")
            say("  RSS of the sidecar", f"{process.memory_info().rss / 2**20:.1f} MiB", "80 MB")


def bench_dead(folder: Path) -> None:
    """A first look at 5,000 dead files."""
    dead = folder / "dead"
    dead.mkdir()
    file = snapshot(1)
    for n in range(5000):
        put(dead, file, f"worker-{n}", pid=2**30)
    source = DirectorySource(dead)
    with start_sidecar_server(source, Settings(directory="", port=0)) as server:
        began = time.perf_counter()
        get(server.port)
        first = time.perf_counter() - began
        began = time.perf_counter()
        get(server.port)
        say("first scrape of 5,000 dead files", f"{first * 1e3:.0f} ms", "1,000 ms")
        say("  the scrape after it", f"{(time.perf_counter() - began) * 1e3:.0f} ms")
        say("  files left", str(len(list(dead.iterdir()))))


def bench_death(folder: Path) -> None:
    """Seconds from SIGKILL to up 0."""
    interval_s = 0.5
    with sidecar(folder / "death") as (_, port):
        for what, pid_is_known in (("pid can be asked", True), ("by silence alone", False)):
            victim = subprocess.Popen(
                [*([] if pid_is_known else _own_namespace()), sys.executable, "-c", VICTIM,
                 str(folder / "death"), str(interval_s)],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            assert victim.stdout is not None
            if not victim.stdout.readline():
                say(f"death visible, {what}", "not measured")
                continue
            until(lambda: up(port) == 1, "the worker")
            victim.send_signal(signal.SIGKILL)
            took = until(lambda: up(port) == 0, "its death")
            victim.communicate()
            say(f"death visible, {what}", f"{took / interval_s:.2f} intervals", "3 intervals")


def up(port: int) -> float:
    """The up of worker-0, -1 without one."""
    for line in get(port).decode().splitlines():
        if line.startswith('veloxquant_exporter_up{process="worker-0"}'):
            return float(line.split()[-1])
    return -1


def _own_namespace() -> list[str]:
    return ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def bench_prometheus(folder: Path, n_workers: int, scrape_seconds: float) -> None:
    """One real Prometheus, and a sidecar over so many simulated workers."""
    with scraped(folder / "many", n_workers, SCRAPE_S) as (process, port, server):
        before, side_before, began = cpu_s(server), cpu_s(process), time.perf_counter()
        time.sleep(scrape_seconds)
        elapsed = time.perf_counter() - began
        window = f"[{int(scrape_seconds)}s]"
        n_series = ask(port, f"max_over_time(scrape_samples_scraped{window})")
        n_scrapes = max(1.0, ask(port, f"count_over_time(up{window})"))
        took = ask(port, f"quantile_over_time(0.5, scrape_duration_seconds{window})")
        prometheus_s = (cpu_s(server) - before) / n_scrapes
        sidecar_s = (cpu_s(process) - side_before) / n_scrapes
        say(f"Prometheus over {n_workers} workers: series", f"{n_series:.0f}")
        say("  series a worker, with one pool", f"{n_series / n_workers:.0f}")
        say("  a scrape takes", f"{took * 1e3:.0f} ms")
        say("  CPU of Prometheus a scrape", f"{prometheus_s * 1e3:.0f} ms")
        say("  CPU of the sidecar a scrape, and its looks between", f"{sidecar_s * 1e3:.0f} ms")
        say("  RSS of Prometheus", f"{server.memory_info().rss / 2**20:.0f} MiB")
        say("  RSS of the sidecar", f"{process.memory_info().rss / 2**20:.1f} MiB")
        say("  scrapes that succeeded",
            f"{ask(port, f'avg_over_time(up{window})'):.0%}",
            f"of {n_scrapes:.0f} in {elapsed:.0f} s")  # fmt: skip


def bench_disk(folder: Path, scrape_seconds: float) -> None:
    """What a sample takes on disk."""
    with scraped(folder / "disk", DISK_WORKERS, DISK_SCRAPE_S) as (_, port, _server):
        time.sleep(scrape_seconds)
        n_bytes, n_samples, n_series = on_disk(port, folder / "disk" / "prometheus" / "data")
        say("bytes a sample on disk", f"{n_bytes / max(n_samples, 1):.2f}",
            f"{n_samples / max(n_series, 1):.0f} samples a series")  # fmt: skip


@contextmanager
def scraped(
    folder: Path, n_workers: int, scrape_s: float
) -> Iterator[tuple[psutil.Process, int, psutil.Process]]:
    """The sidecar's process over simulated workers, and the Prometheus that scrapes it."""
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("Prometheus is not installed; the figures above need none")
    workers = folder / "workers"
    workers.mkdir(parents=True)
    file = snapshot(1)
    stopping = threading.Event()

    def write(sequence: int) -> None:
        # Counts that rise unevenly, as those of a busy pool do.
        (pool,) = file.snapshot.pools
        for n in range(n_workers):
            moved = replace(pool, n_allocations=pool.n_allocations + sequence * (n % 7) * 13)
            taken = replace(file.snapshot, pools=(moved,), wall_s=time.time())
            header = replace(file.header, sequence=sequence)
            put(workers, replace(file, header=header, snapshot=taken), f"worker-{n}")

    def beat() -> None:
        sequence = 1
        while not stopping.wait(1.0):
            sequence += 1
            write(sequence)

    with ExitStack() as stack:
        write(1)
        process, target = stack.enter_context(sidecar(workers))
        writer = threading.Thread(target=beat)
        writer.start()
        stack.callback(writer.join)
        stack.callback(stopping.set)
        port, server = stack.enter_context(
            prometheus(program, folder / "prometheus", target, scrape_s)
        )
        until(lambda: ask(port, "scrape_samples_scraped") > 0, "a first scrape")
        yield process, port, server


@contextmanager
def prometheus(
    program: str, folder: Path, target: int, scrape_s: float
) -> Iterator[tuple[int, psutil.Process]]:
    """A real Prometheus that scrapes the sidecar; its port and process."""
    folder.mkdir()
    interval = f"{scrape_s * 1e3:.0f}ms"
    config = folder / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}\n"
        "scrape_configs:\n  - job_name: veloxquant\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    running = subprocess.Popen(
        [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}", "--web.enable-admin-api", "--log.level=error"]
    )  # fmt: skip
    try:
        until(lambda: reachable(port), "Prometheus")
        yield port, psutil.Process(running.pid)
    finally:
        running.terminate()
        running.wait()


def ask(port: int, query: str) -> float:
    """The one value of a query, 0 without one."""
    path = "/api/v1/query?" + urllib.parse.urlencode({"query": query})
    rows = json.loads(get(port, path))["data"]["result"]
    return float(rows[0]["value"][1]) if rows else 0.0


def on_disk(port: int, data: Path) -> tuple[int, int, int]:
    """Bytes, samples and series of the blocks that a snapshot of the head writes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/api/v1/admin/tsdb/snapshot")
    connection.getresponse().read()
    connection.close()
    n_bytes = n_samples = n_series = 0
    for meta in data.glob("snapshots/*/*/meta.json"):
        stats = json.loads(meta.read_text())["stats"]
        n_samples += stats["numSamples"]
        n_series += stats["numSeries"]
        n_bytes += sum(path.stat().st_size for path in meta.parent.rglob("*") if path.is_file())
    return n_bytes, n_samples, n_series


def main() -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--scrape-seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench_publisher(folder)
        bench_live(folder)
        bench_dead(folder)
        bench_death(folder)
        bench_prometheus(folder, options.workers, options.scrape_seconds)
        bench_disk(folder, options.scrape_seconds)


if __name__ == "__main__":
    main()
