"""`vqmon demo`: the traffic on a real model, the screen, and whole runs of the command."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click", reason="click comes with the extra cli")
pytest.importorskip("rich", reason="rich comes with the extra cli")
pytest.importorskip("prometheus_client", reason="prometheus-client comes with the extra prometheus")
pytest.importorskip("mlx.core", reason="the demo generates with MLX")

from click import ClickException, UsageError
from rich.console import Console

from veloxquant_exporters.demo import Settings, session
from veloxquant_exporters.demo.figures import read_figures
from veloxquant_exporters.demo.model import DemoModel, load_model, tiny_llama
from veloxquant_exporters.demo.plain import line_of, print_summary
from veloxquant_exporters.demo.screen import Frame
from veloxquant_exporters.demo.session import pool_config
from veloxquant_exporters.demo.stop import Stop
from veloxquant_exporters.demo.table import render
from veloxquant_exporters.demo.traffic import Traffic
from veloxquant_exporters.demo.workload import LONGEST, Plan, plan_requests, prompt_tokens
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import Probe, instrument, uninstrument

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 3  # of the tiny Llama
ONE_STEP = 2 * LAYERS * 16  # blocks of a request of up to 256 tokens
# By contract, with the label `pool`.
NAMES = (
    "blocks_in_use",
    "blocks_total",
    "fragmentation",
    "peak_blocks_in_use",
    "allocations_total",
    "frees_total",
    "reused_total",
    "exhausted_total",
    "grown_total",
    "retired_total",
)


@pytest.fixture(scope="module")
def model() -> DemoModel:
    """The tiny Llama."""
    return tiny_llama(seed=1)


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """Room for three requests of up to 256 tokens; watched as "demo"."""
    made = BlockPoolAllocator(PoolConfig(n_blocks=3 * ONE_STEP))
    instrument(made, name="demo")
    yield made
    uninstrument(made)


@pytest.fixture
def probe(pool: BlockPoolAllocator) -> Probe:
    """What watches the pool."""
    return instrument(pool)


# -- the traffic -----------------------------------------------------------------------------------


def test_a_seed_gives_the_same_requests_every_time() -> None:
    """Lengths and prompts depend on seed and number alone, and other seeds give others."""
    plans = plan_requests(7, 1, 100)
    assert plans[40:] == plan_requests(7, 41, 60)
    assert plans != plan_requests(8, 1, 100)
    assert [plan.number for plan in plans] == list(range(1, 101))
    assert prompt_tokens(7, plans[3], 512) == prompt_tokens(7, plans[3], 512)
    assert prompt_tokens(7, plans[3], 512) != prompt_tokens(8, plans[3], 512)


def test_requests_are_mixed_and_bounded() -> None:
    """Short and long prompts and outputs all occur, and none exceeds what a pool is sized for."""
    plans = plan_requests(0, 1, 300)
    prompts = [plan.n_prompt for plan in plans]
    outputs = [plan.n_output for plan in plans]
    assert (min(prompts) < 50, max(prompts) > 500) == (True, True)
    assert (min(outputs) < 20, max(outputs) > 150) == (True, True)
    assert max(plan.n_prompt + plan.n_output for plan in plans) <= LONGEST
    tokens = prompt_tokens(0, plans[0], 9)
    assert len(tokens) == plans[0].n_prompt
    assert set(tokens) <= set(range(1, 9))


def served(traffic: Traffic) -> list[int]:
    """Serve until all is done; requests that were being generated at each step."""
    sizes: list[int] = []
    while traffic.busy:
        assert len(sizes) < 5000, "the traffic comes to no end"
        traffic.advance()
        sizes.append(len(traffic.progress().active))
    return sizes


def test_requests_are_generated_side_by_side_and_all_served(
    model: DemoModel, pool: BlockPoolAllocator
) -> None:
    """Every token that was asked for is generated, three requests at a time, none refused."""
    traffic = Traffic(model, pool, n_at_once=3)
    plans = [Plan(n, 5 * n, 4 + n) for n in range(1, 8)]
    traffic.add(plans)
    assert max(served(traffic)) == 3
    done = traffic.progress()
    assert (done.served, done.waiting, done.refused, done.active) == (7, 0, 0, ())
    assert done.output_tokens == traffic.n_output == sum(plan.n_output for plan in plans)
    assert done.prompt_tokens == sum(plan.n_prompt for plan in plans)
    assert pool.stats.n_exhausted == 0
    assert pool.stats.blocks_in_use() == 0


def test_a_request_that_does_not_fit_waits_and_is_served(
    model: DemoModel, pool: BlockPoolAllocator
) -> None:
    """Five at once where three fit, one of which outgrows its room: refused, and served later."""
    traffic = Traffic(model, pool, n_at_once=5)
    plans = [Plan(1, 250, 12), *(Plan(n, 30, 12) for n in range(2, 8))]
    traffic.add(plans)
    refused = 0
    while traffic.busy:
        traffic.advance()
        refused = max(refused, traffic.progress().refused)
    assert refused >= 2
    assert pool.stats.n_exhausted >= 2
    assert traffic.progress().served == 7
    assert traffic.progress().output_tokens > sum(plan.n_output for plan in plans)  # started anew
    assert pool.stats.blocks_in_use() == 0


def test_after_a_refusal_nobody_is_let_in_before_somebody_ends(
    model: DemoModel, pool: BlockPoolAllocator
) -> None:
    """Without that a full pool would be asked at each token, and count thousands of refusals."""
    traffic = Traffic(model, pool, n_at_once=8)
    traffic.add(Plan(n, 20, 40) for n in range(1, 10))
    served(traffic)
    assert traffic.progress().served == 9
    assert 1 <= pool.stats.n_exhausted <= 9


def test_a_request_that_can_never_fit_is_an_error(
    model: DemoModel, pool: BlockPoolAllocator
) -> None:
    """Alone and refused: waiting would not end."""
    traffic = Traffic(model, pool, n_at_once=2)
    traffic.add([Plan(1, 800, 2)])
    with pytest.raises(BlockPoolExhaustedError):
        served(traffic)
    assert pool.stats.blocks_in_use() == 0


def test_closing_gives_everything_back(model: DemoModel, pool: BlockPoolAllocator) -> None:
    """Requests that are cut off in the middle leave no block behind."""
    traffic = Traffic(model, pool, n_at_once=3)
    traffic.add(Plan(n, 20, 40) for n in range(1, 6))
    for _ in range(10):
        traffic.advance()
    assert pool.stats.blocks_in_use() == 3 * ONE_STEP
    traffic.close()
    assert not traffic.busy
    assert pool.stats.blocks_in_use() == 0


def test_a_long_prompt_is_read_in_parts_and_can_be_cut_off(
    model: DemoModel, pool: BlockPoolAllocator
) -> None:
    """Between two parts the caller gets a turn: to show how far it is, or to end it."""
    read: list[int] = []

    def pulse() -> None:
        read.extend(view.n_read for view in traffic.progress().active)
        if 128 in read:
            raise InterruptedError

    traffic = Traffic(model, pool, n_at_once=1, pulse=pulse)
    traffic.add([Plan(1, 500, 1)])
    with pytest.raises(InterruptedError):
        traffic.advance()
    assert read == [0, 64, 128]
    assert traffic.progress().prompt_tokens == 128
    traffic.close()
    assert pool.stats.blocks_in_use() == 0


# -- the pool's size and the model -----------------------------------------------------------------


def test_the_default_pool_has_room_for_2048_tokens() -> None:
    """Of all layers, keys and values, whatever the block size."""
    for size in (1, 16, 100, 4096):
        config = pool_config(Settings(block_size=size), LAYERS)
        assert (config.block_size, config.separate_kv) == (size, True)
        assert config.n_blocks == 2 * LAYERS * -(-2048 // size)
    assert pool_config(Settings(step=4096), LAYERS).n_blocks == 2 * LAYERS * 4096 // 16


def test_a_pool_that_cannot_serve_the_longest_request_is_refused() -> None:
    """The message says how many blocks would do, and so many do."""
    with pytest.raises(UsageError, match=r"--blocks 10 is too few: .* need (\d+) ") as caught:
        pool_config(Settings(n_blocks=10), LAYERS)
    found = re.search(r"need (\d+)", str(caught.value))
    assert found
    enough = int(found[1])
    assert enough == 2 * LAYERS * -(-LONGEST // 256) * 16
    assert pool_config(Settings(n_blocks=enough), LAYERS).n_blocks == enough
    with pytest.raises(UsageError):
        pool_config(Settings(n_blocks=enough - 1), LAYERS)


def test_the_smallest_pool_serves_the_longest_request(model: DemoModel) -> None:
    """What the size is reckoned from is what the caches really take."""
    needed = 2 * LAYERS * -(-LONGEST // 32) * 2
    pool = BlockPoolAllocator(pool_config(Settings(step=32, n_blocks=needed), LAYERS))
    traffic = Traffic(model, pool, n_at_once=2, step=32)
    traffic.add([Plan(1, LONGEST - 40, 40)])
    served(traffic)
    assert pool.stats.n_exhausted == 0
    assert pool.stats.peak_blocks_in_use == needed


@pytest.mark.parametrize("name", ["./nope", "/nope/at/all", "nope", "~/nope", "a/b/c"])
def test_a_folder_without_a_model_is_told_in_one_line(name: str) -> None:
    """No hub is asked for what looks like a path."""
    with pytest.raises(ClickException, match=r"^no model in .*config\.json[^\n]*$"):
        load_model(name)


def test_a_folder_with_a_broken_model_is_told_in_one_line(tmp_path: Path) -> None:
    """What mlx-lm says about it is passed on."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ClickException, match=r"^cannot load the model [^\n]+: [^\n]+$"):
        load_model(str(tmp_path))


