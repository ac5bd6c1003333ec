"""The publisher: files that are whole, a heartbeat, and nothing that reaches the serving code."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecar_help import INTERVAL_S, ROOT, Worker, a_file, environment, put, wait_for
from veloxquant_mlx.core.exceptions import ArgumentTypeError
from veloxquant_mlx.telemetry import publish, registry, snapshot_publisher
from veloxquant_mlx.telemetry.publisher import Publisher, set_event_source, stop_publishing
from veloxquant_mlx.telemetry.snapshot_json import FILE_SUFFIX, SnapshotFile, parse_file

pytestmark = pytest.mark.timeout(60)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@pytest.fixture(autouse=True)
def nobody_publishes() -> Iterator[None]:
    """Each test begins and ends without a publisher."""
    stop_publishing()
    yield
    set_event_source(None)
    stop_publishing()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that does not exist yet."""
    return tmp_path / "snapshots"


def read(publisher: Publisher) -> SnapshotFile:
    """What it wrote last."""
    assert publisher.path is not None
    return parse_file(publisher.path.read_bytes())


def started(folder: Path, worker: str | None = None) -> Publisher:
    """A publisher of this process that has written once."""
    publisher = publish(folder, INTERVAL_S, worker)
    wait_for(lambda: publisher.n_written, "the first write")
    return publisher


def files(folder: Path) -> list[Path]:
    """The snapshot files, temporary ones apart."""
    return sorted(folder.glob(f"[!.]*{FILE_SUFFIX}"))


def one_file(folder: Path) -> SnapshotFile:
    """The only snapshot file."""
    (path,) = files(folder)
    return parse_file(path.read_bytes())


def test_a_file_says_who_wrote_it_and_beats(folder: Path) -> None:
    """Identity, state, and a sequence that rises."""
    publisher = started(folder)
    first = read(publisher).header
    assert (first.state, first.process, first.interval_s) == ("running", "worker-0", INTERVAL_S)
    assert first.identity == publisher.identity and first.identity.pid == os.getpid()
    assert first.identity.start_time and first.identity.pid_namespace
    wait_for(lambda: read(publisher).header.sequence > first.sequence + 1, "the heartbeat")
    publisher.stop()
    assert read(publisher).header.state == "stopped"
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []


def test_stopping_twice_and_publishing_again_work(folder: Path) -> None:
    """The slot is free again, and the new publisher is another identity."""
    publisher = started(folder)
    publisher.stop()
    publisher.stop()
    again = started(folder)
    assert again.process == "worker-0"
    assert again.identity.random_id != publisher.identity.random_id
    assert one_file_of(folder, again).header.state == "running"


def one_file_of(folder: Path, publisher: Publisher) -> SnapshotFile:
    """The file of this publisher, one of those in the folder."""
    assert publisher.path in files(folder)
    return read(publisher)


