"""`vqmon simulate`: against really running the other configuration, and its table and advice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("numpy", reason="numpy comes with the extra trace")
pytest.importorskip("msgpack", reason="msgpack comes with the extra trace")
pytest.importorskip("zstandard", reason="zstandard comes with the extra trace")
pytest.importorskip("rich", reason="rich comes with the extra cli")

from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant_exporters.simulate import Grid, GridError, Result, advise, simulate, simulate_all
from veloxquant_exporters.simulate.grid import MAX_CONFIGS
from veloxquant_mlx.core.exceptions import BlockPoolExhaustedError
from veloxquant_mlx.memory import Block, BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, record, uninstrument
from veloxquant_mlx.telemetry.snapshot_json import pool_from_dict
from veloxquant_mlx.telemetry.trace import Trace, TraceError, load_trace

ROOT = Path(__file__).resolve().parent.parent
ROOMY = PoolConfig(block_size=16, n_blocks=4096)


def serve(pool: BlockPoolAllocator, seed: int, n_steps: int = 300) -> Seen:
    """Requests that grow in steps and end; one that finds no room is over. Same seed, same asks."""
    rng = random.Random(seed)
    seen = Seen()
    live: list[int] = []
    over: set[int] = set()
    for step in range(n_steps):
        if not live or rng.random() < 0.3:
            live.append(step)
        owner, n_tokens = rng.choice(live), rng.choice([1, 5, 16, 40, 100])
        both, ends = rng.random() < 0.5, rng.random() < 0.25
        if owner not in over:
            try:
                if both:
                    pool.allocate_kv(n_tokens, owner)
                else:
                    pool.allocate("k", n_tokens, owner)
            except BlockPoolExhaustedError:
                seen.n_exhausted += 1
                over.add(owner)
                pool.free_all(owner)
        seen.peak_slots = max(seen.peak_slots, pool.stats.blocks_in_use() * pool.config.block_size)
        if ends:
            live.remove(owner)
            pool.free_all(owner)
    seen.n_rejected = len(over)
    return seen


class Seen:
    """What a real run came to."""

    n_exhausted = 0
    n_rejected = 0
    peak_slots = 0


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Record a run of `serve`, and give the trace's path."""
    pools: list[BlockPoolAllocator] = []

    def make(config: PoolConfig = ROOMY, seed: int = 1, n_steps: int = 300) -> Path:
        pool = BlockPoolAllocator(config)
        pools.append(pool)
        instrument(pool, name=f"simulated-{id(pool)}")
        recorder = record(pool, capacity=1 << 16)
        serve(pool, seed, n_steps)
        path = tmp_path / f"run-{seed}.vqtrace"
        recorder.dump(path)
        recorder.stop()
        return path

    yield make
    for pool in pools:
        uninstrument(pool)


configs = st.builds(
    PoolConfig,
    block_size=st.sampled_from([1, 4, 8, 16, 17, 64]),
    n_blocks=st.integers(0, 400),
    separate_kv=st.booleans(),
    grow_on_exhaustion=st.booleans(),
    max_blocks=st.none() | st.integers(0, 600),
)


# -- against the real thing ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trace]:
    """Recorded runs by seed, of a pool where nothing was refused."""
    folder = tmp_path_factory.mktemp("traces")
    made = {}
    for seed in range(4):
        pool = BlockPoolAllocator(ROOMY)
        instrument(pool, name=f"roomy-{seed}-{os.getpid()}")
        recorder = record(pool, capacity=1 << 16)
        serve(pool, seed)
        recorder.dump(folder / f"{seed}.vqtrace")
        recorder.stop()
        uninstrument(pool)
        made[seed] = load_trace(folder / f"{seed}.vqtrace")
    return made


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 3), config=configs)
def test_simulating_is_what_really_running_gives(
    traces: dict[int, Trace], seed: int, config: PoolConfig
) -> None:
    """Peaks, growth and refusals of any configuration, from a trace of another."""
    pool = BlockPoolAllocator(config)
    real = serve(pool, seed)
    result = simulate(traces[seed], config)
    stats = pool.stats.snapshot()
    assert result.peak_blocks == stats.peak_blocks_in_use
    assert result.grown_blocks == stats.n_grown
    assert result.final_blocks == stats.n_blocks
    assert result.n_exhausted == real.n_exhausted == stats.n_exhausted
    assert result.n_rejected == real.n_rejected
    assert (result.first_exhausted_ns is None) is (real.n_exhausted == 0)
    assert max(result.occupancy) <= result.peak_slots
    assert max(result.occupancy) == real.peak_slots or real.n_exhausted