@pytest.mark.timeout(200)
def test_a_real_model_is_served() -> None:
    """Its layers, vocabulary and name are found, and its cache is charged."""
    folder = os.environ.get("VELOXQUANT_TEST_MODEL")
    if not folder:
        pytest.skip("VELOXQUANT_TEST_MODEL names no folder with a model that mlx_lm.load takes")
    loaded = load_model(folder)
    assert loaded.title == Path(folder).name
    pool = BlockPoolAllocator(pool_config(Settings(), loaded.n_layers))
    traffic = Traffic(loaded, pool, n_at_once=2)
    traffic.add([Plan(1, 20, 3), Plan(2, 4, 3)])
    served(traffic)
    assert pool.stats.peak_blocks_in_use == 2 * 2 * loaded.n_layers * 16
    assert pool.stats.blocks_in_use() == 0


# -- what is shown ---------------------------------------------------------------------------------


@pytest.fixture
def frame(model: DemoModel, pool: BlockPoolAllocator, probe: Probe) -> Iterator[Frame]:
    """A frame in the middle of real traffic, with requests being generated and one refused."""
    traffic = Traffic(model, pool, n_at_once=5)
    traffic.add(Plan(n, 20 * n, 30) for n in range(1, 9))
    for _ in range(40):
        traffic.advance()
    yield Frame(
        title=model.title,
        note=model.note,
        url="http://127.0.0.1:65535/metrics",
        block_size=16,
        once=True,
        round=1,
        n_requests=8,
        elapsed_s=3.0,
        rate=13.3,
        progress=traffic.progress(),
        figures=read_figures(probe),
    )
    traffic.close()