def test_asking_again_gives_the_same_publisher(folder: Path) -> None:
    """And asking for something else says what is there."""
    publisher = started(folder)
    assert publish(folder, INTERVAL_S) is publisher
    with pytest.raises(ValueError, match="publishes already, with interval"):
        publish(folder, 7.0)
    with pytest.raises(ValueError, match="publishes already, with directory"):
        publish(folder / "other", INTERVAL_S)
    with pytest.raises(ValueError, match="publishes already, with worker"):
        publish(folder, INTERVAL_S, "another")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", 1.0, None), ValueError),
        ((5, 1.0, None), ArgumentTypeError),
        (("x", 0, None), ValueError),
        (("x", float("nan"), None), ValueError),
        (("x", "1", None), ArgumentTypeError),
        (("x", True, None), ArgumentTypeError),
        (("x", 1.0, 5), ArgumentTypeError),
        (("x", 1.0, "a\nb"), ValueError),
        (("x", 1.0, "a" * 129), ValueError),
    ],
)
def test_a_wrong_argument_is_told_and_starts_nothing(
    arguments: tuple[object, ...], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread, no folder."""
    monkeypatch.delenv("VELOXQUANT_SNAPSHOT_DIR", raising=False)
    before = threading.active_count()
    with pytest.raises(error):
        publish(*arguments)  # type: ignore[arg-type]
    assert threading.active_count() == before and not Path("x").exists()


def test_modes_are_set_on_purpose(folder: Path) -> None:
    """0750 and 0640 under a umask that takes all, and one that takes nothing."""
    for umask in (0o077, 0o000):
        before = os.umask(umask)
        try:
            publisher = started(folder)
        finally:
            os.umask(before)
        assert publisher.path is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
        assert stat.S_IMODE(publisher.path.stat().st_mode) == 0o640
        publisher.stop()
        shutil.rmtree(folder)


def test_a_folder_that_exists_keeps_its_mode(folder: Path) -> None:
    """An operator set it so that a sidecar of another group can read."""
    folder.mkdir()
    folder.chmod(0o2775)
    started(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2775


def test_slots_are_the_lowest_free_ones(folder: Path) -> None:
    """By locks of processes: a slot is free again when its process ends, however it does."""
    with Worker(folder) as first, Worker(folder) as second, Worker(folder) as third:
        workers = (first, second, third)
        assert [w.do("publisher.process") for w in workers] == ["worker-0", "worker-1", "worker-2"]
        second.kill()
        with Worker(folder) as fourth:
            assert fourth.do("publisher.process") == "worker-1"


def test_a_given_name_is_the_label(folder: Path) -> None:
    """And nothing of it reaches the file system but what is safe there."""
    publisher = started(folder, "../api é")
    assert publisher.path is not None and publisher.path.parent == folder
    assert read(publisher).header.process == "../api é"


def test_files_stay_few_without_a_sidecar(folder: Path) -> None:
    """A process that dies again and again leaves its last file, not one each."""
    for _ in range(3):
        with Worker(folder) as worker:
            worker.kill()
    with Worker(folder):
        assert len(files(folder)) == 2
        assert len(list(folder.glob(".worker-*.lock"))) == 1


def test_predecessors_of_a_given_name_go_only_if_they_ended(folder: Path) -> None:
    """There is no lock on a name: another live process may have it."""
    for number in range(3):
        put(folder, a_file(process="api"), f"api.dead{number}{FILE_SUFFIX}")
    alive = a_file(process="api", pid=os.getpid(), start_time=own_start())
    put(folder, alive, f"api.alive{FILE_SUFFIX}")
    started(folder, "api")
    names = [path.name for path in files(folder)]
    assert f"api.alive{FILE_SUFFIX}" in names
    assert len([name for name in names if name.startswith("api.dead")]) == 1


def own_start() -> str:
    """When this process began."""
    from veloxquant_mlx.telemetry.identity import own_identity

    return own_identity().start_time


def test_a_clean_exit_says_stopped(folder: Path) -> None:
    """Without a call: at the end of the interpreter."""
    with Worker(folder) as worker:
        worker.do("pool.allocate('kv', 160, 1) and None")
        worker.leave()
    last = one_file(folder)
    assert last.header.state == "stopped"
    assert last.snapshot.pools[0].n_allocations == 10


def test_an_end_by_an_exception_says_stopped(folder: Path) -> None:
    """The interpreter ends in order then, too."""
    with Worker(folder) as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.write("raise SystemError('on purpose')\n")
        worker.process.stdin.flush()
        assert worker.process.wait(20) == 1
    assert one_file(folder).header.state == "stopped"


def test_a_child_of_multiprocessing_says_stopped(folder: Path) -> None:
    """It ends without atexit, and is another identity than its parent."""
    code = f"""
import multiprocessing, threading
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.telemetry import instrument, publish
def serve():
    pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
    instrument(pool)
    from veloxquant_mlx.telemetry import publisher
    while publisher._current[0].n_written < 2:
        threading.Event().wait(0.01)
if __name__ == "__main__":
    publish({str(folder)!r}, {INTERVAL_S})
    child = multiprocessing.get_context("fork").Process(target=serve)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=50)
    found = {parse_file(path.read_bytes()).header.process: parse_file(path.read_bytes())
             for path in files(folder)}  # fmt: skip
    assert set(found) == {"worker-0", "worker-1"}
    assert [file.header.state for file in found.values()] == ["stopped", "stopped"]
    assert len({file.header.identity.pid for file in found.values()}) == 2


FORK = """
child = os.fork()
if child == 0:
    used and pool.allocate("kv", 16, 99)
    while used and not publisher.n_written:
        threading.Event().wait(0.005)
    not used and threading.Event().wait(4 * publisher.interval)
    os._exit(0)
"""


@pytest.mark.parametrize("used", [True, False])
def test_a_forked_child_is_somebody_else_or_silent(folder: Path, used: bool) -> None:
    """It has another identity and slot once it uses a pool; its parent goes on as it was."""
    with Worker(folder, "api") as worker:
        worker.do(f"used = {used}")
        before = json.loads(worker.do("print(end='') or __import__('json').dumps("
                                      "publisher.identity.random_id)"))  # fmt: skip
        worker.do(f"exec({FORK!r})")
        worker.do("os.waitpid(child, 0)")
        worker.do("beats()")
        found = [parse_file(path.read_bytes()).header for path in files(folder)]
        parent = next(header for header in found if header.process == "api")
        assert parent.identity.random_id == before and parent.identity.pid == worker.pid
        children = [header for header in found if header.process != "api"]
        assert [header.process for header in children] == (["worker-0"] if used else [])
        for header in children:
            assert header.identity.pid not in (worker.pid, 0)
            assert header.identity.random_id != before