def planned(seed: int, n_steps: int = 120) -> list[tuple[str, int, int, str]]:
    """What requests ask for, whatever comes of it: growth in two formats, steps back, ends."""
    rng = random.Random(seed)
    n_parts: dict[int, int] = {}
    plan: list[tuple[str, int, int, str]] = []
    for step in range(n_steps):
        if not n_parts or rng.random() < 0.3:
            n_parts[step] = 0
        owner = rng.choice(list(n_parts))
        if rng.random() < 0.7:
            size, fmt = rng.choice([1, 5, 16, 40, 100]), rng.choice(["fp16", "int8"])
            plan.append((rng.choice(["k", "v", "kv", "kv"]), owner, size, fmt))
            n_parts[owner] += 1
        elif n_parts[owner] > 1:
            plan.append(("back", owner, 0, ""))
            n_parts[owner] -= 1
        if rng.random() < 0.2:
            plan.append(("end", owner, 0, ""))
            del n_parts[owner]
    return plan


def carry_out(pool: BlockPoolAllocator, plan: list[tuple[str, int, int, str]]) -> Seen:
    """Do it; a request that finds no room is over."""
    seen = Seen()
    over: set[int] = set()
    parts: dict[int, list[list[Block]]] = {}
    for what, owner, n_tokens, fmt in plan:
        if owner in over:
            continue
        mine = parts.setdefault(owner, [])
        try:
            if what == "back":
                pool.free(mine.pop())
            elif what == "end":
                pool.free_all(owner)
            elif what == "kv":
                keys, values = pool.allocate_kv(n_tokens, owner, fmt)
                mine.append([*keys, *values])
            else:
                mine.append(pool.allocate(what, n_tokens, owner, fmt))
        except BlockPoolExhaustedError:
            seen.n_exhausted += 1
            over.add(owner)
            pool.free_all(owner)
    seen.n_rejected = len(over)
    return seen


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    n_blocks=st.integers(0, 200),
    separate=st.booleans(),
    limit=st.sampled_from([0, 100, 250, None]),
)
def test_steps_back_and_formats_are_what_really_running_gives(
    seed: int, n_blocks: int, separate: bool, limit: int | None
) -> None:
    """Blocks freed singly, two formats, and growth to a limit, also of one stream made of two."""
    plan = planned(seed)
    roomy = BlockPoolAllocator(ROOMY)
    instrument(roomy, name="planned")
    recorder = record(roomy, capacity=1 << 14)
    carry_out(roomy, plan)
    with TemporaryDirectory() as folder:
        trace = load_trace(recorder.dump(Path(folder) / "t.vqtrace"))
    recorder.stop()
    uninstrument(roomy)
    config = PoolConfig(16, n_blocks, separate, limit != 0, limit or None)
    pool = BlockPoolAllocator(config)
    real, result = carry_out(pool, plan), simulate(trace, config)
    stats = pool.stats.snapshot()
    assert (result.n_exhausted, result.n_rejected) == (real.n_exhausted, real.n_rejected)
    assert result.peak_blocks == stats.peak_blocks_in_use
    assert (result.grown_blocks, result.final_blocks) == (stats.n_grown, stats.n_blocks)