def test_the_figures_are_those_of_the_pool(frame: Frame, pool: BlockPoolAllocator) -> None:
    """Blocks, streams, exhaustions, and the token slots that really hold a token."""
    figures, active = frame.figures, frame.progress.active
    assert figures.in_use == pool.stats.blocks_in_use() == sum(view.n_blocks for view in active)
    assert figures.free == {"k": pool.n_free("k"), "v": pool.n_free("v")}
    assert figures.exhausted == pool.stats.n_exhausted > 0
    assert figures.slots_allocated == 16 * figures.in_use
    # Of a request's newest token the cache may hold the keys already: one more, or not.
    tokens = sum(view.plan.n_prompt + view.n_done for view in active)
    assert 0 <= 2 * LAYERS * tokens - figures.slots_used <= 2 * LAYERS * len(active)
    assert 0 < figures.fill < 1
    assert figures.usage == figures.in_use / (3 * ONE_STEP)
    assert 0 < figures.mlx_active_bytes <= figures.mlx_peak_bytes


def drawn(frame: Frame, width: int, height: int, **options: Any) -> str:
    """The table as a terminal of this size gets it."""
    console = Console(
        width=width, height=height, force_terminal=True, _environ={"TERM": "xterm"}, **options
    )
    past = [0.0, 0.5, 1.0] * 50
    with console.capture() as capture:
        console.print(render(frame, past, min(width, 110), height))
    return capture.get()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("n_active", [0, 3, 64])