def test_forks_under_load_neither_hang_nor_stop_the_parent(folder: Path) -> None:
    """A fork may come while the publishing thread holds whatever it holds."""
    with Worker(folder) as worker:
        worker.do("load()")
        child = "if not os.fork():\n    take_snapshot()\n    os._exit(0)\nos.wait()"
        for _ in range(20):
            worker.do(f"exec({child!r})")
        worker.do("beats()")


def test_E12_a_folder_set_late_works_for_the_children(folder: Path) -> None:
    """Imported first, set later, then forked: each child publishes under a slot of its own."""
    child = """
pool = BlockPoolAllocator(PoolConfig(n_blocks=64))
instrument(pool, name="late")
from veloxquant_mlx.telemetry import publisher
while not publisher._current[0].n_written:
    threading.Event().wait(0.005)
stop_publishing()
os._exit(0)
"""
    with Worker(None) as worker:
        worker.do(f"os.environ['VELOXQUANT_SNAPSHOT_DIR'] = {str(folder)!r}")
        worker.do(f"child = {child!r}")
        worker.do("children = [os.fork() or exec(child) for _ in range(3)]")
        worker.do("[os.waitpid(child, 0) for child in children]")
    found = [parse_file(path.read_bytes()) for path in files(folder)]
    assert found and {file.header.state for file in found} == {"stopped"}
    assert {file.header.process for file in found} <= {"worker-0", "worker-1", "worker-2"}
    assert len(list(folder.iterdir())) <= 2 * 3 + 3, "two files a slot at most, and its lock"


def test_the_environment_is_enough(folder: Path) -> None:
    """A process publishes from its first watched pool on, and not before."""
    env = {"VELOXQUANT_SNAPSHOT_DIR": str(folder), "VELOXQUANT_WORKER": "by-env"}
    with Worker(None, env=env) as worker:
        wait_for(lambda: files(folder), "the first file")
        worker.leave()
    assert one_file(folder).header.process == "by-env"
    code = "import veloxquant_mlx.telemetry as t, threading; threading.Event().wait(0.2)"
    shutil.rmtree(folder)
    subprocess.run([sys.executable, "-c", code], env={**environment(), **env}, check=True)
    assert not folder.exists()


def test_publishing_imports_no_exporter() -> None:
    """Nor MLX: the serving process pays for what it uses."""
    code = (
        "import sys, veloxquant_mlx.telemetry.publisher;"
        "sys.exit(any(m.split('.')[0] in ('veloxquant_exporters', 'mlx', 'prometheus_client')"
        " for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, cwd=ROOT)


def test_a_full_disk_costs_the_file_only(folder: Path) -> None:
    """Counted, logged once, the last whole file stays, and it goes on by itself."""
    with Worker(folder) as worker:
        worker.do("import logging, resource; logs = []; "
                  "handler = logging.Handler(); handler.emit = lambda r: logs.append(r); "
                  "logging.getLogger('veloxquant_mlx').addHandler(handler)")  # fmt: skip
        worker.do(f"resource.setrlimit(resource.RLIMIT_FSIZE, (100, {resource.RLIM_INFINITY}))")
        wait_for(lambda: int(worker.do("publisher.errors['disk_full']")) >= 3, "failures")
        whole = one_file(folder)
        assert whole.header.state == "running"
        assert not list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))
        assert worker.do("len(pool.allocate('kv', 160, 1))") == "10"
        assert worker.do("len(logs)") == "1"
        worker.do("resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)")
        worker.do("beats()")
        now = one_file(folder)
        assert now.header.sequence > whole.header.sequence
        assert now.snapshot.errors["publish_disk_full"] >= 3
        assert now.snapshot.pools[0].n_allocations == 10


