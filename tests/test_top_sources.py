"""vqmon top: its sources. A page read back is the snapshot it was made from; what is none says so."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra top")

from prometheus_client import CollectorRegistry

from tests.sidecar_help import LocalSidecar, a_file, put, wait_for
from tests.top_help import DEADLINE_S, Scripted, exhaust, live, snapshot, watched
from veloxquant_exporters.access import Access
from veloxquant_exporters.fetch import FetchError
from veloxquant_exporters.prometheus import PoolCollector
from veloxquant_exporters.prometheus.page import OPENMETRICS, TEXT, Offer, render
from veloxquant_exporters.prometheus.serve import start_http_server
from veloxquant_exporters.sources import Reading
from veloxquant_exporters.top.boards import BoardMaker, LiveBoards
from veloxquant_exporters.top.folder_source import FolderSource
from veloxquant_exporters.top.history import Moment
from veloxquant_exporters.top.page import read_page
from veloxquant_exporters.top.page_source import PageSource
from veloxquant_exporters.top.poller import Poller
from veloxquant_exporters.top.source import SourceError
from veloxquant_mlx.telemetry.process import ProcessSnapshot
from veloxquant_mlx.telemetry.program import (
    AccountSnapshot,
    CacheCensus,
    ProgramSnapshot,
    PromptCacheSnapshot,
    RequestsSnapshot,
)
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot

pytestmark = pytest.mark.timeout(60)

# What no page tells: counters of snapshots, this process' clock, and who was refused last.
UNTOLD = {"sequence", "monotonic_ns", "last_exhaustion", "wall_s", "streams"}


class Fixed:
    """A source of processes that do not change."""

    def __init__(self, *processes: ProcessSnapshot, labels: bool = False, **up: int) -> None:
        self.labels_processes = labels
        self._reading = Reading(processes, up or {p.process: 1 for p in processes}, {"io": 3})

    def read(self) -> Reading:
        """As any source."""
        return self._reading


def page_of(source: Fixed, offer: Offer = TEXT) -> str:
    """What an exporter makes of it."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(source))
    return render(registry, offer).decode()


@pytest.fixture
def used() -> Iterator[ProcessSnapshot]:
    """A process with a pool that has been through everything, and one that has not."""
    with (
        watched("used", n_blocks=64, separate_kv=True, grow_on_exhaustion=True, max_blocks=96) as p,
        watched("idle", n_blocks=8, separate_kv=False) as _,
    ):
        for n in range(200):
            p.allocate_kv(40, n % 7, "int8" if n % 2 else "fp16", n_filled=33)
            if n % 3 == 0:
                p.free_all((n + 1) % 7)
            if n % 50 == 49:
                for owner in range(7):
                    p.free_all(owner)
        exhaust(p, times=2)
        blocks = p.allocate("k", 64, "x")
        p.free(blocks)
        p.free(blocks)
        p.shrink("k", 30)
        found = snapshot("used", "idle")
        yield replace(
            found, mlx_active_bytes=10, mlx_cache_bytes=5, mlx_limit_bytes=100, mlx="0.32"
        )


# -- a page, read back ---------------------------------------------------------------------------


@pytest.mark.parametrize("offer", [TEXT, OPENMETRICS], ids=["text", "openmetrics"])
@pytest.mark.parametrize("labels", [False, True], ids=["process", "sidecar"])
def test_a_page_read_back_is_its_snapshot(
    used: ProcessSnapshot, offer: Offer, labels: bool
) -> None:
    """Every field of every pool that a page tells, in both formats, of one process or of many."""
    process = replace(used, process="w" if labels else "")
    page = page_of(Fixed(process, labels=labels), offer)
    reading = read_page(page, offer.media_type, 1.0)
    (found,) = reading.processes
    assert reading.up == {process.process: 1}
    for name in ("process", "wall_s", "mlx_active_bytes", "mlx_cache_bytes", "mlx_limit_bytes",
                 "resident_bytes", "version", "python", "mlx", "overhead_s"):  # fmt: skip
        assert getattr(found, name) == getattr(process, name), name
    assert [pool.name for pool in found.pools] == ["used", "idle"]
    for pool, wanted in zip(found.pools, process.pools, strict=True):
        for field in fields(PoolSnapshot):
            if field.name not in UNTOLD:
                got = getattr(pool, field.name)
                assert got == pytest.approx(getattr(wanted, field.name)), field.name
        assert set(pool.streams) == set(wanted.streams)
        for name, stream in pool.streams.items():
            like = replace(wanted.streams[name], slots_held=wanted.slots_held(name))
            assert stream == like
        assert pool.blocks_limit == wanted.blocks_limit