def test_the_table_fits_the_terminal(frame: Frame, width: int, height: int, n_active: int) -> None:
    """No line wraps and none is pushed off the screen, however many requests there are."""
    (view, *_) = frame.progress.active
    progress = replace(frame.progress, active=(view,) * n_active)
    text = drawn(replace(frame, progress=progress), width, height, no_color=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    shown = "\n".join(lines)
    wanted = [frame.title, frame.note, frame.url, "of 288", "exhausted", "MLX", "Ctrl-C"]
    wanted += [f"{frame.progress.served}/8", f"k {frame.figures.free['k']}"]
    assert [text for text in wanted if text not in shown] == []


def test_no_color_means_no_color(frame: Frame) -> None:
    """NO_COLOR leaves bold and dim, and takes every colour."""
    colour = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|4[0-7]|9[0-7]|38;|48;)")
    assert colour.search(drawn(frame, 80, 24, color_system="256"))
    assert not colour.search(drawn(frame, 80, 24, no_color=True, color_system="256"))


def test_a_plain_line_says_it_all(frame: Frame) -> None:
    """One line of name=value with the same figures."""
    line = line_of(frame)
    figures = frame.figures
    assert "\n" not in line
    assert line.isprintable()
    for part in (
        f"served={frame.served}/8",
        f"blocks={figures.in_use}/288",
        f"free=k:{figures.free['k']},v:{figures.free['v']}",
        f"fill={figures.fill:.0%}",
        f"exhausted={figures.exhausted}",
    ):
        assert part in line.split()


def test_the_summary_counts_what_was_cut_off(
    frame: Frame, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who ends the demo early is told what was not served."""
    print_summary(frame, mean_fill=0.5)
    said = capsys.readouterr().out
    assert f"{8 - frame.served} not finished" in said
    assert "50% of the token slots" in said


def test_rounds_follow_each_other_until_stopped(
    model: DemoModel, pool: BlockPoolAllocator, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --once a round of new requests begins when the last one is served."""
    monkeypatch.setattr(session, "REST_S", 0.0)
    endless = session._Session(Settings(n_requests=2, seed=3), model, pool, probe, "")
    while endless._look().round < 3:
        assert endless._turn()
    assert endless._look().served == 0
    assert endless._traffic.progress().served == 4
    endless._traffic.close()
    once = session._Session(Settings(n_requests=1, once=True), model, pool, probe, "")
    while once._turn():
        pass
    assert (once._look().round, once._look().served) == (1, 1)


def test_a_second_signal_acts_as_usual() -> None:
    """The first Ctrl-C is noted; one who presses it again is not made to wait."""
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# -- whole runs ------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """The environment of a run: this checkout, no hub, no colours forced by the caller."""
    kept = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "exporters")])
    return kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | more


def command(*args: str) -> list[str]:
    """The command line of a run."""
    return [sys.executable, "-W", "error", "-m", "veloxquant_exporters.cli", "demo", *args]


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, env=environment(), check=False
    )


