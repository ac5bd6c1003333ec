"""Sidecar: workers that publish into a folder, each with a real process behind it, and its page."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dashboards.drill.clock import CLOCK
from dashboards.drill.worker import Worker
from veloxquant_exporters.http import Request
from veloxquant_exporters.sidecar.collector import SidecarCollector
from veloxquant_exporters.sidecar.debug_pages import DebugPages
from veloxquant_exporters.sidecar.directory_source import DirectorySource
from veloxquant_mlx.telemetry.identity import ProcessIdentity
from veloxquant_mlx.telemetry.snapshot_json import Header, SnapshotFile, encode_file
from veloxquant_mlx.telemetry.snapshot_writer import file_name, write_whole

__all__ = ["Published", "Sidecar"]

INTERVAL_S: Final = 15.0
# Tells who it is, and lives until its input ends.
_CHILD: Final = (
    "import json, sys; from dataclasses import asdict; "
    "from veloxquant_mlx.telemetry.identity import own_identity; "
    "print(json.dumps(asdict(own_identity())), flush=True); sys.stdin.read()"
)


class Published:
    """A worker whose snapshots are files. A process of its own stands for its life.

    Args:
        worker: With a label.
        folder: Where it publishes.
    """

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.worker = worker
        self._folder = folder
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._child.stdout is not None
        self._identity = ProcessIdentity(**json.loads(self._child.stdout.readline()))
        self._born_s = CLOCK.wall_s()
        self._sequence = 0

    def publish(self, state: str = "running") -> None:
        """Write the file, unless the process is gone."""
        if self._child.poll() is not None:
            return
        self._sequence += 1
        header = Header(
            state=state,
            sequence=self._sequence,
            interval_s=INTERVAL_S,
            process=self.worker.process,
            born_s=self._born_s,
            identity=self._identity,
        )
        data = encode_file(SnapshotFile(header=header, snapshot=self.worker.snapshot()))
        name = file_name(self.worker.process, self._identity.random_id)
        write_whole(self._folder, name, data)

    def stop(self) -> None:
        """End in good order."""
        self.publish("stopped")
        self.kill()

    def kill(self) -> None:
        """End as the system's out-of-memory killer has it."""
        self._child.kill()
        self._child.communicate()


class Sidecar:
    """A folder with its workers, and the page that a sidecar makes of it. A context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="veloxquant-drill-")
        self.folder = Path(self._folder.name)
        self.source = DirectorySource(self.folder, clock=lambda: CLOCK.now_ns() / 1e9)
        self.workers: list[Published] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self.workers:
            worker.kill()
        self.source.close()
        self._folder.cleanup()

    def add(self, worker: Worker) -> Published:
        """Have `worker` publish here."""
        published = Published(worker, self.folder)
        self.workers.append(published)
        return published

    def page(self) -> Callable[[], Iterable[Any]]:
        """What a scrape gives."""
        collector = SidecarCollector(self.source)
        return lambda: list(collector.collect())

    def last_state(self, process: str) -> dict[str, Any]:
        """What `/debug/last/<process>` says of the newest file."""
        pages = DebugPages(self.source, lambda: CLOCK.now_ns() / 1e9)
        answer = pages.last(Request("/debug/last/", process))
        found: dict[str, Any] = json.loads(answer.body)["files"][0]
        return found
