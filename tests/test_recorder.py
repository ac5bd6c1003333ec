"""The recorder: dumps when they are due, whatever befalls pool, process and disk; bounded, and silent."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("msgpack", reason="traces are the extra trace")
pytest.importorskip("zstandard", reason="traces are the extra trace")
pytest.importorskip("numpy", reason="traces are the extra trace")

from tests.recorder_help import books, driver_books, history, play, small_pool
from veloxquant_exporters.replay import Driver
from veloxquant_exporters.replay.check import disagreement
from veloxquant_mlx.core.exceptions import (
    ArgumentTypeError,
    BlockPoolExhaustedError,
    PoolReentryError,
)
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.memory.journal import HISTORY
from veloxquant_mlx.telemetry import (
    check_pool,
    instrument,
    record,
    take_snapshot,
    uninstrument,
)
from veloxquant_mlx.telemetry.event_source import last_events, set_event_source
from veloxquant_mlx.telemetry.recorder.keeper import keeper
from veloxquant_mlx.telemetry.trace import load_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps that nobody gave a place go with the test."""
    monkeypatch.setenv("VELOXQUANT_TRACE_DIR", str(tmp_path / "dumps"))


@pytest.fixture
def pool() -> Iterator[BlockPoolAllocator]:
    """A pool that is let go of afterwards, with its recorder."""
    made = BlockPoolAllocator(PoolConfig(16, 64))
    yield made
    for recorder in keeper.recorders:
        if recorder.records(made):
            recorder.stop()
    uninstrument(made)


def exhaust(pool: BlockPoolAllocator) -> BlockPoolExhaustedError:
    """Ask for more than there is."""
    with pytest.raises(BlockPoolExhaustedError) as caught:
        pool.allocate("k", 16 * 1000, "greedy")
    return caught.value


# -- dumps ----------------------------------------------------------------------------------------


