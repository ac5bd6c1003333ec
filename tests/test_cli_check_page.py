"""`vqmon check` of a metrics page: real ones pass, and each way to break one is told."""

from __future__ import annotations

import gzip
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click", reason="the extra cli")
pytest.importorskip("prometheus_client", reason="the extra prometheus")

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from tests.metrics_pages import page_of
from tests.sidecar_help import Sidecar, Worker, a_file, put
from veloxquant_exporters.check import check
from veloxquant_exporters.check.movement import check_movement
from veloxquant_exporters.check.page import check_page
from veloxquant_exporters.check.page_text import parse_page
from veloxquant_exporters.cli.group import run
from veloxquant_exporters.prometheus import PoolCollector, start_http_server
from veloxquant_exporters.prometheus.page import OPENMETRICS, TEXT
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, uninstrument

pytestmark = pytest.mark.timeout(60)

Said = pytest.CaptureFixture[str]
P = "veloxquant_block_pool_"


@pytest.fixture(scope="module")
def pools() -> Iterator[list[BlockPoolAllocator]]:
    """Two pools with a past: blocks held, given back, refused, in two formats."""
    chat = BlockPoolAllocator(PoolConfig(n_blocks=64))
    small = BlockPoolAllocator(PoolConfig(n_blocks=4, separate_kv=False))
    instrument(chat, name="chat")
    instrument(small, name='odd "name"\\ {x="1"}\n')
    blocks = chat.allocate("k", 40, 1)
    chat.allocate("v", 40, 1, "int4")
    chat.mark_used(blocks[0], 3)
    chat.free(blocks[1:])
    chat.free(blocks[1:])  # refused
    with pytest.raises(BlockPoolExhaustedError):
        small.allocate("kv", 1000, 2)
    yield [chat, small]
    for pool in (chat, small):
        uninstrument(pool)


@pytest.fixture(scope="module")
def page(pools: list[BlockPoolAllocator]) -> str:
    """The page of these pools, in the text format."""
    assert pools
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    return page_of(registry, TEXT)


@pytest.fixture(scope="module")
def open_page(pools: list[BlockPoolAllocator]) -> str:
    """The same in OpenMetrics."""
    assert pools
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    return page_of(registry, OPENMETRICS)


def findings(text: str | bytes, content_type: str = "") -> list[str]:
    """What is found, but for notes, as text."""
    body = text.encode() if isinstance(text, str) else text
    found = check_page(body, content_type).findings
    return [f"{one.level} {one.what}" for one in found if one.level != "note"]


# -- pages that are right -------------------------------------------------------------------------


def test_our_own_pages_are_right(page: str, open_page: str) -> None:
    """In both formats, with names that need every escape."""
    assert findings(page) == []
    assert findings(open_page) == []
    assert check_page(page.encode()).summary.startswith("text format, ")
    assert check_page(open_page.encode()).summary.startswith("OpenMetrics, ")


def test_series_of_others_are_passed_over() -> None:
    """A program's own registry may hold anything well-formed."""
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    Counter("requests", "Requests.", ["code"], registry=registry).labels("200").inc()
    Histogram("latency", "Seconds.", registry=registry).observe(0.1)
    for offer in (TEXT, OPENMETRICS):
        text = page_without_created(registry, offer)
        assert findings(text) == []
        assert "of others" in check_page(text.encode()).summary


def page_without_created(registry: CollectorRegistry, offer: object) -> str:
    """A page as prometheus-client writes it, with the `_created` series of its own metrics."""
    from veloxquant_exporters.prometheus.page import Offer, render

    assert isinstance(offer, Offer)
    return render(registry, offer).decode()


