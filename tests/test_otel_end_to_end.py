"""`opentelemetry-instrument` on programs that know nothing of it, through a real collector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.distro", reason="opentelemetry-distro is not installed")
pytest.importorskip("rotel", reason="rotel, an OTLP collector, is not installed")

from tests.otel_process import ROOT, environment
from tests.otlp_receiver import OtlpReceiver, resource_of, values

GROUP = "opentelemetry_instrumentor"
NAME = "veloxquant_block_pool"
TIMEOUT_S = 60


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    """Where the collector sends."""
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def collector(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[str]:
    """URL of a running collector that passes everything on to `receiver`."""
    http, grpc = free_port(), free_port()
    package = find_spec("rotel")
    assert package is not None and package.origin is not None
    agent = Path(package.origin).with_name("rotel-agent")
    options = {
        "otlp-http-endpoint": f"127.0.0.1:{http}",
        "otlp-grpc-endpoint": f"127.0.0.1:{grpc}",
        "pid-file": str(tmp_path / "rotel.pid"),
        "log-file": str(tmp_path / "rotel.log"),
        "exporter": "otlp",
        "otlp-exporter-endpoint": receiver.url,
        "otlp-exporter-protocol": "http",
        "batch-timeout": "20ms",
    }
    args = [word for key, value in options.items() for word in (f"--{key}", value)]
    with (tmp_path / "rotel.out").open("wb") as out:
        process = subprocess.Popen(
            [str(agent), "start", *args], env=environment(), stdout=out, stderr=out
        )
        try:
            _wait_until_up(process, http, tmp_path)
            yield f"http://127.0.0.1:{http}"
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_up(process: subprocess.Popen[bytes], port: int, logs: Path) -> None:
    """Until the collector listens; its own output is told if it ends instead."""
    for _ in range(400):
        assert process.poll() is None, (logs / "rotel.out").read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        else:
            return
    raise AssertionError("the collector does not listen")


def zero_code(collector: str, tmp_path: Path, **extra: str) -> dict[str, str]:
    """The environment of a program under `opentelemetry-instrument`."""
    env = environment(
        {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_SERVICE_NAME": "end-to-end",
            "OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=instance-7,deployment=test",
            **extra,
        }
    )
    if not any(point.name == NAME for point in entry_points(group=GROUP)):
        # A checkout that is not installed: what an installation would write.
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = tmp_path / "site" / "veloxquant_mlx_monitor-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: veloxquant-mlx-monitor\nVersion: 0\n"
        )
        points = project["entry-points"][GROUP].items()
        lines = [f"[{GROUP}]", *(f"{key} = {value}" for key, value in points)]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        env["PYTHONPATH"] += os.pathsep + str(info.parent)
    return env


def instrumented(script: list[str]) -> list[str]:
    """The command line of a program under `opentelemetry-instrument`."""
    command = Path(sys.executable).with_name("opentelemetry-instrument")
    if not command.exists():
        pytest.skip("the opentelemetry-instrument command is not beside this Python")
    return [str(command), *script]


# Not a word of telemetry but a span of its own; at its end it says what it knows of itself.
APP = """
import json
from opentelemetry import trace
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig

pool = BlockPoolAllocator(PoolConfig(n_blocks=32))
with trace.get_tracer("app").start_as_current_span("serve"):
    for owner in range(20):
        pool.allocate("k", 40, owner)
        if owner > 2:
            pool.free_all(owner - 3)
    try:
        pool.allocate("v", 16 * 99, "greedy")
    except BlockPoolExhaustedError:
        pass
