"""Our own pipeline: buckets as they are, bad endpoints, forks, and who it says it is."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing")

from opentelemetry import metrics

from tests.otel_process import environment, run_python
from tests.otlp_receiver import OtlpReceiver, decoded, flat, resource_of, values
from veloxquant_exporters.opentelemetry import OtlpPipeline, make_resource, service_instance_id
from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, take_snapshot, uninstrument
from veloxquant_mlx.telemetry.histogram import HistogramSnapshot

LONG_S = 3600.0  # an interval that never comes: exports happen when a test asks


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not cost a cycle."""
    monkeypatch.setattr("veloxquant_exporters.opentelemetry.feed.MAX_WAIT_S", 30.0)


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """A watched pool that has worked."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool, name="piped")
    for owner in range(3000):
        pool.allocate("k", 40, owner)
        pool.free_all(owner)
    yield pool
    uninstrument(pool)


def true_histograms() -> dict[tuple[str, frozenset[tuple[str, str]]], HistogramSnapshot]:
    """Every histogram of the pool now."""
    (snapshot,) = [p for p in take_snapshot().pools if p.name == "piped"]
    found = {}
    for row in HISTOGRAMS:
        if row.read_pool is None:
            continue
        assert row.otel is not None
        for labels, value in row.read_pool(snapshot):
            attributes = {"veloxquant.block_pool.name": "piped"}
            for label, text in zip(row.labels, labels, strict=True):
                attributes[f"veloxquant.block_pool.{label}"] = text
            assert isinstance(value, HistogramSnapshot)
            found[row.otel, frozenset(attributes.items())] = value
    return found


def test_histograms_arrive_bucket_by_bucket(pool: BlockPoolAllocator) -> None:
    """Nothing is sampled: bounds, counts and sums are the pool's own."""
    with OtlpReceiver() as receiver, OtlpPipeline(receiver.url, interval_s=LONG_S) as pipeline:
        assert pipeline.flush(20)
        got = values(receiver.metrics[-1])
        truth = true_histograms()
        assert len(truth) >= 8
        for key, value in truth.items():
            assert got[key] == (value.bounds, value.counts, pytest.approx(value.total)), key
        assert sum(v.n_observed for v in truth.values()) > 1000


def test_delta_histograms_add_up(pool: BlockPoolAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment's preference; each batch carries what is new."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    name = "veloxquant.block_pool.request.blocks"
    with OtlpReceiver() as receiver, OtlpPipeline(receiver.url, interval_s=LONG_S) as pipeline:
        for n in range(3):
            assert pipeline.flush(20)
            for owner in range(500 * n):
                pool.allocate("k", 16, owner)
                pool.free_all(owner)
        assert pipeline.flush(20)
        truth = {k: v for k, v in true_histograms().items() if k[0] == name}
        ((key, expected),) = truth.items()
        batches = [values(batch)[key] for batch in receiver.metrics]
        assert all(count >= 0 for _, counts, _ in batches for count in counts)
        assert tuple(map(sum, zip(*(c for _, c, _ in batches), strict=True))) == expected.counts
        assert sum(total for *_, total in batches) == pytest.approx(expected.total)
        starts = [
            point.start_time_unix_nano
            for batch in receiver.metrics
            for m in decoded(batch)
            if m.name == name
            for point in m.histogram.data_points
            if flat(point.attributes) == key[1]
        ]
        assert starts == sorted(set(starts))


def test_an_export_every_interval(pool: BlockPoolAllocator) -> None:
    """Without anybody asking."""
    with OtlpReceiver() as receiver, OtlpPipeline(receiver.url, interval_s=0.05):
        receiver.wait(lambda r: len(r.metrics) >= 3)


def test_failures_are_counted_and_the_next_round_exports_again(pool: BlockPoolAllocator) -> None:
    """An endpoint that refuses and then does not."""
    answers = iter([400, 200])
    with (
        OtlpReceiver(lambda: next(answers, 200)) as receiver,
        OtlpPipeline(receiver.url, interval_s=LONG_S) as pipeline,
    ):
        assert not pipeline.flush(20)
        assert pipeline.n_failed == 1
        assert pipeline.flush(20)
        got = values(receiver.metrics[-1])
        key = ("veloxquant.exporter.collect_errors",
               frozenset({("veloxquant.exporter.reason", "otel_export")}))  # fmt: skip
        assert got[key] == 1


class Silent:
    """Accepts connections and never says a word."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.accepted = threading.Event()
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self._kept.append(self._socket.accept()[0])
            except OSError:
                return
            self.accepted.set()

    def close(self) -> None:
        """Hang up on all."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close alone does not
        self._thread.join(10)
        self._socket.close()
        for kept in self._kept:
            kept.close()


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["dead", "silent", "slow"])
def test_closing_is_bounded_and_allocation_goes_on(kind: str, pool: BlockPoolAllocator) -> None:
    """With an export under way: closing ends within the bound, allocations never waited."""
    release = threading.Event()
    silent = Silent()
    entered = threading.Event()

    def slowly() -> int:
        entered.set()
        release.wait(30)
        return 503

    slow = OtlpReceiver(slowly)
    url = {
        "dead": f"http://127.0.0.1:{free_port()}",
        "silent": silent.url,
        "slow": slow.url,
    }[kind]
    pipeline = OtlpPipeline(url, interval_s=0.01)
    if kind == "silent":
        assert silent.accepted.wait(20)
    elif kind == "slow":
        assert entered.wait(20)
    before = pool.stats.n_allocations
    for owner in range(2000):  # while the export hangs
        pool.allocate("k", 16, owner)
        pool.free_all(owner)
    assert pool.stats.n_allocations == before + 2000
    began = time.monotonic()
    if kind == "silent":
        pipeline.close()
    else:
        pipeline.close(1.0)
    took = time.monotonic() - began
    release.set()
    silent.close()
    slow.close()
    assert took <= 5.0


