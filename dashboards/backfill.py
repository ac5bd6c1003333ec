"""Backfill: a real Prometheus over series that were never scraped, with our recording rules applied.

Needs `promtool` and `prometheus` on the PATH (Debian's package `prometheus`).
"""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["MissingToolError", "Server", "backfilled"]

RULES: Final = Path(__file__).resolve().parent / "alerts" / "records.yaml"
# The blocks are of any age, and must not be deleted for it.
RETENTION: Final = "--storage.tsdb.retention.time=10y"


class MissingToolError(RuntimeError):
    """Prometheus or its tool is not installed."""


class Server:
    """A running Prometheus; `url` is its address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def api(self, path: str, **query: object) -> Any:
        """What an API call gives as `data`.

        Raises:
            ValueError: The server refuses the query; the text says why.
        """
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - our own server
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from error


@contextlib.contextmanager
def backfilled(
    folder: Path, pages: Sequence[Path], *, start_s: float, end_s: float, interval_s: int = 15
) -> Iterator[Server]:
    """A server over OpenMetrics files, and over what the recording rules make of them.

    Args:
        folder: Empty, for the data.
        pages: The files.
        start_s: From here on the rules are evaluated, in seconds since the epoch.
        end_s: Until here.
        interval_s: Seconds between two evaluations.

    Raises:
        MissingToolError: There is no Prometheus here.
        subprocess.CalledProcessError: It does not take the files; its output says why.
    """
    data = folder / "data"
    data.mkdir(parents=True)
    for page in pages:
        _promtool("tsdb", "create-blocks-from", "openmetrics", "-q", str(page), str(data))
    for rules in _in_order(folder):
        with _running(folder, data) as server:
            _promtool(
                "tsdb", "create-blocks-from", "rules",
                f"--url={server.url}", f"--output-dir={data}", f"--eval-interval={interval_s}s",
                f"--start={start_s:.0f}", f"--end={end_s:.0f}", str(rules),
            )  # fmt: skip
    # A running server would see the new blocks only at its next round.
    with _running(folder, data) as server:
        yield server


def _in_order(folder: Path) -> Iterator[Path]:
    """Files of the rules that read metrics, and of those that read what others record."""
    rules = [r for g in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for r in g["rules"]]
    names = [rule["record"] for rule in rules]
    depth: dict[str, int] = {}
    for rule in rules:  # in the file, each stands after what it reads
        depth[rule["record"]] = max((1 + depth[n] for n in depth if n in rule["expr"]), default=0)
    for level in range(max(depth.values()) + 1):
        group = [rule for rule, name in zip(rules, names, strict=True) if depth[name] == level]
        path = folder / f"records-{level}.yaml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "records", "rules": group}]}))
        yield path


def _promtool(*arguments: str) -> None:
    subprocess.run([_tool("promtool"), *arguments], capture_output=True, check=True)  # noqa: S603 - our own


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingToolError(f"{name} is not installed (Debian's package prometheus)")
    return found


@contextlib.contextmanager
def _running(folder: Path, data: Path) -> Iterator[Server]:
    config = folder / "prometheus.yml"
    config.write_text("global: {}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = folder / "prometheus.log"
    options = [f"--config.file={config}", f"--storage.tsdb.path={data}", RETENTION]
    options.append(f"--web.listen-address={address}")
    with (
        log.open("wb") as out,
        subprocess.Popen(  # noqa: S603 - our own
            [_tool("prometheus"), *options], stdout=out, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            _wait_until_ready(f"http://{address}/-/ready", process, log)
            yield Server(f"http://{address}")
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    pause = threading.Event()
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310 - our own server
            return
        pause.wait(0.05)
    raise RuntimeError(f"Prometheus does not start: {log.read_text()[-2000:]}")