def test_errors_of_a_sidecar_are_its_own(used: ProcessSnapshot) -> None:
    """Its page has them under no process; in process, they are the process'."""
    sidecar = read_page(page_of(Fixed(replace(used, process="w"), labels=True)), "text/plain", 1.0)
    assert sidecar.errors["io"] == 3
    assert "io" not in sidecar.processes[0].errors
    own = read_page(page_of(Fixed(used)), "text/plain", 1.0)
    assert own.errors == {}
    assert own.processes[0].errors["io"] == 3


def test_a_dead_process_has_no_figures(used: ProcessSnapshot) -> None:
    """A sidecar goes on telling what it counted; that is no pool with 0 blocks."""
    lines = page_of(Fixed(replace(used, process="w"), labels=True, w=0)).splitlines()
    kept = [
        line
        for line in lines
        if line.startswith("#") or "_total" in line or "exporter_up" in line
        if "blocks_total" not in line
    ]
    reading = read_page("\n".join(kept) + "\n", "text/plain", 1.0)
    assert reading.processes == ()
    assert reading.up == {"w": 0}


def test_a_page_of_an_older_version_tells_less(used: ProcessSnapshot) -> None:
    """Series that are not there yet are untold, not a fault."""
    lines = page_of(Fixed(used)).splitlines()
    kept = [
        line
        for line in lines
        if not any(new in line for new in ("idle_owner", "lease_lifetime", "timestamp", "pools"))
    ]
    (found,) = read_page("\n".join(kept) + "\n", "text/plain", 7.0).processes
    assert found.wall_s == 7.0
    assert found.pools[0].idle_owner_blocks == 0
    assert found.pools[0].n_blocks == used.pools[0].n_blocks


def test_metrics_of_others_on_the_page_do_no_harm(used: ProcessSnapshot) -> None:
    """A server's own metrics, even such as no parser takes, are passed over."""
    page = page_of(Fixed(used)) + "vllm_requests_total 3\nhalf a line {\n"
    assert len(read_page(page, "text/plain", 1.0).processes[0].pools) == 2


@pytest.mark.parametrize(
    ("page", "content_type", "why"),
    [
        ("<!DOCTYPE html><html>", "text/html", "is HTML"),
        ("<html><body>hi", "text/plain", "is HTML"),
        ("up 1\n", "text/plain", "none of block pools"),
        ("", "text/plain", "is an empty page"),
        ("{garbage", "text/plain", "is no metrics page"),
        ('veloxquant_x{a="\n', "text/plain", "is no metrics page"),
        ("veloxquant_exporter_up nonsense\n", "text/plain", "is no metrics page"),
        ('veloxquant_block_pool_blocks_managed{pool="p"} NaN\n', "text/plain", "says NaN"),
        ('veloxquant_block_pool_blocks_managed{pool="p"} +Inf\n', "text/plain", "says inf"),
    ],
)
def test_what_is_no_page_is_told_in_a_line(page: str, content_type: str, why: str) -> None:
    """HTML, another exporter's page, nothing at all, garbage, and numbers that are none."""
    with pytest.raises(SourceError, match=why) as caught:
        read_page(page, content_type, 1.0)
    assert "\n" not in str(caught.value)