@contextlib.contextmanager
def running(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run that serves its metrics, and their address."""
    process = subprocess.Popen(
        command(*args, "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, _address(iter(process.stdout.readline, ""))
        finally:
            process.kill()


def _address(lines: Iterator[str]) -> str:
    for line in lines:
        if line.startswith("metrics: "):
            return line.split()[1]
    raise AssertionError("the run said no address")


def scraped(url: str) -> dict[str, float]:
    """The samples of the pool, by the part of their names that is their own."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as page:
        text = page.read().decode()
    found = re.findall(r'^veloxquant_block_pool_(\w+)\{pool="demo"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.timeout(100)
def test_once_serves_its_requests_its_metrics_and_ends() -> None:
    """Scraped while it runs: ten names, true figures, rising counters; then a summary and 0."""
    with running("--once", "--requests", "10") as (process, url):
        pages: list[dict[str, float]] = []
        with contextlib.suppress(OSError):  # it ended
            while sum(page.get("blocks_in_use", 0) > 0 for page in pages) < 20:
                pages.append(scraped(url))
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert re.search(r"^requests +10 served in [\d.]+ s$", out, re.MULTILINE)
    assert re.search(r"^blocks +.* 0 still in use$", out, re.MULTILINE)
    busy = [page for page in pages if page.get("blocks_in_use")]
    assert busy
    for page in busy:
        assert set(NAMES) <= set(page)
        assert page["blocks_in_use"] == page["allocations_total"] - page["frees_total"]
        assert page["blocks_in_use"] <= page["peak_blocks_in_use"] <= page["blocks_total"] == 768
    counters = [name for name in NAMES if name.endswith("_total") and name != "blocks_total"]
    for before, after in itertools.pairwise(busy):
        assert [name for name in counters if after[name] < before[name]] == []


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("options", "number", "code"),
    [((), signal.SIGINT, 0), (("--once",), signal.SIGINT, 130), (("--once",), signal.SIGTERM, 143)],
)
def test_a_signal_ends_it_with_a_summary(
    options: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    """Ctrl-C is how one ends the endless demo, so that is no failure; --once was not done."""
    with running(*options, "--requests", "500") as (process, url):
        while scraped(url).get("allocations_total", 0) < 500:
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, err) == (code, "")
    assert re.search(r"^requests +\d+ served in .* not finished$", out, re.MULTILINE)
    assert "0 still in use" in out


@pytest.mark.timeout(60)
def test_ctrl_c_while_mlx_loads_ends_it() -> None:
    """Raised in what MLX calls as it loads, it would abort the process, or pass as a failed import."""
    # It sets names of enumerations as it loads, where a signal strikes at times: here, always.
    code = (
        "import enum, signal, sys\n"
        "before = enum.EnumType.__setattr__\n"
        "def struck(cls, name, value):\n"
        "    if 'mlx' in sys.modules:\n"
        "        enum.EnumType.__setattr__ = before\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    before(cls, name, value)\n"
        "enum.EnumType.__setattr__ = struck\n"
        "from veloxquant_exporters.cli import main\n"
        "main(['demo', '--once', '--port', '0', '--requests', '2'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


def test_a_taken_port_is_told_in_one_line() -> None:
    """And is told before a model is made."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = demo("--once", "--port", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: port {port} of 127.0.0.1 is taken")


@pytest.mark.parametrize("name", ["./no/such/folder", "nobody-here/no-such-model"])
def test_a_model_that_is_not_there_is_told_in_one_line(name: str) -> None:
    """A folder or a hub id: one line that names it, and no traceback."""
    done = demo("--once", "--port", "0", "--model", name)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert name in line


def test_too_few_blocks_are_told_in_one_line() -> None:
    """As wrong usage."""
    done = demo("--once", "--port", "0", "--blocks", "10")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("Error: --blocks 10 is too few: ")


@pytest.mark.timeout(100)
def test_on_a_terminal_the_table_is_live_and_leaves_a_summary() -> None:
    """A pseudo terminal of 80 x 24 without colours: redrawn in place, cursor shown again at the end."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        command("--once", "--port", "0", "--requests", "4"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(TERM="xterm-256color", NO_COLOR="1"),
    )
    os.close(follower)
    shown = bytearray()
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while chunk := os.read(leader, 65536):
            shown += chunk
    os.close(leader)
    assert process.wait() == 0
    text = shown.decode()
    assert "requests being generated" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert not re.search(r"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|38;)", text)
    assert re.search(r"requests +4 served in [\d.]+ s", text.rpartition("\x1b[?25h")[2])
