"""Help for the tests of publisher and sidecar: real workers, a real sidecar, and made-up files."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from veloxquant_exporters.sidecar import DirectorySource
from veloxquant_exporters.sidecar.serve import Settings, start_sidecar_server
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.identity import ProcessIdentity, own_namespace
from veloxquant_mlx.telemetry.snapshot_json import FILE_SUFFIX, Header, SnapshotFile, encode_file

ROOT = Path(__file__).resolve().parent.parent
INTERVAL_S = 0.05
DEADLINE_S = 20.0
# No process has it: Linux and macOS end far below.
NO_PID = 2**30

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str) -> T:
    """The first true value of ``condition``; fails when it takes longer than the deadline."""
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {DEADLINE_S} s in vain for: {what}"
        pause.wait(0.01)
    return value


def environment() -> dict[str, str]:
    """The environment of a child that can import the packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VELOX")}
    return {**kept, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "exporters")))}


def a_file(**changes: Any) -> SnapshotFile:
    """A snapshot file with one pool; ``changes`` go to the header and the identity."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    instrument(pool, name=f"made-{secrets.token_hex(4)}")
    pool.allocate("k", 40, 1)
    snapshot = take_snapshot()
    uninstrument(pool)
    ours = replace(snapshot.pools[-1], name="main")
    identity = ProcessIdentity(NO_PID, "1", secrets.token_hex(8), own_namespace())
    own = {name: changes.pop(name) for name in ("pid", "start_time", "pid_namespace", "random_id")
           if name in changes}  # fmt: skip
    header = Header(
        state="running",
        sequence=1,
        interval_s=1.0,
        process="worker-0",
        born_s=1.0,
        identity=replace(identity, **own),
    )
    return SnapshotFile(
        header=replace(header, **changes), snapshot=replace(snapshot, pools=(ours,))
    )


def put(directory: Path, file: SnapshotFile, name: str | None = None) -> Path:
    """Write ``file`` as a publisher would: whole, under a temporary name first."""
    directory.mkdir(exist_ok=True)
    path = directory / (name or f"{file.header.identity.random_id}{FILE_SUFFIX}")
    temporary = directory / f".{path.name}.tmp"
    temporary.write_bytes(encode_file(file))
    temporary.replace(path)
    return path


WORKER = """
import os, signal, sys, threading
from veloxquant_exporters.sidecar import DirectorySource
from veloxquant_exporters.sidecar.serve import Settings, start_sidecar_server
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, publish, stop_publishing, take_snapshot
pool = BlockPoolAllocator(PoolConfig(n_blocks=4096, separate_kv=False))
instrument(pool, name="main")
def beats(n=2):
    "Wait for n more writes."
    goal = publisher.n_written + n
    while publisher.n_written < goal:
        threading.Event().wait(0.005)
def load():
    "Allocate and free for ever, on a thread."
    def work():
        while True:
            pool.allocate("kv", 160, 7)
            pool.free_all(7)
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    try:
        value = eval(line, globals())
    except SyntaxError:
        value = exec(line, globals())
    print(value, flush=True)
"""


class Worker:
    """A real process with one pool, which does what it is told.

    Args:
        directory: Where it publishes; None: it does not until told.
        worker: Its name.
        wrap: A command that runs it, e.g. unshare.
        env: Variables of its own.
    """

    def __init__(
        self,
        directory: Path | None,
        worker: str | None = None,
        *,
        wrap: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), **(env or {})},
        )
        assert self._line() == "ready"
        if directory is not None:
            self.do(f"publisher = publish({str(directory)!r}, {INTERVAL_S}, {worker!r})")
            self.do("beats(1)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    @property
    def pid(self) -> int:
        """Its pid, or that of what runs it."""
        return self.process.pid

    def do(self, line: str) -> str:
        """Run a line of Python in the worker; what it gave, as text."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended: {self.process.wait()}"
        return line.strip()

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and take note, so that no zombie stays."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Let it come to its end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(DEADLINE_S) == 0


class Served:
    """A sidecar that can be asked over HTTP."""

    port: int

    def get(self, path: str = "/metrics") -> tuple[int, str]:
        """Status and body of a request."""
        return get(self.port, path)

    def page(self) -> Page:
        """The metrics now."""
        status, body = self.get()
        assert status == 200, body
        return Page(body)

    def page_where(self, condition: Callable[[Page], bool], what: str) -> Page:
        """The first page for which ``condition`` is true."""
        pages: list[Page] = []

        def seen() -> bool:
            pages.append(self.page())
            return condition(pages[-1])

        wait_for(seen, what)
        return pages[-1]


class LocalSidecar(Served):
    """The sidecar's parts in this process: folder and HTTP server, without the command.

    Args:
        directory: What it serves.
    """

    def __init__(self, directory: Path) -> None:
        self._source = DirectorySource(directory)
        self._server = start_sidecar_server(self._source, Settings(directory="", port=0))
        self._source.start()
        self.port = self._server.port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._source.close()