def test_a_real_sidecar_is_right(tmp_path: Path, capsys: Said) -> None:
    """One live worker, one that died before its time, by address; and the landing page is none."""
    folder = tmp_path / "snapshots"
    put(folder, a_file(process="gone"))
    with Worker(folder, "here"), Sidecar(folder) as sidecar:
        url = f"http://127.0.0.1:{sidecar.port}"
        sidecar.page_where(lambda page: page.up("here") == 1, "the worker is there")
        assert run(["check", f"{url}/metrics", "--watch", "0.1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("ok       text format, ")
        # Of the dead process, its counters stay and its gauges are gone: no problem by itself.
        (line,) = [line for line in lines if line.startswith("warning")]
        assert 'veloxquant_exporter_up{process="gone"} is 0: the process died' in line
        assert run(["check", url]) == 1
        assert "this is HTML" in capsys.readouterr().out
        assert run(["check", f"{url}/nothing"]) == 1
        assert "status 404" in capsys.readouterr().out


def test_the_benchmarks_page_is_right() -> None:
    """It has none of a pool's metrics, and need not."""
    text = "# HELP veloxquant_bench_cpu_seconds x\n# TYPE veloxquant_bench_cpu_seconds gauge\n"
    found = findings(text)
    assert not any("missing" in line for line in found), found


# -- pages that are wrong -------------------------------------------------------------------------

BROKEN = {
    "unknown": (rf"{P}owners_active", f"{P}owners_alive", "is no metric of the catalogue"),
    "missing": (rf"(?m)^.*{P}owners_active.*\n", "", "metrics are missing: " + P + "owners_active"),
    "type": (rf"TYPE {P}frees_total counter", f"TYPE {P}frees_total gauge", "and is a counter"),
    "no type": (rf"(?m)^# TYPE {P}frees_total.*\n", "", "has samples and no TYPE"),
    "label": (rf'{P}frees_total{{pool="chat"', f'{P}frees_total{{pond="chat"', "has the labels"),
    "stream": (r'stream="kv"', 'stream="q"', "has stream='q', known are k, v, kv"),
    "one pool less": (rf'(?m)^{P}reused_total{{pool="chat".*\n', "", "lacks " + P + "reused_total"),
    "negative": (rf'({P}frees_total{{pool="chat"}}) 2.0', r"\1 -2.0", "is below zero (-2)"),
    "nan": (rf'({P}fragmentation{{pool="chat"}}) \S+', r"\1 NaN", "is NaN"),
    "infinite": (rf'({P}blocks_in_use{{pool="chat"}}) \S+', r"\1 +Inf", "is infinite"),
    "ratio": (rf'({P}fragmentation{{pool="chat"}}) \S+', r"\1 1.5", "is a ratio of at most 1"),
    "up": (r"(veloxquant_exporter_up) 1.0", r"\1 3.0", "can be 0 or 1 only"),
    "free": (
        rf'({P}free_blocks{{pool="chat",stream="k"}}) \S+',
        r"\1 7.0",
        "pool 'chat': free + in use is",
    ),
    "streams": (
        rf'({P}blocks_in_use{{pool="chat"}}) \S+',
        r"\1 9.0",
        "pool 'chat': in use, summed over streams is 4, and in use is 9",
    ),
    "peak": (rf'({P}peak_blocks_in_use{{pool="chat"}}) \S+', r"\1 1.0", "above the peak, 1"),
    "slots": (
        rf'({P}token_slots_used{{pool="chat",stream="k"}}) \S+',
        r"\1 17.0",
        "stream k fills 17 token slots of 16",
    ),
    "violated": (
        rf'({P}invariant_violations_total{{check="owners",pool="chat"}}) \S+',
        r"\1 1.0",
        'check="owners",pool="chat"} is 1',
    ),
    "buckets": (
        rf'({P}request_blocks_bucket{{le="1.0",pool="chat"}}) \S+',
        r"\1 99.0",
        "its buckets fall from 99",
    ),
    "count": (
        rf'({P}request_blocks_count{{pool="chat"}}) \S+',
        r"\1 99.0",
        "and its count 99",
    ),
    "no inf": (
        rf'(?m)^{P}request_blocks_bucket{{le="\+Inf",pool="chat"}}.*\n',
        "",
        "no bucket le=+Inf",
    ),
    "twice": (rf'(?m)^({P}frees_total{{pool="chat"}}.*\n)', r"\1\1", "the same series as on line"),
    "type twice": (rf"(?m)^(# TYPE {P}frees_total.*\n)", r"\1\1", "a second TYPE of one metric"),
    "help twice": (rf"(?m)^(# HELP {P}frees_total.*\n)", r"\1\1", "a second HELP of one metric"),
    "bad type": (rf"TYPE {P}frees_total counter", f"TYPE {P}frees_total kounter", "does not have"),
    "type after": (
        rf'(?ms)^(# TYPE {P}frees_total[^\n]*\n)({P}frees_total{{pool="chat"}}[^\n]*\n)',
        r"\2\1",
        "TYPE below the samples that it is of",
    ),
    "no value": (rf'({P}frees_total{{pool="chat"}}) \S+', r"\1 many", "the value is no number"),
    "underscores": (rf'({P}frees_total{{pool="chat"}}) \S+', r"\1 1_0", "the value is no number"),
    "open label": (rf'({P}frees_total{{pool="chat)"}}', r"\1}", "labels are not as in"),
    "bad name": (rf"(?m)^{P}frees_total", "0frees_total", "no metric's name at the beginning"),
    "timestamp": (rf'({P}frees_total{{pool="chat"}} \S+)', r"\1 soon", "is no timestamp"),
    "exemplar": (
        rf'({P}frees_total{{pool="chat"}} \S+)',
        r'\1 # {a="b"} 1',
        "the text format has no exemplars",
    ),
    "carriage return": (rf'({P}frees_total{{pool="chat"}} \S+)', "\\1\r", "a carriage return"),
    "cut": (r"\n\Z", "", "the last line does not end"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_page_broken_in_one_way_is_told(how: str, page: str) -> None:
    """The finding names the fault, and the line or the series it is in."""
    pattern, replacement, expected = BROKEN[how]
    broken, n = re.subn(pattern, replacement, page)
    assert n, f"the page has nothing like {pattern}"
    found = findings(broken)
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    ("pattern", "replacement", "expected"),
    [
        ("# EOF\n$", "", "ends in '# EOF'"),
        ("(?m)^(# TYPE .*)$", r"\1\n", "no empty lines"),
        ("\\A", "# a word\n", "no comments but"),
        (rf'({P}frees_total{{pool="chat"}} \S+)', r"\1 # soon", "is no exemplar"),
    ],
)
def test_openmetrics_is_held_to_its_own_rules(
    open_page: str, pattern: str, replacement: str, expected: str
) -> None:
    """Those that the text format does not have."""
    broken, n = re.subn(pattern, replacement, open_page)
    assert n
    found = findings(broken, OPENMETRICS.content_type)
    assert any(expected in line for line in found), found


def test_an_openmetrics_page_without_its_end_is_taken_for_one(open_page: str) -> None:
    """Saved, so that nothing but the page tells its format: what is wrong is the end alone."""
    assert [line for line in findings(open_page.removesuffix("# EOF\n")) if "EOF" not in line] == []
    assert findings(open_page.removesuffix("# EOF\n")) != []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"<!DOCTYPE html><html>", "this is HTML"),
        (b'{"resourceMetrics": []}', "this is JSON"),
        (gzip.compress(b"x 1\n", mtime=0), "is compressed"),
        (b"x\0 1\n", "this is no text"),
        (b"x 1\n\xff 2\n", "is not UTF-8"),
        (b"# TYPE up gauge\nup 1\n", "not one metric of block pools"),
        (b"{" * 100_000, "this is JSON"),
        (b"x{" + b'a="b",' * 50_000 + b"\n", "a label stands twice"),
        (b'x{a="' + b"\\" * 100_001 + b'"} 1\n', "labels are not as in"),
        (b"x " + b"9" * 100_000 + b"e\n", "no number"),
    ],
)
def test_what_is_no_page_of_ours_is_told(body: bytes, expected: str) -> None:
    """Whatever it is, in one finding at least, and at once."""
    found = findings(body)
    assert any(expected in line for line in found), found