CHILD = """
import os, sys, threading
from veloxquant_exporters.opentelemetry import OtlpPipeline, instrument_meter, service_instance_id
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument
import warnings; warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the point
pool = BlockPoolAllocator(PoolConfig(n_blocks=64)); instrument(pool, name="forked")
"""


def fork_code(body: str) -> str:
    """A program that forks; `body` runs in the child, which must end in 20 s."""
    indented = "\n".join("        " + line for line in body.strip().splitlines())
    return (
        CHILD
        + f"""
pipeline = OtlpPipeline({{url!r}}, interval_s=3600)
assert pipeline.flush(20)
here = service_instance_id()
HOLD
pid = os.fork()
if pid == 0:
    try:
        import faulthandler; faulthandler.dump_traceback_later(20, exit=True)
{indented}
    except BaseException:
        import traceback; traceback.print_exc(); os._exit(3)
    os._exit(0)
FREE
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
pool.allocate("k", 16 * 3, 1)
assert pipeline.flush(20), "the parent is affected"
pipeline.close()
"""
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("hold", "free"),
    [
        ("", ""),
        ("pipeline._reader._changed.acquire()", "pipeline._reader._changed.release()"),
        (
            "pipeline._feed._lock.acquire()",
            "pipeline._feed._lock.release()",
        ),
        (
            "pipeline.provider._measurement_consumer._lock.acquire()",
            "pipeline.provider._measurement_consumer._lock.release()",
        ),
    ],
    ids=["none", "reader", "feed", "sdk"],
)
def test_a_forked_child_exports_nothing_and_hangs_on_nothing(hold: str, free: str) -> None:
    """Whatever lock another thread held: the child works, closes and exits; the parent goes on."""
    other = (
        f"got = threading.Event(); done = threading.Event()\n"
        f"def holder():\n    {hold}\n    got.set(); done.wait(20)\n    {free}\n"
        f"thread = threading.Thread(target=holder); thread.start(); got.wait(20)\n"
        if hold
        else ""
    )
    after = "done.set(); thread.join()\n" if hold else ""
    with OtlpReceiver() as receiver:
        code = fork_code(
            "pool.allocate('k', 16, 'child')\n"
            "assert not pipeline.flush(1)\n"
            "assert service_instance_id() != here\n"
            "pipeline.close()\n"
        )
        code = code.replace("{url!r}", repr(receiver.url))
        code = code.replace("HOLD\n", other).replace("FREE\n", after)
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        assert len(receiver.metrics) == 3  # the parent's: first, after the fork, at the close
        ids = {resource_of(batch)["service.instance.id"] for batch in receiver.metrics}
        assert len(ids) == 1
        key = ("veloxquant.block_pool.allocations",
               frozenset({("veloxquant.block_pool.name", "forked")}))  # fmt: skip
        assert [values(b)[key] for b in receiver.metrics] == [0, 3, 3]


@pytest.mark.timeout(60)
def test_a_child_that_instruments_itself_is_another_instance() -> None:
    """A pipeline of its own, under an id of its own."""
    with OtlpReceiver() as receiver:
        code = fork_code(
            "mine = OtlpPipeline({url!r}, interval_s=3600)\nassert mine.flush(20)\nmine.close()\n"
        )
        code = code.replace("{url!r}", repr(receiver.url))
        done = run_python(code.replace("HOLD\n", "").replace("FREE\n", ""))
        assert done.returncode == 0, done.stderr
        ids = {resource_of(batch)["service.instance.id"] for batch in receiver.metrics}
        assert len(ids) == 2


def test_exit_without_close_exports_once_more() -> None:
    """And does not take long."""
    with OtlpReceiver() as receiver:
        code = CHILD + (
            f"pipeline = OtlpPipeline({receiver.url!r}, interval_s=3600)\n"
            "pool.allocate('k', 16, 1)\n"
        )
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert len(receiver.metrics) == 1


@pytest.mark.timeout(60)
def test_exit_with_a_silent_endpoint_is_bounded() -> None:
    """The interpreter does not wait for an answer that never comes."""
    silent = Silent()
    code = CHILD + f"pipeline = OtlpPipeline({silent.url!r}, interval_s=0.01)\nprint('up')\n"
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    assert child.wait(20) == 0  # 5 s, and what Python itself takes
    child.stdout.close()
    silent.close()


def test_the_resource_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument, else OTEL_RESOURCE_ATTRIBUTES, else an id that stays for the process' life."""
    own = make_resource().attributes
    assert own["service.instance.id"] == service_instance_id() == service_instance_id()
    assert own["service.name"] == "veloxquant"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=theirs,team=a")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    theirs = make_resource().attributes
    assert theirs["service.instance.id"] == "theirs"
    assert theirs["team"] == "a" and theirs["service.name"] == "chat"
    assert make_resource("mine").attributes["service.instance.id"] == "mine"


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is allowed, and before anything has started."""
    n_threads = threading.active_count()
    with pytest.raises(ValueError, match="http://localhost:4318"):
        OtlpPipeline("localhost:4318")
    with pytest.raises(ValueError, match="above 0"):
        OtlpPipeline("http://127.0.0.1:1", interval_s=0)
    with pytest.raises(ValueError, match="semantic"):
        OtlpPipeline("http://127.0.0.1:1", attributes="x")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "soon")
    with OtlpReceiver() as receiver, OtlpPipeline(receiver.url + "/v1/metrics") as pipeline:
        assert pipeline._reader._interval_s == 60.0
        assert pipeline.flush(20)
    assert threading.active_count() <= n_threads + 1
    assert metrics.get_meter_provider() is not pipeline.provider