# Becomes another user only after all is imported, which that user may not be allowed to read: so it
# has served a page before.
AS_USER = """
import os, sys, urllib.request
import veloxquant_exporters.cli.serve
from veloxquant_exporters.cli import main
from veloxquant_exporters.sidecar import DirectorySource
from veloxquant_exporters.sidecar.serve import Settings, start_sidecar_server
with start_sidecar_server(DirectorySource("nowhere"), Settings(directory="", port=0)) as server:
    urllib.request.urlopen(server.url + "/metrics").read()
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[2]))
main(sys.argv[3:])
"""


class Sidecar(Served):
    """A real `vqmon serve`.

    Args:
        directory: What it serves.
        options: Of the command.
        ids: Group and user that it becomes.
        port: 0 takes a free one.
    """

    def __init__(
        self, directory: Path, *options: str, ids: tuple[int, int] | None = None, port: int = 0
    ) -> None:
        how = ["-m", "veloxquant_exporters.cli"]
        if ids is not None:
            how = ["-c", AS_USER, *map(str, ids)]
        self.process = subprocess.Popen(
            [sys.executable, *how, "serve", "--snapshot-dir", str(directory), "--port", str(port),
             "--log.format", "json", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )  # fmt: skip
        self.log: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        try:
            self.port = wait_for(self._served_port, "the sidecar serves")
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:  # what no log wrote, e.g. a traceback
                self.log.append({"level": "none", "message": line})

    def _served_port(self) -> int:
        assert self.process.poll() is None, self.log
        for line in list(self.log):
            found = re.search(r":(\d+)/metrics", line["message"])
            if found:
                return int(found[1])
        return 0


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a request to this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Page:
    """A parsed page of metrics."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in self.samples, f"twice on a page: {key}"
                self.samples[key] = sample.value
                self.kinds[sample.name] = family.type

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the one sample of that name with these labels, None without one."""
        wanted = set(labels.items())
        found = [value for (key, have), value in self.samples.items()
                 if key == name and wanted <= set(have)]  # fmt: skip
        assert len(found) <= 1, f"{len(found)} samples of {name} with {labels}"
        return found[0] if found else None

    def up(self, process: str) -> float | None:
        """Whether the process is up; None if nothing is said of it."""
        return self.value("veloxquant_exporter_up", process=process)

    def error(self, reason: str) -> float | None:
        """What the sidecar itself counted."""
        name = "veloxquant_exporter_collect_errors_total"
        return self.value(name, process="", reason=reason)

    def allocations(self, process: str) -> float | None:
        """Blocks handed out by the process."""
        return self.value("veloxquant_block_pool_allocations_total", process=process)

    def in_use(self, process: str) -> float | None:
        """Blocks in use in the process."""
        return self.value("veloxquant_block_pool_blocks_in_use", process=process)

    def totals(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """The values that must not step down while their process lives."""
        return {
            key: value
            for key, value in self.samples.items()
            if self.kinds[key[0]] in ("counter", "histogram") and dict(key[1]).get("process")
        }


class Client:
    """Scrapes all the time, on a thread, and looks at every page: whole, and no total steps down.

    Args:
        port: Of the sidecar.
        may_fail: Whether the sidecar may be away at times.
        successors: Whether a name may go from one process to another, which begins at 0.
    """

    def __init__(self, port: int, *, may_fail: bool = False, successors: bool = False) -> None:
        self._port = port
        self._may_fail = may_fail
        self._successors = successors
        self._stopping = threading.Event()
        self.n_pages = 0
        self.ups: set[tuple[str, float]] = set()
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            seen = self.n_pages
            wait_for(lambda: self.n_pages > seen or self.faults, "a last page")
        self._stopping.set()
        self._thread.join()
        if kind is None:
            assert not self.faults, self.faults[:3]

    def _run(self) -> None:
        highest: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        while not self._stopping.wait(0.02):
            try:
                status, body = get(self._port, "/metrics")
            except OSError as error:
                if not self._may_fail:
                    self.faults.append(f"no answer: {error!r}")
                continue
            except http.client.HTTPException as error:
                if not self._may_fail:
                    self.faults.append(f"half an answer: {error!r}")
                continue
            self._look(status, body, highest)
            self.n_pages += 1

    def _look(self, status: int, body: str, highest: dict[Any, float]) -> None:
        if status != 200:
            self.faults.append(f"status {status}: {body[:200]}")
            return
        try:
            page = Page(body)
        except (ValueError, AssertionError) as error:
            self.faults.append(f"a bad page: {error!r}")
            return
        for key, value in page.totals().items():
            if value < highest.get(key, 0.0) and not self._successors:
                self.faults.append(f"stepped down from {highest[key]} to {value}: {key}")
            highest[key] = value
        for (name, labels), value in page.samples.items():
            if name == "veloxquant_exporter_up":
                self.ups.add((dict(labels)["process"], value))