def test_of_many_faults_alike_a_few_are_shown() -> None:
    """And how many more there are."""
    lines = "".join(f"broken{n}\n" for n in range(1000))
    found = [line for line in findings(lines) if "neither a label nor a value" in line]
    assert len(found) == 6
    assert found[-1].startswith("problem 995 more like this")


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_no_bytes_raise(body: bytes) -> None:
    """Neither as text nor as OpenMetrics."""
    for content_type in ("", TEXT.content_type, OPENMETRICS.content_type):
        check_page(body, content_type)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_damage_to_a_real_page_raises(page: str, data: st.DataObject) -> None:
    """A few bytes of it cut out, doubled or replaced."""
    at = data.draw(st.integers(0, len(page)))
    n = data.draw(st.integers(0, 300))
    new = data.draw(
        st.sampled_from(["", page[at : at + n] * 2, '"', "{", "\n", "# ", " NaN ", "\\"])
    )
    check_page((page[:at] + new + page[at + n :]).encode())


# -- counters between two fetches -----------------------------------------------------------------


def test_a_counter_that_falls_is_told(page: str, open_page: str) -> None:
    """Between pages of the same and of different formats, buckets too; gauges may fall."""
    text, openm = (parse_page(page, openmetrics=False), parse_page(open_page, openmetrics=True))
    assert check_movement(openm, openm) == check_movement(text, text) == []
    assert check_movement(text, openm) == []  # the later one
    lower = page.replace(f'{P}frees_total{{pool="chat"}} 2.0', f'{P}frees_total{{pool="chat"}} 1.0')
    lower = re.sub(rf'({P}blocks_in_use{{pool="chat"}}) \S+', r"\1 0.0", lower)
    assert lower != page
    found = [one.what for one in check_movement(openm, parse_page(lower, openmetrics=False))]
    assert f'{P}frees_total{{pool="chat"}} fell from 2 to 1 between two fetches' in found
    assert not any("blocks_in_use" in what for what in found)
    (again,) = check_movement(parse_page("# TYPE a histogram\na_count 3\n", openmetrics=False),
                              parse_page("# TYPE a histogram\na_count 2\n", openmetrics=False))  # fmt: skip
    assert again.level == "problem"


# -- by address -----------------------------------------------------------------------------------