def test_rounding_is_less_by_what_is_given_back(tmp_path: Path) -> None:
    """By hand: 40 and 20 tokens are asked for, 8 of the 40 given back after two seconds."""
    pool = BlockPoolAllocator(PoolConfig(16, 64, separate_kv=False))
    now = [pool._clock()]
    pool._clock = lambda: now[0]
    recorder = record(pool, capacity=1024)
    first = pool.allocate("kv", 40, "a")
    now[0] += 10**9
    pool.allocate("kv", 20, "b")
    now[0] += 10**9
    pool.free(first[2:])
    now[0] += 10**9
    pool.free_all("a")
    pool.free_all("b")
    pool.allocate_kv(1, "the end of the third second")
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    recorder.stop()
    uninstrument(pool)
    asked = 40 + 60 + 52
    for size, held, freed in ((16, 48 + 80 + 64, 80), (8, 40 + 64 + 56, 64)):
        result = simulate(trace, PoolConfig(size, 64, separate_kv=False))
        assert result.rounding == pytest.approx(1 - asked / held)
        assert result.unfilled == pytest.approx(1 - 60 / freed)


def test_the_recorded_configuration_comes_out_as_recorded(traces: dict[int, Trace]) -> None:
    """What was recorded is the first row, and the trace's own snapshot says the same."""
    trace = traces[1]
    result = simulate(trace, trace.header.config)
    assert result.peak_blocks == pool_from_dict(trace.snapshots[-1].document).peak_blocks_in_use
    assert result.n_exhausted == 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 50), config=configs)
def test_what_was_recorded_is_told_as_it_was(seed: int, config: PoolConfig) -> None:
    """Refused owners count under the recorded configuration, too, as they do under any other."""
    pool = BlockPoolAllocator(config)
    instrument(pool, name="told-as-it-was")
    recorder = record(pool, capacity=1 << 16)
    real = serve(pool, seed, 60)
    with TemporaryDirectory() as folder:
        trace = load_trace(recorder.dump(Path(folder) / "t.vqtrace"))
    recorder.stop()
    uninstrument(pool)
    result = simulate(trace, config)
    assert (result.n_exhausted, result.n_rejected) == (real.n_exhausted, real.n_rejected)
    stranded = {key: n for key, n in pool._incidents.exhausted.items() if key[1] == "stranded"}
    assert result.n_stranded == sum(stranded.values()) and result.n_admitted == 0
    assert result.most_blocks == pool.stats.n_blocks


def test_a_pool_that_shrinks_and_grows_again_is_as_large_as_it_was(tmp_path: Path) -> None:
    """Not as large as all its growth together."""
    pool = BlockPoolAllocator(PoolConfig(16, 4, separate_kv=False, grow_on_exhaustion=True))
    recorder = record(pool, capacity=1024)
    for n in range(5):
        pool.allocate("kv", 160, n)
        pool.free_all(n)
        pool.shrink("kv", 8)
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    recorder.stop()
    uninstrument(pool)
    result = simulate(trace, trace.header.config)
    assert result.grown_blocks > 10
    assert (result.most_blocks, result.managed_slots) == (10, 160)


def test_what_is_held_at_the_beginning_may_find_no_room(tmp_path: Path) -> None:
    """An owner of the opening that does not fit is one that is refused."""
    pool = BlockPoolAllocator(PoolConfig(16, 64, separate_kv=False))
    pool.allocate("kv", 160, "early")
    recorder = record(pool, capacity=1024)
    pool._journal.clear()
    pool.allocate("kv", 16, "late")
    pool.allocate("kv", 16, "late")
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    recorder.stop()
    uninstrument(pool)
    assert trace.header.opening.holdings
    tight = simulate(trace, PoolConfig(16, 4, separate_kv=False))
    assert (tight.n_exhausted, tight.n_rejected, tight.first_exhausted_ns) == (1, 1, 0)
    advice = advise([tight, simulate(trace, PoolConfig(16, 64, separate_kv=False))])
    assert advice.best.config.n_blocks == 64


