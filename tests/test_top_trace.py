"""vqmon top: a recorded trace at any moment is what the pool was then; the place moves as told."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zstandard", reason="the extra trace")

from tests.top_help import exhaust, snapshot, watched
from veloxquant_exporters.top.source import SourceError
from veloxquant_exporters.top.trace_boards import TraceBoards
from veloxquant_exporters.top.trace_index import TraceIndex
from veloxquant_exporters.top.trace_place import TracePlace
from veloxquant_mlx.core.exceptions import PoolError
from veloxquant_mlx.telemetry.recorder import record
from veloxquant_mlx.telemetry.snapshot import PoolSnapshot
from veloxquant_mlx.telemetry.trace import Event, load_trace

pytestmark = pytest.mark.timeout(60)


def churn(pool: Any, rng: random.Random, n: int, after: Callable[[], None]) -> None:
    """Calls of all kinds, also such as fail; `after` each of them."""
    for _ in range(n):
        owner = rng.randrange(8)
        kind = rng.randrange(10)
        try:
            if kind < 5:
                pool.allocate_kv(rng.randrange(1, 400), owner, rng.choice(["fp16", "int8"]))
            elif kind < 6:
                pool.allocate("k", rng.randrange(20, 60), owner)
            elif kind < 7:
                blocks = pool.blocks_for(owner)
                pool.free(blocks[len(blocks) // 2 :])
            elif kind < 9:
                pool.free_all(owner)
            else:
                pool.shrink("k", 40)
        except PoolError:
            pass
        after()


def n_failed(pool: PoolSnapshot) -> int:
    """Failures of all streams, by any reason."""
    return sum(sum(stream.exhausted.values()) for stream in pool.streams.values())


@pytest.mark.parametrize("grow", [False, True], ids=["fixed", "growing"])
def test_each_moment_is_as_the_pool_was(tmp_path: Path, grow: bool) -> None:
    """Held against snapshots that were taken after each call, from a start with blocks held."""
    real: list[PoolSnapshot] = []
    held: list[dict[str, int]] = []
    config = {"grow_on_exhaustion": True, "max_blocks": 160} if grow else {}
    with watched("taped", n_blocks=128, separate_kv=True, **config) as pool:
        pool.allocate_kv(100, 99)
        base = snapshot("taped").pools[0]

        def look() -> None:
            real.append(snapshot("taped").pools[0])
            owners = {owner: len(pool.blocks_for(owner)) for owner in (*range(8), 99)}
            held.append({str(owner): n for owner, n in owners.items() if n})

        recorder = record(pool, tmp_path / "a.vqtrace", owners=True, snapshot_s=0.05)
        churn(pool, random.Random(5), 300, look)
        recorder.stop()
    trace = load_trace(tmp_path / "a.vqtrace")
    index = TraceIndex(trace)
    times = [shot.monotonic_ns - trace.header.began_ns for shot in real]
    for at_ns, shot, owners in zip(times, real, held, strict=True):
        found = index.pool_at(at_ns)
        assert found.blocks_in_use == shot.blocks_in_use
        assert found.n_blocks == shot.n_blocks
        for name, stream in shot.streams.items():
            like = found.streams[name]
            assert (like.managed, like.free) == (stream.managed, stream.free)
            assert like.slots_used == stream.slots_used
        assert n_failed(found) == n_failed(shot) - n_failed(base)
        for name in ("n_allocations", "n_frees", "n_exhausted", "n_grown", "n_retired"):
            assert getattr(found, name) == getattr(shot, name) - getattr(base, name), name
        assert found.owners_active == len(owners)
        assert {tag: n for tag, n in found.formats.items() if n} == {
            tag: n for tag, n in shot.formats.items() if n
        }
        holders = index.holders_at(at_ns)
        assert {holder.owner: holder.blocks for holder in holders} == owners
        assert [h.blocks for h in holders] == sorted(owners.values(), reverse=True)
        assert found.calls["allocate"] == shot.calls["allocate"] - base.calls["allocate"]
    assert found.n_exhausted > 0 or grow
    curve = index.usage_between(0, times[-1], 50)
    assert len(curve) == 50
    peak = max(shot.blocks_in_use / shot.n_blocks for shot in (base, *real))
    assert max(curve) == pytest.approx(peak)


def test_a_board_of_a_trace_has_rates_holders_and_alerts(tmp_path: Path) -> None:
    """At the beginning nothing has failed yet; at the end it has, and is told."""
    with watched("taped", n_blocks=32) as pool:
        recorder = record(pool, tmp_path / "a.vqtrace")
        pool.allocate_kv(16 * 8, "a")
        pool.allocate_kv(16 * 4, "b")
        exhaust(pool)
        recorder.stop()
    boards = TraceBoards(tmp_path / "a.vqtrace")
    board = boards.make()
    assert boards.make() is board, "nothing is done anew while the place stays"
    (view,) = board.pools
    assert (view.in_use, view.exhausted, view.n_blocks) == (24, 1, 32)
    assert [(h.owner, h.blocks) for h in view.holders] == [("#0", 16), ("#1", 8)]
    assert len(view.past) == 120 and view.past[-1] == 24 / 32
    assert board.processes[0].memory is None
    boards.place.seek(0)
    (early,) = boards.make().pools
    assert early.exhausted == 0
    assert view.rates is not None and view.rates.exhaustions > 0
    assert early.rates is None
    assert early.in_use in (0, 16), "the first call came at the beginning, or right after it"


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    """In one line with the file's name."""
    file = tmp_path / "x.vqtrace"
    file.write_bytes(b"garbage" * 100)
    with pytest.raises(SourceError, match=r"x\.vqtrace") as caught:
        TraceBoards(file)
    assert "\n" not in str(caught.value)
    file.write_bytes(b"")
    with pytest.raises(SourceError):
        TraceBoards(file)


