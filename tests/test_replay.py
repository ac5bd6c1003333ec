"""Replay: what a random run did is what its trace does again, whether or not the ring wrapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("msgpack", reason="traces are the extra trace")
pytest.importorskip("zstandard", reason="traces are the extra trace")
pytest.importorskip("numpy", reason="traces are the extra trace")

from tests.recorder_help import (
    KINDS,
    OWNERS,
    Call,
    books,
    driver_books,
    history,
    play,
    small_pool,
)
from veloxquant_exporters.replay import Driver
from veloxquant_exporters.replay.check import disagreement
from veloxquant_exporters.replay.timing import replay_round, summarize
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import check_pool, record, uninstrument
from veloxquant_mlx.telemetry.trace import Trace, load_trace

TRACES = Path(__file__).resolve().parents[1] / "benchmarks" / "traces"

calls = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, len(OWNERS) - 1),
        st.integers(1, 60),
        st.integers(0, 5),
        st.integers(0, 1 << 30),
    ),
    max_size=60,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where traces go."""
    return tmp_path


def traced(
    folder: Path, pool: BlockPoolAllocator, before: list[Call], done: list[Call], **options: Any
) -> Trace:
    """The trace of `done` on a pool that has done `before`."""
    play(pool, before)
    recorder = record(pool, owners=True, folder=folder, **options)
    try:
        play(pool, done)
        return load_trace(recorder.dump(folder / "t.vqtrace"))
    finally:
        recorder.stop()
        uninstrument(pool)