def test_a_refused_giant_grows_no_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for too many tokens, refused then, must not take all memory with growth on."""
    monkeypatch.setattr("veloxquant_exporters.replay.opening.MAX_BLOCKS", 1000)
    pool = BlockPoolAllocator(PoolConfig(16, 64, separate_kv=False))
    recorder = record(pool, capacity=1024, dump_pause_s=86_400, folder=tmp_path)
    with pytest.raises(BlockPoolExhaustedError):
        pool.allocate("kv", 16 * 5000, "giant")
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    recorder.stop()
    uninstrument(pool)
    result = simulate(trace, PoolConfig(16, 64, separate_kv=False, grow_on_exhaustion=True))
    assert (result.n_exhausted, result.most_blocks) == (1, 64)


def test_rounding_is_what_block_size_costs(tmp_path: Path) -> None:
    """One request of 40 tokens: blocks of 16 hold 48, blocks of 64 hold 64, of 8 hold 40."""
    pool = BlockPoolAllocator(PoolConfig(block_size=16, n_blocks=64, separate_kv=False))
    instrument(pool, name=f"rounding-{os.getpid()}")
    now = [pool._clock()]
    pool._clock = lambda: now[0]
    recorder = record(pool, capacity=1024)
    pool.allocate("kv", 40, "a")
    weekend_ns = 2 * 86_400 * 10**9
    now[0] += weekend_ns
    pool.allocate("kv", 40, "b")
    now[0] += weekend_ns
    pool.free_all("a")
    pool.free_all("b")
    recorder.dump(tmp_path / "t.vqtrace")
    recorder.stop()
    uninstrument(pool)
    trace = load_trace(tmp_path / "t.vqtrace")
    for size, share in ((8, 0.0), (16, 8 / 48), (64, 24 / 64)):
        result = simulate(trace, PoolConfig(size, 64, separate_kv=False))
        assert result.rounding == pytest.approx(share)
        assert result.unfilled == pytest.approx(share), "all that was asked for was filled"


# -- several at once -------------------------------------------------------------------------------


def test_processes_give_what_one_gives(
    recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same results in the same order, whoever works them out, and progress to the end."""
    path = recorded()
    trace = load_trace(path)
    tried = Grid().configs(trace.header.config)
    told: list[int] = []
    alone = simulate_all(path, trace, tried, jobs=1, progress=told.append)
    monkeypatch.setattr("veloxquant_exporters.simulate.workers.WORTH_PROCESSES", 0)
    shared = simulate_all(path, trace, tried, jobs=2, progress=told.append)
    assert list(map(_without_time, alone)) == list(map(_without_time, shared))
    assert max(told) == told[-1] == trace.n_calls * len(tried)