def test_a_cut_trace_is_shown_up_to_the_cut(tmp_path: Path) -> None:
    """As a crash leaves it; the title says so."""
    with watched("taped", n_blocks=32) as pool:
        recorder = record(pool, tmp_path / "a.vqtrace")
        for n in range(50):
            pool.allocate_kv(16, n % 5)
            pool.free_all(n % 5)
        recorder.stop()
    data = (tmp_path / "a.vqtrace").read_bytes()
    (tmp_path / "cut.vqtrace").write_bytes(data[: len(data) - 10])
    boards = TraceBoards(tmp_path / "cut.vqtrace")
    assert boards.title.endswith("cut.vqtrace (cut)")
    assert boards.make().pools[0].name == "taped"


# -- the place -----------------------------------------------------------------------------------


class Clock:
    """Seconds that go on when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


def place_of(*events_ns: int, clock: Clock | None = None) -> TracePlace:
    """A place between 1 and 11 seconds."""
    second = 10**9
    events = [Event("exhausted", at_ns, 0, "allocate", "k", 1) for at_ns in events_ns]
    return TracePlace(second, 11 * second, events, lambda n: [0.0] * n, clock or Clock())


def test_the_place_stays_between_the_ends() -> None:
    """Wherever it is moved to."""
    place = place_of()
    assert place.at_ns == 11 * 10**9
    place.step(-0.1)
    assert place.at_ns == 10 * 10**9
    place.step(-5)
    assert place.at_ns == 10**9
    place.seek(10**18)
    assert place.at_ns == 11 * 10**9


def test_the_place_goes_from_event_to_event() -> None:
    """And stays where there is none any more."""
    place = place_of(2 * 10**9, 2 * 10**9, 5 * 10**9)
    seen = []
    for by in (1, -1, -1, -1, 1, 1, 1):
        place.step_event(by)
        seen.append(place.at_ns // 10**9)
    assert seen == [11, 5, 2, 2, 5, 5, 5]
    assert place.n_events_until(2 * 10**9) == 2


def test_a_trace_plays_at_its_speed() -> None:
    """As time goes, up to the end; then from the beginning."""
    clock = Clock()
    place = place_of(clock=clock)
    place.seek(2 * 10**9)
    place.play(on=True)
    clock.now_s += 1.5
    assert (place.at_ns, place.playing) == (3_500_000_000, True)
    place.change_speed(2)
    clock.now_s += 1
    assert place.at_ns == 5_500_000_000
    place.play(on=False)
    clock.now_s += 1
    assert (place.at_ns, place.playing) == (5_500_000_000, False)
    place.play(on=True)
    clock.now_s += 100
    assert (place.at_ns, place.playing) == (11 * 10**9, False)
    place.play(on=True)
    assert (place.at_ns, place.playing) == (10**9, True)
    for _ in range(30):
        place.change_speed(2)
    assert place.speed == 1024
    for _ in range(30):
        place.change_speed(0.5)
    assert place.speed == 1 / 16