def driven(trace: Trace) -> Driver:
    """A driver that has done every call."""
    driver = Driver(trace)
    for _ in driver.run():
        pass
    return driver


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(calls, st.booleans(), st.booleans())
def test_a_recorded_run_is_replayed_to_the_same_books(
    folder: Path, done: list[Call], separate: bool, grow: bool
) -> None:
    """Every kind of call, recorded from the pool's birth on: outcomes, books, even block ids."""
    pool = small_pool(separate=separate, grow=grow)
    trace = traced(folder, pool, [], done)
    assert trace.header.opening.newborn and not trace.cut and trace.n_lost == 0
    assert disagreement(trace) is None
    driver = driven(trace)
    assert driver_books(driver) == books(pool)
    ours, theirs = driver.pool.stats, pool.stats
    for field in ("n_allocations", "n_frees", "n_exhausted", "n_grown", "n_retired"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert check_pool(driver.pool) == []


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("grow", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_ring_that_wrapped_is_replayed_from_its_middle(
    folder: Path, seed: int, separate: bool, grow: bool
) -> None:
    """What was held at the ring's beginning follows from what is held at its end."""
    pool = small_pool(separate=separate, grow=grow)
    trace = traced(folder, pool, history(seed, 300), history(seed + 100, 700), capacity=256)
    assert not trace.header.opening.newborn and trace.n_calls == 255
    assert disagreement(trace) is None
    assert driver_books(driven(trace)) == books(pool)


@pytest.mark.parametrize("separate", [True, False])
def test_single_frees_replay_to_the_same_block_ids(folder: Path, separate: bool) -> None:
    """A block map shows the blocks that moved, not some others."""
    pool = BlockPoolAllocator(PoolConfig(8, 64, separate))
    done = [call for call in history(7, 400) if call[0] in {"allocate", "free", "free_all"}]
    done = [("allocate" if k == "allocate" else k, w, s, 0, c) for k, w, s, _, c in done]
    trace = traced(folder, pool, [], done)
    driver = driven(trace)
    for number, name in enumerate(trace.owners):
        found = [block.block_id for block in driver.pool.blocks_for(number)]
        if found:
            assert found == [block.block_id for block in pool.blocks_for(name)]
    assert sum(len(found) for found in (driver.pool.blocks_for(n) for n in range(trace.n_owners)))


@pytest.mark.parametrize("seed", range(4))
def test_a_continuous_trace_that_lost_calls_goes_on_with_the_books(
    tmp_path: Path, seed: int
) -> None:
    """After an overflow made-up rows lead to what was held then, and the rest agrees."""
    pool = small_pool(separate=True, grow=True)
    path = tmp_path / "t.vqtrace"
    recorder = record(pool, path, owners=True, folder=tmp_path, capacity=256, flush_s=86_400.0)
    with recorder._writing:
        play(pool, history(seed, 200))
    recorder.flush()
    with recorder._writing:
        play(pool, history(seed + 1, 2000))
    recorder.flush()
    play(pool, history(seed + 2, 200))
    recorder.stop()
    trace = load_trace(path)
    assert trace.n_lost == recorder.n_lost > 0
    assert len(trace.gaps) == 1 and not trace.cut
    assert disagreement(trace) is None
    assert driver_books(driven(trace)) == books(pool)
    assert [event.kind for event in trace.events].count("lost") == 1
    uninstrument(pool)


def test_the_first_disagreement_is_named(folder: Path) -> None:
    """An allocator that does something else is found out at the call where it does."""

    class Stingy(BlockPoolAllocator):
        """Hands out the first 20 blocks only."""

        __slots__ = ()

        def allocate(self, stream: str, n_tokens: int, owner: Any, format: str = "fp16") -> Any:
            if self.stats.n_allocations >= 20:
                return super().allocate(stream, n_tokens + 8, owner, format)
            return super().allocate(stream, n_tokens, owner, format)

    pool = BlockPoolAllocator(PoolConfig(8, 64))
    trace = traced(folder, pool, [], [("allocate", 0, 8, 0, 0)] * 25)
    assert disagreement(trace) is None
    fault = disagreement(trace, make=Stingy)
    assert fault is not None
    assert fault.startswith("call 20 (allocate of 1 blocks, stream k, owner 0): recorded +1 blocks")
    assert "\n" not in fault


def test_another_config_rejects_and_admits(folder: Path) -> None:
    """Where the other pool is smaller its owners are rejected; where it is larger, requests fit."""
    pool = BlockPoolAllocator(PoolConfig(8, 16, separate_kv=False))
    done: list[Call] = [("allocate", who, 8 * 4, 0, 0) for who in range(5)]
    trace = traced(folder, pool, [], [*done, ("free_all", 0, 1, 0, 0), done[0]])
    small = Driver(trace, PoolConfig(8, 8, separate_kv=False))
    outcomes = [moved.outcome for moved in small.run()]
    assert outcomes == ["ok", "ok", "exhausted", "exhausted", "exhausted", "ok", "ok"]
    assert small.rejected == {2, 3}
    large = Driver(trace, PoolConfig(8, 64, separate_kv=True))
    assert [moved.outcome for moved in large.run()].count("admitted") == 1
    assert check_pool(large.pool) == [] == check_pool(small.pool)


@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("separate", [True, False])
def test_any_other_config_can_be_driven(folder: Path, block_size: int, separate: bool) -> None:
    """Other block sizes and streams: no call fails, and the pool's books stay whole."""
    pool = small_pool(separate=not separate, grow=True)
    trace = traced(folder, pool, history(3, 100), history(4, 600), capacity=256)
    for n_blocks in (4, 200):
        driver = Driver(trace, PoolConfig(block_size, n_blocks, separate))
        for moved in driver.run():
            assert moved.outcome in {"ok", "exhausted", "admitted", "ignored"}
        assert check_pool(driver.pool) == []


def test_rounds_are_timed_by_operation(folder: Path) -> None:
    """Each call is timed in each round."""
    pool = small_pool(separate=True, grow=True)
    trace = traced(folder, pool, [], history(1, 200))
    timings = summarize([replay_round(trace), replay_round(trace, real=True)])
    assert timings["all"].calls == trace.n_calls
    assert sum(t.calls for name, t in timings.items() if name != "all") == trace.n_calls
    assert all(timing.ns > 0 for timing in timings.values())


def test_vqmon_replay_tells_what_it_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON and text; a trace that agrees ends with 0, and a file that is none with 1."""
    from veloxquant_exporters.cli.group import run

    pool = small_pool(separate=True, grow=True)
    traced(folder, pool, [], history(1, 200))
    file = str(folder / "t.vqtrace")
    assert run(["replay", file, "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"] and found["operations"]["all"]["calls"] == found["calls"] > 100
    assert run(["replay", file, "--speed", "real"]) == 0
    assert "agrees with the recording" in capsys.readouterr().out
    Path(file).write_bytes(b"something else")
    assert run(["replay", file]) == 1
    assert "this is no trace" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chat", "long_context", "churn"])
def test_committed_traces_replay(name: str) -> None:
    """What production does is done by today's allocator in the same way."""
    trace = load_trace(TRACES / f"{name}.vqtrace")
    assert trace.n_calls > 100 and not trace.cut
    assert disagreement(trace) is None