def test_an_exhaustion_is_dumped_once_a_minute(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """The first failure is dumped with what led to it; a storm of them is not."""
    recorder = record(pool, folder=tmp_path)
    pool.allocate_kv(40, "a")
    for _ in range(5):
        exhaust(pool)
        recorder.keep()
    (path,) = recorder.dumps
    assert path.parent == tmp_path and path.name.endswith("-exhausted.vqtrace")
    assert path.stat().st_mode & 0o777 == 0o600
    trace = load_trace(path)
    assert trace.header.reason == "exhausted"
    assert [event.kind for event in trace.events][:1] == ["exhausted"]
    assert recorder.n_suppressed >= 1 and sum(recorder.errors.values()) == 0
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_pause_old_dumps_make_room(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """Dumps are bounded in number, too."""
    recorder = record(pool, folder=tmp_path, dump_pause_s=0, keep=2)
    for _ in range(5):
        exhaust(pool)
        recorder.keep()
    assert len(recorder.dumps) == 2
    assert sorted(tmp_path.iterdir()) == sorted(recorder.dumps)


def test_a_violated_book_is_dumped(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """What the self-check finds is dumped, and can be read although its books do not add up."""
    recorder = record(pool, folder=tmp_path)
    blocks = pool.allocate("k", 40, "a")
    stream = pool._streams[0]
    stream.top.append(blocks[0])  # held, and on the free list
    try:
        take_snapshot()
        recorder.keep()
        (path,) = recorder.dumps
        trace = load_trace(path)
        assert trace.header.reason == "violation" and trace.n_calls == 1
        assert not trace.consistent
    finally:
        stream.top.pop()


def test_a_signal_handler_may_ask_for_a_dump(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """Even in the middle of a call, where dump() itself is refused."""
    recorder = record(pool, folder=tmp_path)
    refused: list[PoolReentryError] = []

    def handler(*_: object) -> None:
        recorder.request_dump()
        with pool._lock:  # as if it had struck inside of a call
            try:
                recorder.dump(tmp_path / "not.vqtrace")
            except PoolReentryError as error:
                refused.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        pool.allocate("k", 40, "a")
        os.kill(os.getpid(), signal.SIGUSR1)
        pool.free_all("a")
    finally:
        signal.signal(signal.SIGUSR1, before)
    recorder.keep()
    (path,) = recorder.dumps
    assert load_trace(path).header.reason == "asked" and len(refused) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_thread_serves_requests_by_itself(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """Nobody has to call anything after `request_dump`."""
    from tests.sidecar_help import wait_for

    recorder = record(pool, folder=tmp_path)
    pool.allocate("k", 40, "a")
    recorder.request_dump()
    (path,) = wait_for(lambda: recorder.dumps, "a dump")
    assert load_trace(path).n_calls == 1


def test_calls_on_the_one_block_path_get_a_fresh_time(pool: BlockPoolAllocator) -> None:
    """That path reads no clock; the recorder's tick does it instead."""
    recorder = record(pool)
    pool._now = 0
    recorder.keep()
    assert pool._now > 0
    pool._busy = True
    try:
        pool._now = 0
        recorder.keep()
        assert pool._now == 0  # a call under way is measured by the time of its beginning
    finally:
        pool._busy = False


# -- the continuous file --------------------------------------------------------------------------


def test_a_continuous_file_has_every_call(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """More than the ring holds, from beginning to end."""
    path = tmp_path / "t.vqtrace"
    pool.allocate("k", 100, "old")
    recorder = record(pool, path, owners=True, capacity=256, flush_s=0.0)
    for n in range(40):
        play(pool, history(n, 25))
        recorder.flush()
    assert recorder.path == path
    recorder.stop()
    trace = load_trace(path)
    assert not trace.cut and trace.n_lost == 0 and trace.n_calls > 500
    assert [(h.blocks, h.slack) for h in trace.header.opening.holdings] == [(7, 12)]
    assert trace.header.reason == "continuous" and trace.snapshots
    assert disagreement(trace) is None
    assert recorder.path is None


def test_a_full_disk_ends_the_file_and_nothing_else(
    pool: BlockPoolAllocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving code sees nothing; what was written stays readable; the failure is counted."""
    path = tmp_path / "t.vqtrace"
    recorder = record(pool, path, flush_s=86_400)
    pool.allocate("k", 40, "a")
    recorder.flush()

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("veloxquant_mlx.telemetry.trace.writer.os.write", full)
    pool.free_all("a")
    recorder.flush()
    monkeypatch.undo()
    assert recorder.errors["write"] == 1 and recorder.path is None and recorder.active
    trace = load_trace(path)
    assert trace.cut and trace.n_calls == 1
    pool.allocate("k", 40, "b")
    assert load_trace(recorder.dump(tmp_path / "d.vqtrace")).n_calls == 3


def test_the_file_ends_at_its_limit(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """A recorder that is forgotten does not fill the disk."""
    path = tmp_path / "t.vqtrace"
    recorder = record(pool, path, flush_s=0.0, max_bytes=1)
    pool.allocate("k", 40, "a")
    recorder.flush()
    assert recorder.path is None and recorder.active
    assert not load_trace(path).cut


CONTINUOUS = """
import sys, os
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import record
pool = BlockPoolAllocator(PoolConfig(16, 64))
recorder = record(pool, sys.argv[1], flush_s=0.0)
for n in range(10_000_000):
    pool.allocate("k", 40, n)
    pool.free_all(n)
    if n == 2000:
        recorder.flush()
        print("written", flush=True)
"""


def test_kill_9_leaves_a_readable_file(tmp_path: Path) -> None:
    """Everything up to the last flush is there."""
    path = tmp_path / "t.vqtrace"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'exporters'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", CONTINUOUS, str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
    finally:
        process.kill()
        process.communicate()
    trace = load_trace(path)
    assert trace.cut and trace.n_calls >= 4000
    assert disagreement(trace) is None


FORKING = """
import os, sys
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import record
from veloxquant_mlx.telemetry.trace import load_trace
folder = sys.argv[1]
pool = BlockPoolAllocator(PoolConfig(16, 64))
recorder = record(pool, folder + "/parent.vqtrace", flush_s=0.0, folder=folder)
pool.allocate("k", 40, "before")
child = os.fork()
if not child:
    pool.allocate("k", 40, "child")
    recorder.flush()
    assert recorder.path is None and recorder.active
    recorder.dump(folder + "/child.vqtrace")
    recorder.request_dump()
    while not recorder.dumps:
        pass
    recorder.stop()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
pool.allocate("v", 40, "parent")
recorder.stop()
calls = [load_trace(f"{folder}/{name}.vqtrace").stream.tolist() for name in ("parent", "child")]
assert calls == [[0, 1], [0, 0]], calls
"""


@pytest.mark.timeout(60)
def test_a_forked_child_records_on_and_leaves_the_file_alone(tmp_path: Path) -> None:
    """The file has the parent's calls alone; the child dumps its own, on a thread of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'exporters'}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- the pool's end -------------------------------------------------------------------------------


def test_a_collected_pool_ends_its_file(tmp_path: Path) -> None:
    """No reference keeps the pool; what was in the ring is written, and let go of."""
    path = tmp_path / "t.vqtrace"
    pool = BlockPoolAllocator(PoolConfig(16, 64))
    recorder = record(pool, path, flush_s=86_400)
    pool.allocate("k", 40, "a")
    gone = weakref.ref(pool)
    gc.disable()
    try:
        with recorder._writing:  # else the recorder's thread may be looking at it just now
            del pool
            assert gone() is None
    finally:
        gc.enable()
    recorder.keep()
    assert recorder.done and not recorder.active and not recorder._ring.entries
    trace = load_trace(path)
    assert not trace.cut and trace.n_calls == 1
    with pytest.raises(RuntimeError, match="nothing is recorded any more"):
        recorder.dump(tmp_path / "d.vqtrace")


def test_uninstrument_ends_the_recording(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """The pool has its short journal back, and its history goes on."""
    path = tmp_path / "t.vqtrace"
    recorder = record(pool, path, flush_s=86_400)
    pool.allocate("k", 40, "a")
    uninstrument(pool)
    assert not recorder.active
    assert pool._journal.maxlen == HISTORY
    pool.free_all("a")
    recorder.keep()
    assert recorder.done
    assert load_trace(path).n_calls == 1
    assert [stats.n_frees for stats in pool.history] == [0, 3]
    instrument(pool)
    pool.allocate("k", 40, "b")
    snapshot = instrument(pool).snapshot()
    assert snapshot is not None and snapshot.n_allocations == 6
    assert len(pool.history) == 3


def test_a_pool_is_recorded_again_after_stop(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """One recorder at a time; stop is idempotent, and a stopped one lets the next begin."""
    first = record(pool)
    with pytest.raises(ValueError, match="recorded already"):
        record(pool)
    pool.allocate("k", 40, "a")
    calls = instrument(pool).hooks.calls()
    first.stop()
    first.stop()
    second = record(pool, tmp_path / "t.vqtrace")
    pool.free_all("a")
    assert instrument(pool).hooks.calls()["free_all"] == calls["free_all"] + 1
    second.stop()
    assert load_trace(tmp_path / "t.vqtrace").n_calls == 1


def test_the_history_is_as_long_as_ever(pool: BlockPoolAllocator) -> None:
    """A longer journal is the recorder's affair."""
    record(pool, capacity=1024)
    for n in range(300):
        pool.allocate("k", 16, n)
        pool.free_all(n)
    assert len(pool.history) == HISTORY
    assert pool.history[-1].n_frees == 300


# -- bounds ---------------------------------------------------------------------------------------


def traffic(pool: BlockPoolAllocator, n: int) -> None:
    """Owners that come and go, single frees of many blocks, refusals."""
    for number in range(n):
        blocks = pool.allocate("k", 16 * 20, f"owner-{number}")
        pool.free(blocks[:15])
        pool.allocate_kv(16, f"owner-{number}", f"format-{number % 7}")
        with pytest.raises(BlockPoolExhaustedError):
            pool.allocate("v", 16 * 9000, f"refused-{number}")
        pool.free_all(f"owner-{number}")


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Whatever is recorded, the ring keeps so many entries, and of dead leases no block lists."""
    pool = BlockPoolAllocator(PoolConfig(16, 1024))
    recorder = record(pool, tmp_path / "t.vqtrace", capacity=256, flush_s=0.0, folder=tmp_path)
    tracemalloc.start()
    try:
        traffic(pool, 1100)
        recorder.flush()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        traffic(pool, 1100)
        recorder.flush()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - held
    finally:
        tracemalloc.stop()
        recorder.stop()
        uninstrument(pool)
    assert grown < 256 << 10  # what is not let go of would take some MB
    assert n_blocks_kept(recorder) == 0  # it has ended


def n_blocks_kept(recorder: Any) -> int:
    """Blocks that the entries of a ring refer to."""
    parts = [entry[2] for entry in recorder._ring.entries if isinstance(entry[2], tuple)]
    return sum(len(run) for part in parts for _, _, run in part if run is not None)


def test_freed_ids_are_bounded_in_all(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """Beyond the budget the oldest go; such a free then counts as one of the last blocks."""
    recorder = record(pool, capacity=256)
    for _ in range(60):
        blocks = pool.allocate("k", 16 * 32, "a")
        pool.free(blocks[:31])
        pool.free_all("a")
    assert 0 < n_blocks_kept(recorder) <= 256 * 4
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    assert 0 < len(trace.picked) < 60
    assert disagreement(trace) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"capacity": 255}, ValueError),
        ({"capacity": True}, ArgumentTypeError),
        ({"capacity": 1 << 30}, ValueError),
        ({"owners": 1}, ArgumentTypeError),
        ({"path": 3}, ArgumentTypeError),
        ({"folder": b"x"}, ArgumentTypeError),
        ({"flush_s": -1}, ValueError),
        ({"dump_pause_s": "60"}, ArgumentTypeError),
        ({"keep": 0}, ValueError),
    ],
)
def test_arguments_are_checked_first(
    pool: BlockPoolAllocator, arguments: dict[str, Any], error: type[Exception]
) -> None:
    """A bad one changes nothing: the journal is as it was."""
    before = pool._journal
    with pytest.raises(error):
        record(pool, **arguments)
    assert pool._journal is before
    with pytest.raises(ArgumentTypeError, match="must be a BlockPoolAllocator"):
        record("pool")  # type: ignore[arg-type]


def test_a_file_that_cannot_be_made_is_an_error_at_once(
    pool: BlockPoolAllocator, tmp_path: Path
) -> None:
    """And the pool is not recorded."""
    with pytest.raises(OSError, match="No such file"):
        record(pool, tmp_path / "missing" / "t.vqtrace")
    assert pool._journal.maxlen == HISTORY
    assert not any(recorder.records(pool) and recorder.active for recorder in keeper.recorders)


def test_what_is_no_file_is_not_replaced_by_one(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """`/dev/null` as a path, by a user who may replace it, must stay what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not to be replaced"):
        record(pool, pipe)
    recorder = record(pool)
    for target, error in ((pipe, OSError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error):
            recorder.dump(target)
    recorder.stop()
    assert pipe.is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_full_disk_leaves_no_half_a_dump(
    pool: BlockPoolAllocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even an empty file, where there was no room for the header."""

    def full(_: int, __: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder = record(pool)
    pool.allocate("k", 16, "a")
    with monkeypatch.context() as patch:
        patch.setattr("veloxquant_mlx.telemetry.trace.writer.os.write", full)
        with pytest.raises(OSError, match="No space left"):
            recorder.dump(tmp_path / "x.vqtrace")
    recorder.stop()
    assert list(tmp_path.iterdir()) == []


def test_dumps_to_one_path_do_not_meddle(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """Two threads at once: whoever ends last is there, and whole."""
    recorder = record(pool)
    for n in range(500):
        pool.allocate("k", 16, n)
        pool.free_all(n)
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(recorder.dump, tmp_path / "x.vqtrace") for _ in range(24)]
        assert [one.result().name for one in done] == ["x.vqtrace"] * 24
    recorder.stop()
    assert load_trace(tmp_path / "x.vqtrace").n_calls == 1000
    assert [path.name for path in tmp_path.iterdir()] == ["x.vqtrace"]


def test_two_pools_do_not_write_to_one_file(pool: BlockPoolAllocator, tmp_path: Path) -> None:
    """The second would take the name away, and the first write on into nothing."""
    path = tmp_path / "day.vqtrace"
    first = record(pool, path)
    other = small_pool(separate=True, grow=False)
    with pytest.raises(ValueError, match="another recorder writes to"):
        record(other, tmp_path / "." / "day.vqtrace")
    pool.allocate("k", 16, "a")
    first.stop()
    assert load_trace(path).n_calls == 1
    record(other, path).stop()
    uninstrument(other)


def test_what_no_file_can_hold_is_replaced(tmp_path: Path) -> None:
    """Half a surrogate pair in a format, and a clock before 1970, keep no trace from being read."""
    pool = small_pool(separate=True, grow=False)
    recorder = record(pool, owners=True)
    pool.allocate("k", 16, "\ud800", "int\ud800")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: -5.0)
        recorder.dump(tmp_path / "x.vqtrace")
    recorder.stop()
    uninstrument(pool)
    trace = load_trace(tmp_path / "x.vqtrace")
    assert (trace.formats, trace.owners, trace.header.began_wall_s) == (("int?",), ("?",), 0.0)


def test_a_folder_of_somebody_else_is_counted_and_logged(
    pool: BlockPoolAllocator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A dump that fails is no business of the serving code."""
    (tmp_path / "file").write_text("")
    recorder = record(pool, folder=tmp_path / "file")
    exhaust(pool)
    recorder.keep()
    assert recorder.errors["dump"] == 1 and recorder.dumps == ()
    assert "dump fails" in caplog.text


def test_snapshot_files_carry_the_last_events(pool: BlockPoolAllocator) -> None:
    """The newest calls of all recorders, as JSON, without owner ids unless asked for."""
    set_event_source(None)
    recorder = record(pool)
    pool.allocate_kv(40, "secret")
    exhaust(pool)
    events = last_events()
    assert [event["outcome"] for event in events[-2:]] == ["ok", "exhausted"]
    assert events[-2]["streams"] == ["k", "v"] and events[-2]["blocks"] == 6
    assert "secret" not in str(events)
    recorder.stop()
    set_event_source(None)


def test_queued_releases_are_recorded_when_they_are_done(
    pool: BlockPoolAllocator, tmp_path: Path
) -> None:
    """A finalizer's release is a call like any other."""
    recorder = record(pool)
    blocks = pool.allocate("k", 40, "a")
    pool.free_held_later(blocks[:1], blocks[0].lease)
    pool.allocate("k", 16, "b")
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    assert [int(n) for n in trace.operation] == [0, 1, 0]
    assert disagreement(trace) is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_call_that_is_interrupted_is_recorded_or_not(
    pool: BlockPoolAllocator, tmp_path: Path, kind: type[BaseException]
) -> None:
    """Ctrl-C inside of the recorder's own code leaves pool and trace whole."""
    recorder = record(pool, capacity=256)
    real = recorder._ring.freed
    struck: list[int] = []

    def strike(entry: Any) -> None:
        struck.append(entry[1])
        if len(struck) == 2:
            raise kind
        real(entry)

    recorder._ring.freed = strike  # type: ignore[method-assign]
    blocks = pool.allocate("k", 16 * 4, "a")
    for block in blocks[:3]:
        try:
            pool.free([block])
        except KeyboardInterrupt:
            assert kind is KeyboardInterrupt
    assert len(struck) == 3 and check_pool(pool) == []
    trace = load_trace(recorder.dump(tmp_path / "t.vqtrace"))
    assert trace.n_calls == 4 and disagreement(trace) is None


def test_threads_and_dumps_go_together(tmp_path: Path) -> None:
    """Dumps in the middle of the calls of several threads are whole each."""
    import threading

    pool = small_pool(separate=True, grow=False, n_blocks=200)
    recorder = record(pool, tmp_path / "c.vqtrace", owners=True, flush_s=0.0, folder=tmp_path)
    threads = [threading.Thread(target=play, args=(pool, history(seed, 400))) for seed in range(3)]
    for thread in threads:
        thread.start()
    for n in range(5):
        trace = load_trace(recorder.dump(tmp_path / f"{n}.vqtrace"))
        assert disagreement(trace) is None
    for thread in threads:
        thread.join()
    recorder.stop()
    trace = load_trace(tmp_path / "c.vqtrace")
    assert disagreement(trace) is None and trace.n_lost == 0
    driver = Driver(trace)
    assert sum(moved.outcome == "ok" for moved in driver.run()) > 100
    assert driver_books(driver) == books(pool)
    uninstrument(pool)