@pytest.mark.timeout(60)
def test_a_program_without_a_file_may_simulate(recorded: Callable[..., Path]) -> None:
    """From standard input, and without a guard of its main module: workers need nothing of either."""
    program = """
import sys
from pathlib import Path
from veloxquant_exporters.simulate import Grid, simulate_all, workers
from veloxquant_mlx.telemetry.trace import load_trace
workers.WORTH_PROCESSES = 0
trace = load_trace(sys.argv[1])
found = simulate_all(Path(sys.argv[1]), trace, Grid().configs(trace.header.config), jobs=2)
print(len(found), __name__, "__file__" in globals(), flush=True)
"""
    path = recorded()
    script = path.with_name("program.py")
    script.write_text(program)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "exporters")])}
    for given_as, stdin in (("-", program), (str(script), "")):
        ran = subprocess.run(
            [sys.executable, given_as, str(path)],
            input=stdin, capture_output=True, text=True, check=False, env=env,
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith("4 __main__ ")


@pytest.mark.timeout(60)
def test_workers_end_with_their_parent(recorded: Callable[..., Path]) -> None:
    """After `kill` or `timeout` nobody is left who waits for work for ever."""
    program = """
import os, signal, sys
from pathlib import Path
from veloxquant_exporters.simulate import Grid, simulate_all, workers
from veloxquant_mlx.telemetry.trace import load_trace
workers.WORTH_PROCESSES = 0
trace = load_trace(sys.argv[1])
def told(n_calls):
    if n_calls:
        os.kill(os.getpid(), signal.SIGKILL)
simulate_all(Path(sys.argv[1]), trace, Grid().configs(trace.header.config), jobs=2, progress=told)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "exporters")])}
    # The workers have the pipe of its output too: it ends when the last of them does.
    ran = subprocess.run(
        [sys.executable, "-c", program, str(recorded())],
        stdout=subprocess.PIPE, timeout=40, check=False, env=env,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL


def _without_time(result: Result) -> tuple[object, ...]:
    names = [name for name in Result.__dataclass_fields__ if name != "seconds"]
    return tuple(getattr(result, name) for name in names)


# -- which configurations --------------------------------------------------------------------------


def test_the_grid_keeps_the_token_slots() -> None:
    """As recorded means as much memory: blocks are scaled with their size, up to a whole one."""
    recorded = PoolConfig(block_size=16, n_blocks=100, grow_on_exhaustion=True, max_blocks=150)
    tried = Grid((8, 16, 64)).configs(recorded)
    assert tried[0] == recorded
    assert [(c.block_size, c.n_blocks, c.max_blocks) for c in tried] == [
        (16, 100, 150),
        (8, 200, 300),
        (64, 25, 38),
    ]
    both = Grid((16,), separate_kv=(True, False), grow=(True, False)).configs(recorded)
    assert len(both) == 4


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (Grid((0,)), "at least 1"),
        (Grid((-8,)), "at least 1"),
        (Grid(n_blocks=(-1,)), "n_blocks"),
        (Grid(tuple(range(1, 2 + MAX_CONFIGS))), str(MAX_CONFIGS)),
    ],
)
def test_a_grid_of_impossible_values_is_refused(grid: Grid, said: str) -> None:
    """One error that says what was wrong."""
    with pytest.raises(GridError, match=said):
        grid.configs(ROOMY)


def test_a_giant_is_refused_before_memory_is_taken(traces: dict[int, Trace]) -> None:
    """A slip of the keyboard does not end the machine."""
    with pytest.raises(TraceError, match="too large"):
        simulate(traces[0], PoolConfig(16, 1 << 40))


# -- advice ----------------------------------------------------------------------------------------


def made(config: PoolConfig, **changed: object) -> Result:
    """A result with what matters to the advice."""
    values: dict[str, object] = {
        "n_calls": 10,
        "peak_blocks": 10,
        "final_blocks": config.n_blocks,
        "grown_blocks": 0,
        "most_blocks": config.n_blocks,
        "n_exhausted": 0,
        "n_stranded": 0,
        "n_admitted": 0,
        "first_exhausted_ns": None,
        "n_rejected": 0,
        "n_owners": 5,
        "rounding": 0.1,
        "unfilled": None,
        "occupancy": (),
        "seconds": 0.0,
    }
    return Result(config=config, **{**values, **changed})  # type: ignore[arg-type]


def test_refusing_nothing_comes_before_memory() -> None:
    """A smaller peak that refuses requests is no saving."""
    small = made(PoolConfig(8, 64), peak_blocks=5, n_exhausted=3, n_rejected=2)
    roomy = made(PoolConfig(16, 64))
    advice = advise([small, roomy])
    assert advice.best is roomy
    assert any("refuses 3 allocations of 2 requests" in reason for reason in advice.reasons)


def test_the_least_memory_wins_and_likeness_keeps_what_is() -> None:
    """A clear saving is taken; one within 2 % is not worth a change."""
    recorded = made(PoolConfig(16, 64), peak_blocks=100)
    saving = made(PoolConfig(8, 128), peak_blocks=150, rounding=0.02)
    alike = made(PoolConfig(8, 128), peak_blocks=198)
    advice = advise([recorded, saving])
    assert advice.best is saving
    assert any("25.0% less memory" in reason for reason in advice.reasons)
    assert advise([recorded, alike]).best is recorded
    with pytest.raises(ValueError, match="nothing to choose"):
        advise([])


def test_a_pool_that_refuses_is_told_what_would_help() -> None:
    """More blocks, growth, a higher limit, or one stream: what this very pool lacks."""
    fixed = made(PoolConfig(16, 64), n_exhausted=3, n_rejected=2, n_stranded=1)
    text = " ".join(advise([fixed]).reasons)
    assert "3 allocations, of 2 of 5 requests" in text and "--grow on" in text
    assert "For 1 of them the other stream had room" in text and "keep it" not in text
    limited = PoolConfig(16, 64, grow_on_exhaustion=True, max_blocks=128)
    text = " ".join(advise([made(limited, n_exhausted=3, n_rejected=2)]).reasons)
    assert "beyond its 128 blocks with --max-blocks" in text and "--grow on" not in text


def test_what_the_figures_do_not_have_is_said() -> None:
    """A pool of which most is never used, and requests that are only let in by the simulation."""
    recorded = made(PoolConfig(16, 64), n_exhausted=2, n_rejected=2)
    roomy = made(PoolConfig(16, 640), n_admitted=2)
    text = " ".join(advise([recorded, roomy]).reasons)
    assert "98% of its blocks are free; try fewer" in text
    assert "2 allocations that the recorded pool refused find room" in text


def test_fewer_blocks_for_the_same_memory() -> None:
    """Among those alike the larger block wins: fewer calls on the pool."""
    recorded = made(PoolConfig(16, 64), peak_blocks=10, n_exhausted=1, n_rejected=1)
    fine, coarse = made(PoolConfig(8, 200), peak_blocks=40), made(PoolConfig(32, 50))
    assert advise([recorded, fine, coarse]).best is coarse


# -- the command -----------------------------------------------------------------------------------


def vqmon(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "exporters")])
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "veloxquant_exporters.cli", "simulate", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


def test_the_command_shows_a_table_and_draws_a_picture(
    recorded: Callable[..., Path], tmp_path: Path
) -> None:
    """Every configuration has a row, the recommended one is written as Python, the picture is one."""
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra plot")
    picture = tmp_path / "sizes.svg"
    ran = vqmon(
        str(recorded(PoolConfig(16, 40))), "--separate-kv", "both", "--bytes-per-slot", "2048",
        "--plot", str(picture),
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    rows = [line for line in ran.stdout.splitlines() if "kv " in line or "k, v" in line]
    assert len(rows) == 8
    assert "Recommended: PoolConfig(block_size=" in ran.stdout
    assert "KiB" in ran.stdout or "MiB" in ran.stdout
    assert picture.read_text("utf-8").lstrip().startswith("<?xml")


def test_names_and_the_end_of_a_pipe_do_no_harm(tmp_path: Path) -> None:
    """A pool's name writes nothing on the terminal; a reader that went away is no error of ours."""
    pool = BlockPoolAllocator(PoolConfig(16, 64))
    instrument(pool, name="\x1b]0;title\x07")
    recorder = record(pool, capacity=1024)
    pool.allocate("k", 160, "a")
    path = recorder.dump(tmp_path / "t.vqtrace")
    recorder.stop()
    uninstrument(pool)
    ran = vqmon(str(path))
    assert "\x1b" not in ran.stdout and "pool \\x1b]0;title\\x07: 1 calls" in ran.stdout
    assert "asks for whole blocks" in ran.stdout
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "exporters")])}
    command = [sys.executable, "-m", "veloxquant_exporters.cli", "simulate", str(path)]
    gone = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=env, check=False)
    os.close(writing)
    assert (gone.returncode, gone.stderr) == (141, b"")