page = pool.stats.to_prometheus()
pairs = [line.split() for line in page.splitlines() if line and line[0] != "#"]
print(json.dumps({name.split("{")[0]: float(value) for name, value in pairs}))
"""


@pytest.mark.timeout(TIMEOUT_S * 2)
def test_a_plain_program_is_exported_through_a_collector(
    collector: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    """No line of code changed: metrics equal to its own page, and its exhaustion on its span."""
    app = tmp_path / "app.py"
    app.write_text(APP, encoding="utf-8")
    done = subprocess.run(
        instrumented([sys.executable, str(app)]),
        env=zero_code(collector, tmp_path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page: dict[str, float] = json.loads(done.stdout)
    batch = receiver.wait(lambda r: r.metrics and r.metrics[-1])
    resource = resource_of(batch)
    assert resource["service.instance.id"] == "instance-7"
    assert resource["service.name"] == "end-to-end" and resource["deployment"] == "test"
    got = values(batch)
    names = {
        "allocations": "allocations_total",
        "frees": "frees_total",
        "reused": "reused_total",
        "exhausted": "exhausted_total",
        "grown": "grown_total",
        "retired": "retired_total",
        "block.committed": "blocks_total",
        "block.usage_peak": "peak_blocks_in_use",
        "fragmentation": "fragmentation",
    }
    only = frozenset({("veloxquant.block_pool.name", "pool-0")})
    for otel, prometheus in names.items():
        expected = page[f"veloxquant_block_pool_{prometheus}"]
        assert got[f"veloxquant.block_pool.{otel}", only] == pytest.approx(expected), otel
    used = [
        value
        for (name, attributes), value in got.items()
        if name == "veloxquant.block_pool.block.usage"
        and ("veloxquant.block_pool.block.state", "used") in attributes
    ]
    assert sum(used) == page["veloxquant_block_pool_blocks_in_use"] == 9
    traces = receiver.wait(lambda r: r.traces and r.traces[-1])
    (span,) = traces.resource_spans[0].scope_spans[0].spans
    assert span.name == "serve"
    assert [event.name for event in span.events] == ["veloxquant.block_pool.exhausted"]


@pytest.mark.timeout(TIMEOUT_S * 2)
def test_the_instrumentation_can_be_switched_off(
    collector: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    """By the standard's own variable; then the program exports nothing of ours."""
    app = tmp_path / "app.py"
    app.write_text(APP, encoding="utf-8")
    done = subprocess.run(
        instrumented([sys.executable, str(app)]),
        env=zero_code(collector, tmp_path, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=NAME),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    receiver.wait(lambda r: r.traces)  # the program itself was exported
    assert not [
        key for batch in receiver.metrics for key in values(batch) if "block_pool" in key[0]
    ]


@pytest.mark.timeout(TIMEOUT_S * 2)
@pytest.mark.skipif(
    find_spec("mlx") is None or find_spec("click") is None, reason="the demo needs mlx and click"
)
def test_the_demo_is_exported_through_a_collector(
    collector: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    """The demo names its pool itself, and lets go of it at its end: both arrive in between."""
    demo = ["-m", "veloxquant_exporters.cli", "demo", "--once", "--plain", "--port", "0"]
    done = subprocess.run(
        instrumented([sys.executable, *demo, "--requests", "2"]),
        env=zero_code(collector, tmp_path, OTEL_METRIC_EXPORT_INTERVAL="100"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    batches = receiver.wait(lambda r: r.metrics and list(r.metrics))
    got: dict[Any, Any] = {}
    for batch in batches:
        got |= values(batch)
    work = {dict(a)["veloxquant.block_pool.name"]: v for (n, a), v in got.items()
            if n == "veloxquant.block_pool.allocations"}  # fmt: skip
    assert work and all(not name.startswith("pool-") for name in work), work


def test_the_entry_point_names_the_instrumentor() -> None:
    """What `opentelemetry-instrument` will load is there, and is what it expects."""
    from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined, unused-ignore]
        BaseInstrumentor,
    )

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"][GROUP][NAME].partition(":")
    import importlib

    found = getattr(importlib.import_module(module), name)
    assert issubclass(found, BaseInstrumentor)
    assert list(found().instrumentation_dependencies()) == []
