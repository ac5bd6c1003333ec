"""A Prometheus server of a test's own: started in a folder, asked over its HTTP API, ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Prometheus", "running_prometheus", "until"]

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
scrape_configs:
  - job_name: veloxquant
    static_configs: [{{targets: {targets}}}]
"""


class Prometheus:
    """Asks a running server; `url` is its address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def api(self, path: str, **query: str) -> Any:
        """What an API call gives as `data`."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """The values of an instant query."""
        return [float(item["value"][1]) for item in self.api("query", query=query)["result"]]

    def value(self, query: str) -> float | None:
        """The value of a query that has at most one."""
        values = self.values(query)
        assert len(values) <= 1, (query, values)
        return values[0] if values else None


def until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        threading.Event().wait(0.05)


@contextlib.contextmanager
def running_prometheus(folder: Path, *targets: str) -> Iterator[Prometheus]:
    """A server that scrapes the targets each second; skips where there is none to run."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus (Debian's package of that name) is not installed")
    (folder / "prometheus.yml").write_text(CONFIG.format(targets=json.dumps(targets)))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    log = folder / "prometheus.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        server = Prometheus(f"http://127.0.0.1:{port}")

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{server.url}/-/ready", timeout=5).close()
                return True
            return False

        try:
            until(ready)
            yield server
        finally:
            process.terminate()