def test_the_command_prints_json(recorded: Callable[..., Path]) -> None:
    """For a program: sizes, the recommended one by its index, reasons."""
    ran = vqmon(str(recorded()), "--json", "--block-size", "16,32", "--n-blocks", "10,64")
    shown = json.loads(ran.stdout)
    assert ran.returncode == 0 and len(shown["results"]) == 5
    assert 0 <= shown["recommended"] < 5 and shown["reasons"]
    assert shown["results"][0]["config"]["n_blocks"] == ROOMY.n_blocks


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--block-size", "16,x"], 2, "not whole numbers by comma"),
        (["--block-size", "0"], 2, "at least 1"),
        (["--grow", "maybe"], 2, "neither on, off nor both"),
        (["--plot", "picture.gif"], 2, ".svg, .png or .pdf"),
        (["--n-blocks", "9" * 14], 1, "too large"),
    ],
)
def test_wrong_usage_is_one_line(
    recorded: Callable[..., Path], args: list[str], code: int, said: str
) -> None:
    """What was wrong and what is allowed, and no traceback."""
    ran = vqmon(str(recorded()), *args)
    assert ran.returncode == code and said in ran.stderr and "Traceback" not in ran.stderr


def test_what_is_no_trace_is_told_in_one_line(tmp_path: Path) -> None:
    """A file of something else."""
    path = tmp_path / "page.html"
    path.write_text("<html>")
    ran = vqmon(str(path))
    assert ran.returncode == 1 and len(ran.stderr.splitlines()) == 1