@ROOT_ONLY
def test_a_small_tmpfs_that_fills_up(folder: Path) -> None:
    """The same with a disk that really is full."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        publisher = started(folder)
        filler = folder / ".filler"
        with pytest.raises(OSError, match="space"):
            filler.write_bytes(bytes(2**20))
        wait_for(lambda: publisher.errors["disk_full"] >= 2, "failures")
        assert read(publisher).header.state == "running"
        filler.unlink()
        seen = publisher.n_written
        wait_for(lambda: publisher.n_written > seen, "the next write")
    finally:
        stop_publishing()
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_goes_comes_back(folder: Path) -> None:
    """Removed under it: made anew, under the same label."""
    publisher = started(folder)
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        seen = publisher.n_written
        wait_for(lambda: publisher.n_written > seen + 1, "writes into the new folder")  # noqa: B023
        assert publisher.process == "worker-0" and one_file(folder).header.process == "worker-0"
    assert (folder / ".worker-0.lock").exists()


def test_a_folder_that_another_process_made_anew(folder: Path) -> None:
    """The slot's lock is taken again, so that a newcomer does not get the label."""
    publisher = started(folder)
    folder.rename(folder.with_name("away"))
    folder.mkdir()
    wait_for((folder / ".worker-0.lock").exists, "the slot taken anew")
    with Worker(folder) as worker:
        assert worker.do("publisher.process") == "worker-1"
    assert publisher.process == "worker-0"


def test_a_path_that_is_no_folder_is_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged once, whatever the number of attempts; it goes on when the folder can be made."""
    folder.write_text("in the way")
    with caplog.at_level(logging.INFO, "veloxquant_mlx.telemetry"):
        publisher = publish(folder, INTERVAL_S)
        wait_for(lambda: sum(publisher.errors.values()) >= 4, "failures")
        assert len(caplog.records) == 1
        folder.unlink()
        wait_for(lambda: publisher.n_written, "the first write")
    assert "goes on" in caplog.records[-1].message


@ROOT_ONLY
def test_a_folder_without_permission_is_counted(folder: Path) -> None:
    """As another user, who may not write there; then may."""
    folder.mkdir()
    folder.chmod(0o755)
    for parent in list(folder.parents)[:4]:
        parent.chmod(parent.stat().st_mode | 0o755) if parent.stat().st_uid == 0 else None
    with Worker(None) as worker:
        worker.do("os.setuid(65534)")
        worker.do(f"publisher = publish({str(folder)!r}, {INTERVAL_S})")
        wait_for(lambda: int(worker.do("publisher.errors['permission_denied']")) >= 2, "failures")
        assert worker.do("len(pool.allocate('kv', 160, 1))") == "10"
        folder.chmod(0o777)
        worker.do("beats()")
        assert one_file(folder).snapshot.errors["publish_permission_denied"] >= 2


def test_a_file_that_would_be_too_large_is_cut_to_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events go first, then pools; what was left out is counted."""
    set_event_source(lambda: [{"op": "x" * 100}] * 50)
    monkeypatch.setattr(snapshot_publisher, "MAX_FILE_BYTES", 4000)
    publisher = started(folder)
    assert publisher.path is not None
    assert publisher.path.stat().st_size <= 4000
    assert publisher.errors["oversized"] >= 1
    assert read(publisher).events == ()
    assert read(publisher).snapshot.dropped["pools_unpublished"] == 0


def test_events_of_a_recorder_go_with_the_file(folder: Path) -> None:
    """The last ones; a source that fails costs the events only."""
    set_event_source(lambda: [{"n": n} for n in range(100)])
    publisher = started(folder)
    assert read(publisher).events[-1] == {"n": 99} and len(read(publisher).events) == 64
    set_event_source(lambda: [{"n": object()}])
    wait_for(lambda: read(publisher).events == (), "a file without events")
    assert publisher.errors["snapshot"] >= 1


def test_a_snapshot_that_fails_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread outlives it, and the heartbeat stops: so a reader sees that something is wrong."""
    publisher = started(folder)

    def fail() -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(registry, "take_snapshot", fail)
    wait_for(lambda: publisher.errors["snapshot"] >= 2, "failures")
    monkeypatch.undo()
    seen = publisher.n_written
    wait_for(lambda: publisher.n_written > seen, "the next write")


def test_what_publishing_costs_is_counted(folder: Path) -> None:
    """With the overhead of the telemetry, which a file of an idle process shows rising."""
    publisher = started(folder)
    first = read(publisher).snapshot.overhead_s
    wait_for(lambda: read(publisher).snapshot.overhead_s > first, "a higher figure")
    assert registry.take_snapshot().overhead_s < read(publisher).snapshot.overhead_s


def test_resource_attributes_go_with_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenTelemetry reads them from the environment."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=a, team=k%20v,broken")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    found = read(started(folder)).resource
    assert found["service.name"] == "chat" and found["team"] == "k v"
    assert found["process.pid"] == str(os.getpid()) and "broken" not in found


def test_a_killed_writer_leaves_a_whole_file(folder: Path) -> None:
    """Whenever the kill comes."""
    for _ in range(5):
        with Worker(folder) as worker:
            worker.do("load()")
            worker.send(signal.SIGKILL)
            worker.process.wait()
        assert all(parse_file(path.read_bytes()) for path in files(folder))