def served(n_tokens: int) -> ProgramSnapshot:
    """A program that serves, and has generated so many tokens."""
    return ProgramSnapshot(
        mlx_lm="0.32.2",
        hooks={"caches": True, "server": False},
        hook_errors={"caches": 2},
        caches={"kv": CacheCensus(n_objects=32, n_bytes=400, waste_bytes=100)},
        prompt_cache=PromptCacheSnapshot(
            entries={"user": 3}, n_bytes={"user": 90}, lookups={"hit": 1}, lookup_tokens=100,
            hit_tokens=25,
        ),
        requests={"chat": RequestsSnapshot(finished={"ok": 7}, generated_tokens=n_tokens)},
        active_requests={"decode": 2, "queued": 0},
        generation_thread_alive=False,
        weights_bytes=1000,
        account=AccountSnapshot(excess_blocks=4, excess_blocks_total=9),
    )  # fmt: skip


def test_a_watched_program_is_told_of_beside_its_pools(used: ProcessSnapshot) -> None:
    """From a page as from a snapshot: requests, caches, the prompt cache, and what is wrong."""
    maker = BoardMaker("made up")
    for second, n_tokens in ((0.0, 50), (2.0, 150)):
        process = replace(
            used, wall_s=1e9 + second, mlx_active_bytes=2000, program=served(n_tokens)
        )
        read = read_page(page_of(Fixed(process)), "text/plain", 1.0)
        board = maker.add(Moment(second, 1e9 + second, read))
    (view,) = board.processes
    assert view.memory is not None
    assert (view.memory.caches, view.memory.weights, view.memory.rest) == (400, 1000, 600)
    assert view.program == (
        "requests 2 decode  ended 7 ok  50 tokens/s",
        "32 kv 400 B (25% waste)  prompt cache 3 entries 90 B, 25% of tokens hit",
        (
            "the generation thread is dead: every request fails  "
            "not watched with this mlx-lm: server  caches are 4 blocks over their pool  "
            "2 hook errors"
        ),
    )
    direct = BoardMaker("made up").add(
        Moment(0.0, 1e9, Reading((replace(used, program=served(50)),), {"": 1}))
    )
    assert direct.processes[0].program[1:] == view.program[1:]


# -- over HTTP -----------------------------------------------------------------------------------


