"""The metrics server: addresses, methods, encodings, TLS, and clients that are slow or gone."""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import multiprocessing
import os
import socket
import ssl
import subprocess
import sys
import threading
import wsgiref.simple_server
from collections.abc import Callable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Protocol

import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` brings it")
pytest.importorskip("h11", reason="the extra `prometheus` brings it")

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import start_wsgi_server

from tests.metrics_pages import CONTRACT, Fetched, P, checked, fetch, series_of
from veloxquant_exporters.http import (
    HttpServer,
    Limits,
    Response,
    Route,
    StartError,
    Tls,
    accepts_gzip,
)
from veloxquant_exporters.http.worker import Worker
from veloxquant_exporters.prometheus import PoolCollector, start_http_server
from veloxquant_exporters.prometheus.page import OPENMETRICS, TEXT
from veloxquant_exporters.sources import LiveSource, Reading
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument
from veloxquant_mlx.telemetry import registry as watched

pytestmark = pytest.mark.timeout(60)

# Larger than what the kernel takes off the server's hands for a client that does not read.
LARGE = b"x 1\n" * 3_000_000
QUICK = Limits(request_s=0.2, idle_s=0.2, write_s=0.2, grace_s=0.1)


@pytest.fixture(autouse=True)
def _nothing_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with a process that watches no pool and remembers none."""
    monkeypatch.setattr(watched, "_registry", watched.Registry())


@pytest.fixture
def pool() -> BlockPoolAllocator:
    """A pool that is watched as "a"."""
    pool = BlockPoolAllocator(PoolConfig(n_blocks=8))
    instrument(pool, name="a")
    return pool


@pytest.fixture
def server(pool: BlockPoolAllocator) -> Iterator[HttpServer]:
    """A server of that pool's metrics."""
    with start_http_server(0) as handle:
        yield handle


@pytest.fixture
def large() -> Iterator[HttpServer]:
    """A server of a large page."""
    with HttpServer({"/metrics": Route(lambda _: Response(200, LARGE))}) as handle:
        yield handle


class HasPort(Protocol):
    """A server, whosever."""

    port: int


def can_listen(port: int) -> bool:
    """Whether the port is free."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            sock.listen()
            return True
    return False


def ask_and_wait(
    port: int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
) -> socket.socket:
    """A client that asks, and then does not read. With as little room to receive as there is."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", port))
    sock.sendall(request)
    return sock


def ends(sock: socket.socket) -> bytes:
    """What comes until the server closes or drops the connection."""
    received = []
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 20):
            received.append(chunk)
    return b"".join(received)


# -- starting and stopping -----------------------------------------------------------------------


def test_the_page_is_served(server: HttpServer, pool: BlockPoolAllocator) -> None:
    """By default: the pools of this process, as text, on this machine only."""
    got = fetch(server.url)
    assert got.status == 200
    series = series_of(checked(got.body, got.headers["content-type"]))
    assert {(name, (("pool", "a"),)) for name in CONTRACT} <= series.keys()
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert pool.stats.n_blocks == 8


def test_openmetrics_on_demand(server: HttpServer) -> None:
    """Who names it gets it, with its end."""
    got = fetch(server.url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert got.headers["content-type"] == OPENMETRICS.content_type
    checked(got.body, OPENMETRICS.content_type)


def test_a_registry_of_the_programs_own(pool: BlockPoolAllocator) -> None:
    """What a program has registered is served with the pools."""
    registry = CollectorRegistry(target_info={"service": "x"})
    registry.register(PoolCollector())
    with start_http_server(0, registry=registry) as handle:
        series = series_of(checked(*_body_and_type(fetch(handle.url))))
    assert ("target_info", (("service", "x"),)) in series
    assert (P + "blocks_total", (("pool", "a"),)) in series
    assert pool.stats.n_blocks == 8


def _body_and_type(got: Fetched) -> tuple[bytes, str]:
    return got.body, got.headers["content-type"]


def test_C04_stop_frees_the_port_each_time() -> None:
    """Port 0 tells the real one; start and stop on it five times, with a client each time."""
    with start_http_server(0) as first:
        port = first.port
        assert not can_listen(port)
    for _ in range(5):
        assert can_listen(port)
        handle = start_http_server(port)
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        kept.request("GET", "/-/healthy")
        assert kept.getresponse().read() == b"healthy\n"
        handle.stop()  # with a connection that is open
        handle.stop()
        kept.close()
    assert can_listen(port)


def test_C04_the_check_of_the_port_sees_a_server_that_was_only_shut_down() -> None:
    """What C04 is about: the documented stop of others leaves the port taken."""
    other, thread = start_wsgi_server(0, "127.0.0.1", CollectorRegistry())
    other.shutdown()
    thread.join()
    taken = not can_listen(other.server_port)
    other.server_close()
    assert taken and can_listen(other.server_port)


def test_C04_a_taken_port_is_one_clear_error() -> None:
    """Held by another process: an OSError of one line that says who, and what to do."""
    code = (
        "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        before = threading.active_count()
        with pytest.raises(StartError) as caught:
            start_http_server(port)
        assert holder.stdin is not None
        holder.stdin.close()
    assert caught.value.errno == errno.EADDRINUSE
    text = str(caught.value)
    assert f"port {port} of 127.0.0.1 is taken" in text and "choose another port" in text
    assert "\n" not in text
    with contextlib.suppress(ImportError):
        import psutil  # noqa: F401

        assert f"by process {holder.pid}" in text
    assert threading.active_count() == before
    with start_http_server(port) as handle:
        assert fetch(handle.url).status == 200


@pytest.mark.parametrize(
    ("port", "addr", "error"),
    [
        (-1, "127.0.0.1", ValueError),
        (65536, "127.0.0.1", ValueError),
        (True, "127.0.0.1", TypeError),
        ("9464", "127.0.0.1", TypeError),
        (0, "", ValueError),
        (0, "[]", ValueError),
        (0, "192.0.2.1", StartError),
        (0, "no such name", StartError),
        (0, "a" * 300, StartError),
    ],
)
def test_a_bad_address_is_an_error_at_start(port: Any, addr: str, error: type[Exception]) -> None:
    """What cannot be listened on is told to the caller, and leaves no thread."""
    before = threading.active_count()
    with pytest.raises(error) as caught:
        start_http_server(port, addr)
    assert "\n" not in str(caught.value)
    assert threading.active_count() == before


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        return sock.connect_ex(("::1", 9)) == errno.ECONNREFUSED


@pytest.mark.parametrize(
    "addr", ["127.0.0.1", "localhost", "::1", "[::1]", "::", "[::]", "0.0.0.0"]
)
def test_C05_every_address_works_or_is_an_error_at_start(addr: str) -> None:
    """With IPv6 or without; the URL that the handle names is one that answers."""
    if ":" in addr and not _has_ipv6():
        with pytest.raises(StartError, match="no such address"):
            start_http_server(0, addr)
        return
    with start_http_server(0, addr) as handle:
        assert fetch(handle.url, "/-/healthy").status == 200
        if addr in {"::", "[::]", "localhost"}:  # both families
            assert fetch(f"http://127.0.0.1:{handle.port}", "/-/healthy").status == 200


def test_stopping_leaves_no_thread() -> None:
    """Two while it serves, none after."""
    before = threading.active_count()
    with start_http_server(0) as handle:
        assert threading.active_count() == before + 2
        assert fetch(handle.url).status == 200
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_holds_neither_port_nor_connection() -> None:
    """A worker forked from the server lives on after stop: the port is free, and clients see the end."""
    handle = start_http_server(0)
    kept = ask_and_wait(handle.port, b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
    assert kept.recv(15) == b"HTTP/1.1 200 \r\n"
    context = multiprocessing.get_context("fork")
    there, leave = context.Event(), context.Event()
    child = context.Process(target=_stop_and_wait, args=(handle, there, leave))
    child.start()
    try:
        assert there.wait(20)
        handle.stop()
        assert can_listen(handle.port)
        assert ends(kept).endswith(b"healthy\n")
    finally:
        leave.set()
        child.join()
        kept.close()
    assert child.exitcode == 0


def _stop_and_wait(handle: HttpServer, there: Any, leave: Any) -> None:
    handle.stop()  # of no use in a child, and no harm
    there.set()
    leave.wait()


# -- methods and paths ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/-/ready"])
def test_C06_reading_is_answered_and_writing_is_refused(server: HttpServer, path: str) -> None:
    """GET 200; HEAD the same without a body; everything else 405, with what is allowed."""
    got = fetch(server.url, path)
    assert got.status == 200 and got.body
    assert int(got.headers["content-length"]) == len(got.raw)
    head = fetch(server.url, path, method="HEAD")
    assert head.status == 200 and head.raw == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"):
        refused = fetch(server.url, path, method=method)
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
        assert b"veloxquant" not in refused.body


@pytest.mark.parametrize("path", ["/nope", "/metrics/", "//metrics", "/metrics/../", "/%2e", "/-/"])
def test_C06_any_other_path_is_not_found(server: HttpServer, path: str) -> None:
    """Metrics are in one place."""
    for method in ("GET", "HEAD", "POST"):
        got = fetch(server.url, path, method=method)
        assert got.status == 404
        assert b"veloxquant" not in got.body


def test_C06_health_is_answered_without_collecting() -> None:
    """A source that is stuck does not make the server look dead; that it is stuck, /-/ready tells."""
    entered, leave = threading.Event(), threading.Event()

    class Stuck(LiveSource):
        def read(self) -> Reading:
            entered.set()
            assert leave.wait(30)
            return super().read()

    with start_http_server(0, source=Stuck()) as handle:
        scrape = ask_and_wait(handle.port)
        assert entered.wait(20)
        assert fetch(handle.url, "/-/healthy").status == 200
        assert fetch(handle.url, "/-/ready").status == 200
        clock = [0.0]
        handle._worker._clock = lambda: clock[0]
        handle._worker._began = 0.0
        clock[0] = 31.0
        stuck = fetch(handle.url, "/-/ready")
        assert (stuck.status, stuck.body) == (503, b"a scrape has been running for 31 s\n")
        leave.set()
        assert scrape.recv(15) == b"HTTP/1.1 200 \r\n"
        scrape.close()


def test_samples_by_name(server: HttpServer) -> None:
    """`name[]=` restricts the page, as prometheus-client does."""
    got = fetch(server.url, f"/metrics?name[]={P}blocks_total&name[]={P}frees_total&x=%zz")
    series = series_of(got.body.decode())
    assert {name for name, _ in series} == {P + "blocks_total", P + "frees_total"}


def test_the_landing_page_shows_the_pools(server: HttpServer, pool: BlockPoolAllocator) -> None:
    """Links and a table; what a pool is named by is text, never markup."""
    other = BlockPoolAllocator(PoolConfig(n_blocks=1000))
    instrument(other, name="<script>alert(1)</script>")
    pool.allocate("k", 30, "me")
    got = fetch(server.url, "/")
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    text = got.body.decode()
    for expected in (
        'href="/metrics"',
        "<td>a</td><td>2</td><td>8</td><td>25%</td><td>1</td>",
        "1,000",
    ):
        assert expected in text
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "default-src 'none'" in got.headers["content-security-policy"]


def test_without_pools_the_landing_page_says_how_to_watch_one() -> None:
    """Nothing to show is explained."""
    with start_http_server(0) as handle:
        assert b"instrument(pool)" in fetch(handle.url, "/").body


# -- encodings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepts", "packed"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("x-gzip", True),
        ("GZIP", True),
        ("gzip, deflate, br", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("gzip;q=0.5, identity", False),
        ("gzip, identity;q=0.5", True),
        ("identity", False),
        ("*", True),
        ("*;q=0", False),
        ("gzip;q=0, *", False),
        ("br", False),
        ("gzip;q=nope", False),
    ],
)
def test_C08_gzip_is_what_the_client_says(
    server: HttpServer, accepts: str | None, packed: bool
) -> None:
    """All of it: q values, the wildcard, and a length that is that of what is sent."""
    headers = {} if accepts is None else {"Accept-Encoding": accepts}
    got = fetch(server.url, headers=headers)
    assert (got.headers.get("content-encoding") == "gzip") is packed
    assert int(got.headers["content-length"]) == len(got.raw)
    assert "accept-encoding" in got.headers["vary"].lower()
    checked(got.body, TEXT.content_type)
    assert accepts_gzip(accepts or "") is packed


def test_C08_gzip_can_be_switched_off() -> None:
    """Whoever has no CPU to spare serves plain bytes only."""
    with start_http_server(0, gzip=False) as handle:
        got = fetch(handle.url, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in got.headers


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one self-signed certificate for the server, and one for a client."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client"):
        _make_certificate(folder, name)
    subprocess.run(
        ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", folder / "server.key",
         "-out", folder / "locked.key"],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "both.pem").write_bytes(
        (folder / "server.crt").read_bytes() + (folder / "server.key").read_bytes()
    )
    return folder


def _make_certificate(folder: Path, name: str) -> None:
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt"],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificates, is not installed")


def trusting(folder: Path) -> ssl.SSLContext:
    """A client's context that knows the server's certificate."""
    return ssl.create_default_context(cafile=str(folder / "server.crt"))


def test_C16_https_by_certificate_files(certificates: Path, pool: BlockPoolAllocator) -> None:
    """Key apart or in the same file; a client that does not know the certificate refuses it."""
    files = {
        "certfile": str(certificates / "server.crt"),
        "keyfile": str(certificates / "server.key"),
    }
    for given in (files, {"certfile": str(certificates / "both.pem")}):
        with start_http_server(0, **given) as handle:  # type: ignore[arg-type]
            assert handle.url.startswith("https://127.0.0.1:")
            got = fetch(handle.url, context=trusting(certificates))
            checked(got.body, TEXT.content_type)
            with pytest.raises(ssl.SSLCertVerificationError):
                fetch(handle.url, context=ssl.create_default_context())
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                fetch(handle.url.replace("https", "http"))
            assert fetch(handle.url, context=trusting(certificates)).status == 200
    assert pool.stats.n_blocks == 8


@pytest.mark.parametrize(
    ("certfile", "keyfile", "says"),
    [
        ("server.crt", "client.key", "the key is not the certificate's"),
        ("server.crt", "locked.key", "has a passphrase"),
        ("server.crt", None, "no PEM file with what is needed"),
        ("server.key", "server.key", "no PEM file with what is needed"),
        ("missing.crt", None, "No such file"),
    ],
)
def test_C16_a_bad_certificate_is_an_error_at_start(
    certificates: Path, certfile: str, keyfile: str | None, says: str
) -> None:
    """In one line, naming the files and no secret; and nobody is asked for a passphrase."""
    with pytest.raises(StartError) as caught:
        start_http_server(
            0,
            certfile=str(certificates / certfile),
            keyfile=None if keyfile is None else str(certificates / keyfile),
        )
    text = str(caught.value)
    assert says in text and certfile in text and "\n" not in text
    assert "PRIVATE" not in text and "secret" not in text


def test_C16_keys_without_a_certificate_are_refused() -> None:
    """Plain HTTP where somebody wanted TLS would be the worst of answers."""
    for given in ({"keyfile": "x"}, {"client_cafile": "x"}):
        with pytest.raises(ValueError, match="certfile"):
            start_http_server(0, **given)  # type: ignore[arg-type]


def test_C16_only_known_clients(certificates: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With client_cafile, a certificate of those authorities is needed to get in."""
    with start_http_server(
        0,
        certfile=str(certificates / "server.crt"),
        keyfile=str(certificates / "server.key"),
        client_cafile=str(certificates / "client.crt"),
    ) as handle:
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            fetch(handle.url, context=trusting(certificates))
        known = trusting(certificates)
        known.load_cert_chain(certificates / "client.crt", certificates / "client.key")
        assert fetch(handle.url, context=known).status == 200
    assert capfd.readouterr().err == ""


def test_a_renewed_certificate_is_taken_up(certificates: Path, tmp_path: Path) -> None:
    """Certificates last for weeks, servers for months: new files are used without a restart."""
    cert, key = tmp_path / "c.crt", tmp_path / "c.key"

    def install(name: str) -> None:
        cert.write_bytes((certificates / f"{name}.crt").read_bytes())
        key.write_bytes((certificates / f"{name}.key").read_bytes())

    install("server")
    trusts_new = ssl.create_default_context(cafile=str(certificates / "client.crt"))
    with start_http_server(0, certfile=str(cert), keyfile=str(key)) as handle:
        assert fetch(handle.url, context=trusting(certificates)).status == 200
        key.write_bytes(b"half written")
        assert fetch(handle.url, context=trusting(certificates)).status == 200
        assert fetch(handle.url, context=trusting(certificates)).status == 200
        install("client")
        assert fetch(handle.url, context=trusting(certificates)).status == 200  # sees the change
        assert fetch(handle.url, context=trusts_new).status == 200


def test_C16_handshakes_that_nobody_finishes_end_with_the_server(certificates: Path) -> None:
    """A client that connects and says nothing holds up neither a scrape nor the end."""
    with start_http_server(0, certfile=str(certificates / "both.pem")) as handle:
        silent = [socket.create_connection(("127.0.0.1", handle.port)) for _ in range(20)]
        assert fetch(handle.url, context=trusting(certificates)).status == 200
    assert can_listen(handle.port)
    for sock in silent:
        sock.settimeout(20)
        assert ends(sock) == b""
        sock.close()


# -- clients that are slow, gone or odd ----------------------------------------------------------


def threads_beside_slow_readers(port: int, scrape: Callable[[], object]) -> int:
    """How many threads more there are with 20 clients that do not read, after one that does."""
    scrape()
    before = threading.active_count()
    slow = [ask_and_wait(port) for _ in range(20)]
    scrape()
    grown = threading.active_count() - before
    for sock in slow:
        sock.close()
    return grown


def test_C17_slow_readers_cost_no_thread(large: HttpServer) -> None:
    """50 clients that ask for a large page and do not read it: the next scrape gets its own."""
    slow = [ask_and_wait(large.port) for _ in range(50)]
    assert len(fetch(large.url).body) == len(LARGE)
    for sock in slow:
        sock.close()
    assert threads_beside_slow_readers(large.port, lambda: fetch(large.url)) == 0


def test_C17_the_count_of_threads_sees_a_server_with_a_thread_a_client() -> None:
    """What C17 is about: the standard library's threading server grows with its slow readers."""

    class Threading(ThreadingMixIn, wsgiref.simple_server.WSGIServer):
        daemon_threads = True
        request_queue_size = 64

    class Silent(wsgiref.simple_server.WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                super().handle()

    def app(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [("Content-Length", str(len(LARGE)))])
        return [LARGE]

    with wsgiref.simple_server.make_server("127.0.0.1", 0, app, Threading, Silent) as other:
        other.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{other.server_port}"
        grown = threads_beside_slow_readers(other.server_port, lambda: fetch(url))
        other.shutdown()
        thread.join()
    assert grown > 10


def test_C17_a_thousand_clients_hang_up(
    server: HttpServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They ask and leave at once: no traceback, no thread, no socket left, the next scrape is fine."""
    before = threading.active_count()
    for number in range(1000):
        sock = ask_and_wait(server.port)
        if number % 2:  # with a reset instead of an orderly end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    got = fetch(server.url)
    checked(got.body, TEXT.content_type)
    assert threading.active_count() == before
    server.stop()
    assert not server._connections
    assert capfd.readouterr().err == ""
    assert [r for r in caplog.records if r.levelno > logging.DEBUG] == []


def test_C17_hanging_up_under_tls_is_quiet(
    certificates: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A TLS client that ends while its page is made: nothing is logged, not by asyncio either."""
    entered, leave = threading.Event(), threading.Event()

    def slow(_: object) -> Response:
        entered.set()
        assert leave.wait(30)
        return Response(200, b"x" * 100_000)

    with HttpServer({"/metrics": Route(slow)}, tls=Tls(str(certificates / "both.pem"))) as handle:
        raw = socket.create_connection(("127.0.0.1", handle.port), timeout=20)
        sock = trusting(certificates).wrap_socket(raw, server_hostname="localhost")
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert entered.wait(20)
        sock.unwrap().close()  # returns when the server has ended its side too
        leave.set()
        assert fetch(handle.url, context=trusting(certificates)).status == 200
    assert [r for r in caplog.records if r.levelno > logging.DEBUG] == []
    assert capfd.readouterr().err == ""


def test_C17_a_reader_that_never_ends_is_dropped() -> None:
    """After `write_s` the connection is cut, though the page was not all read."""
    routes = {"/metrics": Route(lambda _: Response(200, LARGE))}
    with HttpServer(routes, limits=QUICK) as handle:
        sock = ask_and_wait(handle.port)
        # The next one asks after the drop: its own limit started later than the first one's.
        second = ask_and_wait(handle.port, b"GET")
        assert ends(second) == b""
        second.close()
        assert 0 < len(ends(sock)) < len(LARGE)
        sock.close()


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_C17_a_client_that_does_not_finish_asking_is_dropped(sent: bytes) -> None:
    """After `request_s`, whatever it has sent."""
    with HttpServer({}, limits=QUICK) as handle:
        sock = ask_and_wait(handle.port, sent)
        assert ends(sock) == b""
        sock.close()


def test_an_idle_connection_is_kept_and_ends() -> None:
    """Scrapers keep their connection: two requests go over one, then `idle_s` ends it."""
    with HttpServer({}, limits=Limits(idle_s=0.2)) as handle:
        sock = ask_and_wait(handle.port, b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        assert ends(sock).count(b"healthy\n") == 2
        sock.close()


def test_of_too_many_connections_the_oldest_goes() -> None:
    """Whoever hoards connections loses them, and a scraper always gets in."""
    with HttpServer({}, limits=Limits(connections=4, request_s=60)) as handle:
        hoard = [ask_and_wait(handle.port, b"GET") for _ in range(4)]
        assert fetch(handle.url, "/-/healthy").status == 200
        assert ends(hoard[0]) == b""
        for sock in hoard:
            sock.close()


def test_too_many_waiting_scrapes_are_told_to_come_back() -> None:
    """Behind a scrape that is stuck, the queue has an end."""
    entered, leave = threading.Event(), threading.Event()

    def stuck(_: object) -> Response:
        entered.set()
        assert leave.wait(30)
        return Response(200, b"done")

    with HttpServer({"/metrics": Route(stuck)}) as handle:
        handle._worker._max_waiting = 1
        first = ask_and_wait(handle.port)
        assert entered.wait(20)
        second = ask_and_wait(handle.port)
        got = fetch(handle.url)
        while got.status != 503:  # the second may not have been read yet
            got = fetch(handle.url)
        assert got.headers["retry-after"] == "1"
        leave.set()
        for sock in (first, second):
            assert sock.recv(15) == b"HTTP/1.1 200 \r\n"
            sock.close()


def test_a_handler_that_raises_costs_its_own_answer(
    caplog: pytest.LogCaptureFixture, pool: BlockPoolAllocator
) -> None:
    """Somebody else's collector breaks: 500 and a line in the log; the server goes on."""

    class Broken:
        def collect(self) -> Iterator[Any]:
            raise KeyError("secret")
            yield

    registry = CollectorRegistry()
    registry.register(Broken())
    with start_http_server(0, registry=registry) as handle:
        got = fetch(handle.url)
        assert got.status == 500
        assert b"KeyError" in got.body and b"secret" not in got.body
        assert fetch(handle.url, "/").status == 200
    assert "answering /metrics failed" in caplog.text
    assert pool.stats.n_blocks == 8


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000, b"431"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n", b"405"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" + b"x" * 99_999, b"413"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET http://x/metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),  # TLS to plain HTTP
    ],
    ids=[
        "nonsense", "no host", "bad length", "endless header", "body", "expect", "large body",
        "http/1.0", "absolute", "tls",
    ],
)  # fmt: skip
def test_odd_requests_get_an_answer(server: HttpServer, sent: bytes, status: bytes) -> None:
    """Each gets a status, and the next scrape is fine."""
    sock = ask_and_wait(server.port, sent)
    sock.shutdown(socket.SHUT_WR)
    assert ends(sock).split(b" ")[1] == status
    sock.close()
    assert fetch(server.url).status == 200


def test_a_client_that_only_stopped_sending_gets_its_answer(large: HttpServer) -> None:
    """Half closed is not gone: a page under way is written to its end."""
    sock = ask_and_wait(large.port)
    first = sock.recv(1)
    sock.shutdown(socket.SHUT_WR)
    assert len(first + ends(sock)) > len(LARGE)
    sock.close()


def test_an_answer_under_way_is_finished_before_the_server_stops() -> None:
    """Stop does not cut a scrape off that is being read."""
    entered, leave = threading.Event(), threading.Event()

    def slow(_: object) -> Response:
        entered.set()
        assert leave.wait(30)
        return Response(200, b"whole")

    handle = HttpServer({"/metrics": Route(slow)}, limits=Limits(grace_s=20))
    sock = ask_and_wait(handle.port)
    assert entered.wait(20)
    stopping = threading.Thread(target=handle.stop)
    stopping.start()
    while not can_listen(handle.port):
        threading.Event().wait(0.01)
    leave.set()
    answer = ends(sock)
    stopping.join()
    sock.close()
    assert answer.endswith(b"whole")
    assert b"connection: close" in answer


def test_a_scrape_that_is_stuck_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread is left behind, with a word in the log; the port is free."""
    entered, leave = threading.Event(), threading.Event()

    def stuck(_: object) -> Response:
        entered.set()
        assert leave.wait(30)
        return Response(200, b"")

    handle = HttpServer({"/metrics": Route(stuck)}, limits=QUICK)
    sock = ask_and_wait(handle.port)
    assert entered.wait(20)
    handle.stop()
    assert can_listen(handle.port)
    assert "a scrape is stuck" in caplog.text
    leave.set()
    handle._worker._thread.join()
    sock.close()


# -- the worker ----------------------------------------------------------------------------------


def test_the_worker_outlives_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    """A job that raises is logged; the next one runs; after the end none is taken."""
    worker = Worker("tests")
    done = threading.Event()
    assert worker.submit(lambda: 1 // 0)  # type: ignore[arg-type]
    assert worker.submit(done.set)
    assert done.wait(20)
    assert worker.busy_s() >= 0
    assert worker.close(20)
    assert not worker.submit(done.set)
    assert "ZeroDivisionError" in caplog.text
