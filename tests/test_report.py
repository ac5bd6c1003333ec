"""`vqmon report`: what the page is made of, against plain recounting, and the page in a browser."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from select import select
from typing import Any

import pytest

pytest.importorskip("numpy", reason="numpy comes with the extra trace")
pytest.importorskip("msgpack", reason="msgpack comes with the extra trace")
pytest.importorskip("zstandard", reason="zstandard comes with the extra trace")
pytest.importorskip("bokeh", reason="bokeh comes with the extra report")
pytest.importorskip("rich", reason="rich comes with the extra cli")

import numpy as np

from veloxquant_exporters.report import figures, write_report
from veloxquant_exporters.report.figures import block_map
from veloxquant_exporters.report.holdings import Holdings, find_holdings
from veloxquant_exporters.report.latency import find_latency
from veloxquant_exporters.report.levels import find_hindsight, find_levels
from veloxquant_exporters.report.owners import find_owners
from veloxquant_exporters.report.page import make_page
from veloxquant_exporters.report.raster import rasterise
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, record, uninstrument
from veloxquant_mlx.telemetry.trace import Trace, load_trace

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = shutil.which("chromium")
SIZE = 16
HOSTILE = "</script><script>document.title='taken'</script>"


class Run:
    """A recorded run, and what was held at each moment of it, as a plain list."""

    def __init__(self, folder: Path, name: str = "drawn", seed: int = 3) -> None:
        self.pool = BlockPoolAllocator(PoolConfig(SIZE, 96, separate_kv=True))
        instrument(self.pool, name=name)
        self.now = self.pool._clock()
        self.pool._clock = lambda: self.now
        self.recorder = record(self.pool, capacity=4096, owners=True)
        self.moments: list[tuple[int, dict[str, set[int]]]] = []
        self._play(random.Random(seed))
        self.path = folder / "run.vqtrace"
        self.recorder.dump(self.path)
        self.recorder.stop()
        began_ns = load_trace(self.path).header.began_ns
        self.moments = [(now - began_ns, held) for now, held in self.moments]
        uninstrument(self.pool)

    def _play(self, rng: random.Random) -> None:
        for step in range(160):
            self.now += rng.choice([10**6, 10**7])
            self.pool._now = self.now  # the one-block path does not read the clock
            owner = f"request {step % 7}"
            try:
                if rng.random() < 0.25:
                    self.pool.free_all(owner)
                elif rng.random() < 0.5:
                    self.pool.allocate_kv(rng.choice([5, 16, 70]), owner)
                else:
                    self.pool.allocate("k", rng.choice([3, 16, 40]), owner)
            except BlockPoolExhaustedError:
                pass
            held = {
                name: {
                    block.block_id
                    for number in range(7)
                    for block in self.pool.blocks_for(f"request {number}")
                    if block.stream == name
                }
                for name in ("k", "v")
            }
            self.moments.append((self.now, held))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run for all."""
    return Run(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def trace(run: Run) -> Trace:
    """Its trace."""
    return load_trace(run.path)


@pytest.fixture(scope="module")
def holdings(trace: Trace) -> Holdings:
    """Its holdings."""
    return find_holdings(trace)


# -- what is counted -------------------------------------------------------------------------------


def test_holdings_are_what_was_held(run: Run, trace: Trace, holdings: Holdings) -> None:
    """At each moment the very blocks that the recorded pool held out; no two at one place."""
    assert holdings.disagreed == -1
    for at_ns, held in run.moments:
        now = (holdings.since_ns <= at_ns) & (holdings.until_ns > at_ns)
        if at_ns == trace.duration_ns:
            continue  # what is held at the end is held until then
        blocks = holdings.block[now].tolist()
        assert sorted(blocks) == sorted(held["k"] | held["v"])
        assert len(set(holdings.row[now].tolist())) == len(blocks)
    assert holdings.n_rows == len(set(holdings.block.tolist()))


def test_levels_are_what_was_in_use(run: Run, trace: Trace) -> None:
    """The end of a bin is the state then, its extreme no less than any state within it."""
    levels = find_levels(trace, bins=50)
    for name in ("k", "v"):
        for n, end in enumerate(levels.at_ns.tolist()):
            begin = int(levels.at_ns[n - 1]) if n else 0
            before = [held for at_ns, held in run.moments if at_ns <= end]
            within = [len(held[name]) for at_ns, held in run.moments if begin < at_ns <= end]
            assert levels.in_use[name][n] == (len(before[-1][name]) if before else 0)
            assert levels.most[name][n] >= max(within, default=0)


def test_owners_are_told_by_what_they_held(trace: Trace, holdings: Holdings) -> None:
    """Peak, beginning, end and block-seconds of each life, recounted."""
    owners = find_owners(trace, holdings)
    assert sorted(owners.number.tolist()) == sorted(set(holdings.owner.tolist()))
    assert list(owners.block_ns) == sorted(owners.block_ns, reverse=True)
    for n, number in enumerate(owners.number.tolist()):
        mine = holdings.owner == number
        since, until = holdings.since_ns[mine], holdings.until_ns[mine]
        assert owners.since_ns[n] == since.min() and owners.until_ns[n] == until.max()
        assert owners.block_ns[n] == (until - since).sum()
        most = max(int(((since <= at) & (until > at)).sum()) for at in since.tolist())
        assert owners.most[n] == most


def test_hindsight_never_fills_more_than_is_held(trace: Trace, holdings: Holdings) -> None:
    """Filled slots are some of those held; what is held is what the levels say."""
    at_ns, held, filled = find_hindsight(trace, holdings, bins=60)
    assert len(at_ns) == 60
    assert (filled <= held + 1e-6).all() and (filled >= -1e-6).all()
    levels = find_levels(trace, bins=60)
    in_use = (levels.in_use["k"] + levels.in_use["v"]) * SIZE
    assert held[:-1].tolist() == pytest.approx(in_use[:-1].tolist())


def test_cells_hold_what_their_blocks_hold(trace: Trace, holdings: Holdings) -> None:
    """Occupancy times cell is the block-time held, in all and wherever one looks."""
    raster = rasterise(holdings, trace.duration_ns, rows=7, columns=31)
    counts = np.bincount(np.arange(holdings.n_rows) * 7 // holdings.n_rows, minlength=7)
    painted = (raster.occupancy * counts[:, None]).sum() * trace.duration_ns / 31
    assert painted == pytest.approx((holdings.until_ns - holdings.since_ns).sum(), rel=1e-3)
    assert ((raster.owner >= 0) | (raster.occupancy < 1e-6)).all()


def test_latency_is_by_operation_and_power_of_two(trace: Trace) -> None:
    """Every timed call is in one row, and the quantiles are in order."""
    timed = find_latency(trace)
    assert sum(timing.n for timing in timed) == len(trace.samples.at_ns) > 0
    assert all(timing.p50_s <= timing.p99_s <= timing.most_s for timing in timed)


# -- the page --------------------------------------------------------------------------------------


class Addresses(HTMLParser):
    """What a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what is referred to."""
        self.found += [str(v) for k, v in attrs if k in ("src", "href", "data", "srcset")]


def test_the_page_needs_nothing_from_elsewhere(trace: Trace) -> None:
    """No address in any tag: it is read years later, from a ticket."""
    parser = Addresses()
    parser.feed(make_page(trace))
    assert parser.found == []


def in_browser(page: Path, script: str, *, width: int = 1260) -> Any:
    """What `script` returns in the page, in a real Chromium, and as a picture beside the page."""
    probe = page.with_name("probe.html")
    wait = (
        "<script>window.addEventListener('load', () => { const look = () => {"
        "const d = Bokeh.documents[0];"
        "if (!d || !d.is_idle) { setTimeout(look, 50); return };"
        f"const r = (() => {{ {script} }})();"
        "const o = document.createElement('pre'); o.id = 'result';"
        "o.textContent = JSON.stringify(r); document.body.append(o) }; look() })</script></body>"
    )
    probe.write_text(page.read_text("utf-8").replace("</body>", wait), "utf-8")
    assert CHROMIUM is not None
    told = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1800",
         "--virtual-time-budget=20000", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
        env={**os.environ, "HOME": str(page.parent)},
    )  # fmt: skip
    found = re.search(r'<pre id="result">(.*?)</pre>', told.stdout, re.DOTALL)
    assert found is not None, told.stdout[-500:] + told.stderr[-500:]
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.timeout(180)
def test_the_page_draws_zooms_and_heeds_keys(run: Run, tmp_path: Path) -> None:
    """All figures are drawn, keys move the one axis of time, and never out of the trace."""
    page = tmp_path / "report.html"
    write_report(load_trace(run.path), page)
    result = in_browser(
        page,
        """
        const range = Bokeh.documents[0].get_model_by_name("time")
        const press = key => { document.dispatchEvent(new KeyboardEvent("keydown", {key}))
                               return [range.start, range.end] }
        const all = [range.start, range.end]
        return {
          canvases: document.querySelectorAll(".plot").length,
          drawn: Bokeh.documents[0].roots().length,
          all, zoomed: press("+"), moved: press("ArrowRight"), left: press("Home"),
          right: press("End"), back: press("0"),
        }
        """,
    )
    assert result["canvases"] == result["drawn"] == 6
    low, high = result["all"]
    span = high - low
    zoomed, moved = result["zoomed"], result["moved"]
    assert zoomed[1] - zoomed[0] == pytest.approx(span / 2)
    assert moved[0] == pytest.approx(zoomed[0] + span * 0.1)
    assert result["left"][0] == pytest.approx(low) and result["right"][1] == pytest.approx(high)
    assert result["back"] == pytest.approx([low, high])


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("width", [1000, 1600])
def test_the_figures_are_as_wide_as_the_page(tmp_path: Path, width: int) -> None:
    """None is cut off, and their times line up, also where slots are counted by the million."""
    pool = BlockPoolAllocator(PoolConfig(4096, 1024))
    instrument(pool, name=f"wide-{width}")
    recorder = record(pool, capacity=256)
    pool.allocate_kv(4096 * 500, "a")
    pool.free_all("a")
    recorder.dump(tmp_path / "wide.vqtrace")
    recorder.stop()
    uninstrument(pool)
    write_report(load_trace(tmp_path / "wide.vqtrace"), tmp_path / "wide.html")
    roots = "return Bokeh.documents[0].roots().map(r => [r.outer_width, r.inner_width])"
    sizes = in_browser(tmp_path / "wide.html", roots, width=width)
    assert len(sizes) >= 4 and all(outer > width * 0.9 for outer, _ in sizes)
    assert all(outer <= width for outer, _ in sizes) and len({inner for _, inner in sizes}) == 1


def test_wrong_books_are_looked_at_all_the_same(tmp_path: Path) -> None:
    """A dump after a violation is what a report is needed for most: what can be told is."""
    pool = BlockPoolAllocator(PoolConfig(SIZE, 64))
    instrument(pool, name="wrong-books")
    recorder = record(pool, capacity=256)
    pool.allocate("k", 48, "a")
    pool._streams[0].managed += 3
    recorder.dump(tmp_path / "wrong.vqtrace")
    pool._streams[0].managed -= 3
    recorder.stop()
    uninstrument(pool)
    trace = load_trace(tmp_path / "wrong.vqtrace")
    assert not trace.consistent
    page = make_page(trace)
    assert "The books do not add up" in page
    assert 'id="levels"' in page and 'id="map"' not in page and "Top holders" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.timeout(180)
def test_names_are_text_and_never_code(tmp_path: Path) -> None:
    """A pool and owners called like the end of a script element do nothing."""
    run = Run(tmp_path, name=HOSTILE[:128])
    trace = load_trace(run.path)
    page = tmp_path / "report.html"
    write_report(trace, page)
    assert HOSTILE not in page.read_text("utf-8")
    result = in_browser(page, "return [document.title, document.querySelector('h1').textContent]")
    assert result[0].endswith("block pool trace") and HOSTILE in result[1]


def test_many_holdings_become_an_image(
    trace: Trace, holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit the map is one image of bounded size, and says so."""
    monkeypatch.setattr(block_map, "MAX_DRAWN", 10)
    drawn = figures.map_figure(trace, holdings, figures.time_range(trace))
    assert "strength" in drawn.title.text
    (image,) = drawn.renderers
    assert image.data_source.data["image"][0].size <= 240 * 900


# -- the command -----------------------------------------------------------------------------------


def vqmon(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "exporters")])
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "veloxquant_exporters.cli", "report", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


def test_the_command_writes_the_page(run: Run, tmp_path: Path) -> None:
    """Where it is asked to, whole, with nothing beside it."""
    target = tmp_path / "out.html"
    ran = vqmon(str(run.path), "-o", str(target))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert target.read_text("utf-8").rstrip().endswith("</html>")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_what_is_no_file_is_written_to_and_not_replaced(trace: Trace, tmp_path: Path) -> None:
    """`-o /dev/stdout` of somebody who may replace devices; a link leads to its file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write_report, trace, pipe)
        read = b""
        while not writing.done() or select([reader], [], [], 0)[0]:
            if select([reader], [], [], 0.05)[0]:
                some = os.read(reader, 1 << 20)
                read += some
                if not some and writing.done():
                    break
    os.close(reader)
    assert pipe.is_fifo() and read.rstrip().endswith(b"</html>")
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    write_report(trace, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").stat().st_size > 1000


def test_an_empty_trace_has_a_page_too(tmp_path: Path) -> None:
    """A pool that did nothing yet."""
    pool = BlockPoolAllocator(PoolConfig(SIZE, 8))
    instrument(pool, name="idle-report")
    recorder = record(pool, capacity=256)
    recorder.dump(tmp_path / "idle.vqtrace")
    recorder.stop()
    uninstrument(pool)
    ran = vqmon(str(tmp_path / "idle.vqtrace"))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "idle.html").stat().st_size > 1000
    ran = vqmon(str(tmp_path / "idle.vqtrace"), "--json")
    assert json.loads(ran.stdout)["output"] == str(tmp_path / "idle.html")


def test_wrong_usage_is_one_line(run: Run, tmp_path: Path) -> None:
    """No trace, no folder, the trace itself as the target: told, and nothing is written."""
    text = tmp_path / "notes.txt"
    text.write_text("not a trace")
    before = run.path.read_bytes()
    for args, code in (
        ((str(text),), 1),
        ((".",), 1),
        ((str(run.path), "-o", str(tmp_path / "no" / "x.html")), 1),
        ((str(run.path), "-o", str(run.path)), 2),
    ):
        ran = vqmon(*args)
        assert ran.returncode == code and "Traceback" not in ran.stderr and ran.stderr
    assert run.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