@contextmanager
def serving(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers GET as told; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_page_by_address_is_fetched_in_both_formats(pools: list[BlockPoolAllocator]) -> None:
    """And a third time, after the wait."""
    assert pools
    with start_http_server(0) as server:
        checked = check(f"{server.url}/metrics", watch_s=0.05)
    assert checked.ok, checked.findings
    assert checked.kind == "page"


def test_two_exporters_behind_one_address_are_told(page: str) -> None:
    """A balancer that gives one process and then the other: counters seem to fall."""
    fell = f'{P}frees_total{{pool="chat"}} fell from 2 to 1 between two fetches'
    pages = [
        page,
        page.replace(f'{P}frees_total{{pool="chat"}} 2.0', f'{P}frees_total{{pool="chat"}} 1.0'),
    ]

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", TEXT.content_type)
        request.end_headers()
        request.wfile.write(pages[0].encode())
        pages.reverse()

    with serving(answer) as url:
        checked = check(url)
    assert fell in [one.what for one in checked.findings]


@pytest.mark.parametrize(
    ("status", "expected"), [(401, "USER:PASSWORD"), (404, "/metrics"), (500, "its log"), (418, "")]
)
def test_a_refusal_is_told_with_what_to_do(status: int, expected: str) -> None:
    """By status."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.end_headers()
        request.wfile.write(b"no\x1b[31m way\nmore")

    with serving(answer) as url:
        (found,) = check(url).findings
    assert f"answers with status {status}: no\\x1b[31m way" in found.what
    assert expected in found.fix


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1/metrics", "nothing listens at http://127.0.0.1:1/metrics"),
        ("http://", "is no address"),
        ("http://host:port/", "is no address"),
        ("http://127.0.0.1:1/a b", "is no address"),
        ("https://user:secret@127.0.0.1:1/", "nothing listens at https://127.0.0.1:1/"),
    ],
)
def test_an_address_without_a_server_is_one_line(url: str, expected: str, capsys: Said) -> None:
    """Code 1; and no password in it."""
    assert run(["check", url]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert expected in line
    assert "secret" not in line


def test_what_lets_not_everybody_in(page: str, tmp_path: Path, capsys: Said) -> None:
    """A token from a file is sent with each fetch; a file that is none is told."""
    seen: list[str] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(request.headers.get("Authorization", ""))
        request.send_response(200 if seen[-1] == "Bearer secret" else 401)
        request.end_headers()
        request.wfile.write(page.encode())

    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving(answer) as url:
        assert run(["check", url]) == 1
        assert "--token-file" in capsys.readouterr().out
        assert run(["check", url, "--token-file", str(token)]) == 0
    assert seen == ["", "Bearer secret", "Bearer secret"]
    capsys.readouterr()
    for option in ("--token-file", "--tls-ca", "--tls-cert"):
        assert run(["check", "https://127.0.0.1:1/", option, str(tmp_path / "none")]) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert str(tmp_path / "none") in line
    assert run(["check", "https://127.0.0.1:1/", "--tls-key", "x"]) == 2


def test_a_page_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps no timeout of a socket from starting anew."""
    from veloxquant_exporters.check import page_address
    from veloxquant_exporters.fetch import Answer, fetch

    done = threading.Event()

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        while not done.wait(0.05):
            request.send_header("X-More", "x")
            request.flush_headers()

    def soon(url: str, **options: Any) -> Answer:
        return fetch(url, timeout_s=0.5, **options)

    monkeypatch.setattr(page_address, "fetch", soon)
    with serving(answer) as url:
        try:
            (found,) = check(url).findings
        finally:
            done.set()
    assert "does not answer within 0.5 s" in found.what


# -- other targets --------------------------------------------------------------------------------


def test_a_saved_page_is_checked(page: str, tmp_path: Path, capsys: Said) -> None:
    """From a file, and as JSON."""
    saved = tmp_path / "page.txt"
    saved.write_bytes(page.encode())
    assert run(["check", str(saved)]) == 0
    assert capsys.readouterr().out.startswith("ok       text format, ")
    saved.write_bytes(page.replace("# TYPE", "#TYPE", 1).encode())
    assert run(["check", str(saved), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["ok"]) == ("page", False)
    assert {"level", "what", "why", "fix"} == set(report["findings"][0])


@pytest.mark.parametrize("kind", ["fifo", "device", "socketless", "nul"])
def test_what_is_neither_file_nor_folder_is_not_opened(
    kind: str, tmp_path: Path, capsys: Said
) -> None:
    """It might wait for ever, or never end."""
    import os

    path = str(tmp_path / "thing")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = "/dev/zero"
    elif kind == "nul":
        path = "a\0b"
    assert run(["check", path]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "neither a file nor a folder" in line or "cannot be read" in line