@contextmanager
def answering(
    body: bytes, status: int = 200, content_type: str = "text/plain"
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that answers everything with that; its URL, and the headers it was sent."""
    seen: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_page_of_a_process_is_read() -> None:
    """Without a path, /metrics is meant."""
    with watched("served", n_blocks=64) as pool, start_http_server(0) as server:
        pool.allocate("k", 32, 1)
        moment = PageSource(server.url).read()
        found = {pool.name: pool for pool in moment.reading.processes[0].pools}["served"]
    assert (found.n_blocks, found.blocks_in_use) == (64, 2)


def test_the_page_of_a_sidecar_is_read(tmp_path: Path) -> None:
    """Each process by its name, with who is dead."""
    put(tmp_path, a_file(process="worker-3", pid_namespace="elsewhere", pid=1))
    put(tmp_path, a_file(process="dead"))
    with LocalSidecar(tmp_path) as sidecar:
        reading = PageSource(f"http://127.0.0.1:{sidecar.port}/metrics").read().reading
    assert reading.up == {"worker-3": 1, "dead": 0}
    assert [process.process for process in reading.processes] == ["worker-3"]
    assert reading.processes[0].pools[0].blocks_in_use == 3


@pytest.mark.parametrize(
    ("status", "why"),
    [(404, "usually /metrics"), (401, "--token-file"), (403, "--tls-cert"), (500, "answers 500")],
)
def test_a_refusal_is_told_with_what_to_do(status: int, why: str) -> None:
    """By its status."""
    with answering(b"no", status) as (url, _), pytest.raises(SourceError, match=why):
        PageSource(url).read()


def test_a_password_goes_where_it_belongs_and_is_not_shown() -> None:
    """It is sent, and the title lacks it."""
    with answering(b"up 1\n") as (url, seen):
        source = PageSource(url.replace("://", "://user:secret@"))
        with pytest.raises(SourceError) as caught:
            source.read()
    assert seen[0]["authorization"] == "Basic dXNlcjpzZWNyZXQ="
    assert seen[0]["path"] == "/metrics"
    assert "secret" not in source.title + str(caught.value)


def test_a_token_is_read_anew_each_time(tmp_path: Path) -> None:
    """Tokens are renewed by writing the file; one that is none is told."""
    file = tmp_path / "token"
    file.write_text("one\n")
    with answering(b"up 1\n") as (url, seen):
        source = PageSource(url, Access(token_file=str(file)))
        for token in ("one", "two"):
            file.write_text(f"{token}\n")
            with pytest.raises(SourceError, match="none of block pools"):
                source.read()
            assert seen[-1]["authorization"] == f"Bearer {token}"
        file.write_text("two words")
        with pytest.raises(SourceError, match="must hold a token"):
            source.read()
        file.unlink()
        with pytest.raises(SourceError, match="cannot be read: No such file"):
            source.read()


def test_files_for_tls_must_be_such(tmp_path: Path) -> None:
    """In one line that names the file."""
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    for access in (Access(ca_file=str(file)), Access(cert_file=str(file))):
        with pytest.raises(FetchError, match=r"ca\.pem cannot be used"):
            access.context()
    assert Access().context() is None
    assert isinstance(ssl.create_default_context(), ssl.SSLContext)


def test_who_does_not_answer_is_told() -> None:
    """Nobody there, and no URL at all."""
    with answering(b"") as (url, _):
        gone = url
    with pytest.raises(SourceError, match="nothing listens"):
        PageSource(gone).read()
    with pytest.raises(SourceError, match="is no address"):
        PageSource("http://[half/metrics").read()


# -- a folder ------------------------------------------------------------------------------------


def test_a_folder_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    """Even files of processes long dead: they are for the sidecar to remove."""
    for n in range(70):
        put(tmp_path, a_file(process=f"dead-{n}"))
    before = sorted(path.name for path in tmp_path.iterdir())
    source = FolderSource(tmp_path)
    for _ in range(3):
        reading = source.read().reading
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert reading.processes == ()
    assert set(reading.up.values()) == {0}


def test_a_folder_that_goes_is_told_and_may_come_back(tmp_path: Path) -> None:
    """Not as a folder without processes."""
    folder = tmp_path / "snapshots"
    folder.mkdir()
    source = FolderSource(folder)
    assert source.read().reading.processes == ()
    folder.rmdir()
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        source.read()
    put(folder, a_file(process="back", pid_namespace="elsewhere", pid=1))
    assert [process.process for process in source.read().reading.processes] == ["back"]


def test_a_broken_file_is_counted(tmp_path: Path) -> None:
    """By reason, beside those that can be read."""
    put(tmp_path, a_file(process="whole", pid_namespace="elsewhere", pid=1))
    (tmp_path / "x.snapshot.json").write_text(json.dumps({"half": 1}))
    reading = FolderSource(tmp_path).read().reading
    assert reading.errors["invalid"] == 1
    assert [process.process for process in reading.processes] == ["whole"]


# -- the poller ----------------------------------------------------------------------------------


def test_the_poller_never_waits_for_its_source() -> None:
    """A read that hangs is told as such; asking, waiting and closing go on."""
    with watched("polled", n_blocks=8):
        source = Scripted(live("polled"))
        poller = Poller(LiveBoards(source), 0.01)
        poller.start()
        first = poller.wait(2, DEADLINE_S)
        assert first.board is not None and not first.trouble(poller.clock())
        source.hanging.set()
        hanging = wait_for(lambda: poller.heard if poller.heard.asked_s else None, "a read")
        assert hanging is not None and hanging.asked_s is not None
        assert hanging.board is not None
        assert hanging.trouble(hanging.asked_s + 3) == "no answer yet"
        assert hanging.quiet_s(hanging.seen_s + 5) == 5
        assert poller.wait(10**9, 0.01).n_reads < 10**9
        poller.close()
        source.released.set()


def test_a_poke_reads_at_once() -> None:
    """However long the interval."""
    with watched("poked", n_blocks=8):
        poller = Poller(LiveBoards(Scripted(live("poked"))), 3600)
        poller.start()
        assert poller.wait(1, DEADLINE_S).n_reads == 1
        poller.poke()
        assert poller.wait(2, DEADLINE_S).n_reads == 2
        poller.close()
