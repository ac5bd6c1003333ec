"""DirectorySource: who is live, stale, stopped or dead, and what a bad file may cost."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sidecar_help import NO_PID, a_file, put, wait_for
from veloxquant_exporters.sidecar import DirectorySource, check_directory
from veloxquant_exporters.sidecar.directory_source import ERRORS, MAX_ENDED
from veloxquant_exporters.sidecar.snapshot_files import READ_ERRORS
from veloxquant_exporters.sidecar.state import judge
from veloxquant_mlx.telemetry import identity
from veloxquant_mlx.telemetry.identity import ProcessIdentity, own_identity, own_namespace
from veloxquant_mlx.telemetry.snapshot_json import (
    FILE_SUFFIX,
    MAX_FILE_BYTES,
    SnapshotFile,
    encode_file,
)

pytestmark = pytest.mark.timeout(60)

OURS = own_identity()
ELSEWHERE = "another machine/pid:[1]"
RETENTION_S = 900.0


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock at rest."""
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder."""
    path = tmp_path / "snapshots"
    path.mkdir()
    return path


@pytest.fixture
def source(folder: Path, clock: Clock) -> DirectorySource:
    """A source over the folder, with a clock that a test moves."""
    return DirectorySource(folder, retention_s=RETENTION_S, clock=clock)


def ours(**changes: object) -> SnapshotFile:
    """A file of this very process, which lives."""
    return a_file(**{"pid": OURS.pid, "start_time": OURS.start_time, **changes})


def beat(folder: Path, file: SnapshotFile) -> SnapshotFile:
    """The next write of the same process."""
    later = replace(file, header=replace(file.header, sequence=file.header.sequence + 1))
    put(folder, later)
    return later


def states(source: DirectorySource) -> dict[str, int]:
    """The numbers of files by state that are not 0."""
    sizes = source.read().sizes
    return {state: n for state, n in sizes.items() if n and state != "removed"}


# -- states --------------------------------------------------------------------------------------


def test_a_process_that_beats_is_live(folder: Path, source: DirectorySource, clock: Clock) -> None:
    """As long as its sequence moves."""
    file = ours()
    put(folder, file)
    for _ in range(5):
        assert states(source) == {"live": 1}
        clock.now += 2.4
        file = beat(folder, file)
    reading = source.read()
    assert reading.up == {"worker-0": 1}
    assert [process.process for process in reading.processes] == ["worker-0"]


def test_a_process_that_lives_and_is_quiet_is_stale(
    folder: Path, source: DirectorySource, clock: Clock
) -> None:
    """It keeps its series, which say how old they are; live again with the next beat."""
    file = ours()
    put(folder, file)
    source.read()
    clock.now += 2.6
    assert states(source) == {"stale": 1}
    reading = source.read()
    assert reading.up == {"worker-0": 1} and len(reading.processes) == 1
    beat(folder, file)
    assert states(source) == {"live": 1}


def test_a_process_that_hangs_for_the_retention_time_is_dead(
    folder: Path, source: DirectorySource, clock: Clock
) -> None:
    """And comes back if it goes on after all."""
    file = ours()
    put(folder, file)
    source.read()
    clock.now += RETENTION_S + 1
    assert states(source) == {"dead": 1}
    assert source.read().up == {"worker-0": 0}
    beat(folder, file)
    assert states(source) == {"live": 1}


def test_a_process_whose_pid_is_gone_is_dead_at_once(
    folder: Path, source: DirectorySource, clock: Clock
) -> None:
    """What it counted stays; its up is 0 until the retention time ends, then the file goes."""
    path = put(folder, a_file(pid=NO_PID))
    reading = source.read()
    assert reading.up == {"worker-0": 0}
    assert source.dead_processes == {"worker-0"}
    assert reading.processes == ()
    assert source.read_with_dead().processes[0].pools[0].n_allocations == 3
    clock.now += RETENTION_S - 1
    assert source.read().up == {"worker-0": 0} and path.exists()
    clock.now += 2
    assert source.read().up == {} and not path.exists()


def test_pid_reuse_is_seen_by_the_start_time(folder: Path, source: DirectorySource) -> None:
    """The pid runs, but began at another time: that is somebody else."""
    put(folder, ours(start_time=f"{OURS.start_time}0"))
    assert states(source) == {"dead": 1}


def test_a_zombie_is_dead(folder: Path, source: DirectorySource) -> None:
    """It has a pid and the right start time, and will never write again."""
    code = (
        "from veloxquant_mlx.telemetry.identity import *; i = own_identity(); print(i.start_time)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}; import sys; sys.stdout.flush(); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout is not None
        file = a_file(pid=child.pid, start_time=child.stdout.readline().strip())
        put(folder, file)
        assert states(source) == {"live": 1}
        child.send_signal(signal.SIGKILL)
        wait_for(lambda: states(source) == {"dead": 1}, "the zombie is seen")
        assert child.returncode is None, "nobody has waited for it: it is a zombie"
    finally:
        child.communicate()


def test_EPERM_is_not_death(folder: Path, source: DirectorySource, clock: Clock,
                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A process that may not be looked at is judged by its silence alone."""

    def denied(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(identity, "_start_time", lambda pid: None)
    monkeypatch.setattr(os, "kill", denied)
    put(folder, ours())
    assert states(source) == {"live": 1}
    clock.now += 2.6
    assert states(source) == {"dead": 1}


def test_a_pid_of_another_namespace_is_not_asked(
    folder: Path, source: DirectorySource, clock: Clock
) -> None:
    """Two containers that both say pid 1: both live while they beat, each dies by its silence."""
    one = a_file(pid=1, start_time="1", pid_namespace="m/pid:[1]", process="a")
    two = a_file(pid=1, start_time="1", pid_namespace="m/pid:[2]", process="b")
    put(folder, one)
    put(folder, two)
    assert states(source) == {"live": 2}
    clock.now += 2
    beat(folder, two)
    source.read()
    clock.now += 0.6
    assert source.read().up == {"a": 0, "b": 1}


def test_an_old_file_from_elsewhere_is_not_taken_for_live(
    folder: Path, source: DirectorySource
) -> None:
    """After a sidecar's restart, hours later; it shows itself within an interval if it lives."""
    file = a_file(pid_namespace=ELSEWHERE)
    path = put(folder, file)
    os.utime(path, (1e9, 1e9))
    assert states(source) == {"dead": 1}
    beat(folder, file)
    assert states(source) == {"live": 1}


@pytest.mark.parametrize("year", [1990, 2090])
def test_clock_steps_change_nothing(
    folder: Path, source: DirectorySource, clock: Clock, year: int
) -> None:
    """The writer's wall clock is not asked, nor the file's time."""
    file = ours(born_s=0.0)
    path = put(folder, file)
    stamp = (year - 1970) * 365.25 * 86400
    os.utime(path, (stamp, stamp))
    assert states(source) == {"live": 1}
    clock.now += 2
    os.utime(beat_path(folder, file), (1.0, 1.0))
    assert states(source) == {"live": 1}


def beat_path(folder: Path, file: SnapshotFile) -> Path:
    """The path of the next write."""
    beat(folder, file)
    return folder / f"{file.header.identity.random_id}{FILE_SUFFIX}"


def test_a_stopped_process_leaves_at_once(folder: Path, source: DirectorySource) -> None:
    """No series, and no up that is 0: nothing is wrong."""
    file = ours()
    put(folder, file)
    assert source.read().up == {"worker-0": 1}
    put(folder, replace(file, header=replace(file.header, state="stopped", sequence=2)))
    reading = source.read()
    assert (reading.processes, reading.up) == ((), {})
    assert [found.state for found in source.files("worker-0")] == ["stopped"]


@given(
    st.sampled_from(["running", "stopped"]),
    st.sampled_from(["alive", "gone", "reused", "elsewhere", "unsaid"]),
    st.floats(0, 10),
)
def test_the_state_follows_a_table(state: str, who: str, quiet: float) -> None:
    """By what the file says, who runs, and how many intervals it has been quiet."""
    given_by = {
        "alive": OURS,
        "gone": replace(OURS, pid=NO_PID),
        "reused": replace(OURS, start_time="0"),
        "elsewhere": replace(OURS, pid_namespace=ELSEWHERE),
        "unsaid": replace(OURS, start_time=""),
    }[who]
    header = replace(a_file().header, state=state, identity=given_by)
    if state == "stopped":
        expected = "stopped"
    elif who in ("gone", "reused"):
        expected = "dead"
    elif quiet <= 2.5:
        expected = "live"
    else:
        expected = "stale" if who == "alive" else "dead"
    assert judge(header, quiet, own_namespace(), RETENTION_S) == expected


# -- names ---------------------------------------------------------------------------------------


def test_E10_of_two_live_processes_of_one_name_the_newest_counts(
    folder: Path, source: DirectorySource, caplog: pytest.LogCaptureFixture
) -> None:
    """The clash is counted and logged, once, and the page stays one that can be read."""
    put(folder, ours(process="api", born_s=1.0, random_id="f" * 16))
    newer = ours(process="api", born_s=2.0, random_id="0" * 16)
    newer = replace(newer, snapshot=replace(newer.snapshot, sequence=4711))
    put(folder, newer)
    for _ in range(3):
        reading = source.read()
        assert [process.sequence for process in reading.processes] == [4711]
        assert reading.up == {"api": 1} and reading.errors["clash"] == 1
    assert len([record for record in caplog.records if "clash" in record.message]) == 1


def test_a_successor_takes_the_place_of_a_dead_one(folder: Path, source: DirectorySource) -> None:
    """A restart under the same name: up is 1, no clash, and the dead one's snapshot can be had."""
    put(folder, a_file(process="api", born_s=5.0))
    put(folder, ours(process="api", born_s=1.0))
    reading = source.read()
    assert reading.up == {"api": 1} and reading.errors["clash"] == 0
    assert source.dead_processes == frozenset()
    assert [file.state for file in source.files("api")] == ["live", "dead"]


# -- bad files -----------------------------------------------------------------------------------


def _make_garbage(text: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(text)

    return make


def _make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _make_link(path: Path) -> None:
    target = path.parent.parent / "target"
    target.write_bytes(encode_file(ours()))
    path.symlink_to(target)


WHOLE = encode_file(ours(process="whole"))
BAD: dict[str, tuple[str, Callable[[Path], None]]] = {
    "empty": ("empty", lambda path: path.touch()),
    "cut in the header": ("invalid", _make_garbage(WHOLE[:100])),
    "cut in the body": ("invalid", _make_garbage(WHOLE[:-100])),
    "garbage": ("invalid", _make_garbage(secrets.token_bytes(5000))),
    "other JSON": ("invalid", _make_garbage(b'{"a": 1}')),
    "long first line": ("invalid", _make_garbage(b'{"header":' + b" " * 9000 + b"\n")),
    "oversized": ("oversized", lambda path: os.truncate(_touched(path), MAX_FILE_BYTES + 1)),
    "huge and sparse": ("oversized", lambda path: os.truncate(_touched(path), 2**40)),
    "another version": (
        "version",
        _make_garbage(WHOLE.replace(b'"schema":1', b'"schema":9', 1)),
    ),
    "FIFO": ("not_a_file", os.mkfifo),
    "symlink": ("not_a_file", _make_link),
    "dangling symlink": ("not_a_file", lambda path: path.symlink_to("nowhere")),
    "symlink to itself": ("not_a_file", lambda path: path.symlink_to(path.name)),
    "folder": ("not_a_file", Path.mkdir),
    "socket": ("not_a_file", _make_socket),
}


def _touched(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_costs_only_itself(
    kind: str, folder: Path, source: DirectorySource, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted by reason, once a version and not at each scrape; its neighbours do not notice."""
    reason, make = BAD[kind]
    put(folder, ours(process="good"))
    make(folder / f"bad{FILE_SUFFIX}")
    caplog.set_level(logging.WARNING, "veloxquant_exporters.sidecar")
    for _ in range(3):
        reading = source.read()
        assert reading.up["good"] == 1
        assert [process.process for process in reading.processes] == ["good"]
        assert {name: n for name, n in reading.errors.items() if n} == {reason: 1}
        assert reading.sizes["unreadable"] == 1
    assert len(caplog.records) == 1
    assert (folder / f"bad{FILE_SUFFIX}").is_symlink() or (folder / f"bad{FILE_SUFFIX}").exists()


def test_all_bad_files_at_once(folder: Path, source: DirectorySource) -> None:
    """And the folder is clean again when they are gone."""
    for n, (_, make) in enumerate(BAD.values()):
        make(folder / f"bad-{n}")
    reading = source.read()
    assert sum(reading.errors.values()) == len(BAD) == reading.sizes["unreadable"]
    assert set(reading.errors) == set(ERRORS) >= set(READ_ERRORS)


def test_a_bad_file_that_becomes_whole_is_read(folder: Path, source: DirectorySource) -> None:
    """And the other way round."""
    path = folder / f"a{FILE_SUFFIX}"
    path.write_bytes(WHOLE[:50])
    assert source.read().up == {}
    path.write_bytes(WHOLE)
    assert source.read().up == {"whole": 1}
    path.write_bytes(b"")
    reading = source.read()
    assert (reading.up, reading.errors["empty"], reading.errors["invalid"]) == ({}, 1, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=5),
       st.integers(0, len(WHOLE)))  # fmt: skip
def test_reading_never_raises(changes: list[tuple[int, int]], length: int) -> None:
    """Whatever has become of a file."""
    import tempfile

    damaged = bytearray(WHOLE)
    for place, value in changes:
        damaged[place] = value
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"a{FILE_SUFFIX}").write_bytes(damaged[:length])
        reading = DirectorySource(folder).read()
    assert len(reading.up) + sum(reading.errors.values()) >= 1


def test_hidden_files_are_none_of_its_business(folder: Path, source: DirectorySource) -> None:
    """Locks, and what other programs keep there."""
    (folder / ".worker-0.lock").touch()
    (folder / ".hidden").write_text("x")
    assert sum(source.read().errors.values()) == 0


# -- the folder ----------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_logged_once(
    folder: Path, source: DirectorySource, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted at each look, logged at the first; found again when it is back."""
    folder.rmdir()
    for n in range(1, 4):
        assert source.read().errors["directory"] == n
    assert len(caplog.records) == 1
    put(folder, ours())
    assert source.read().up == {"worker-0": 1}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    source.read()
    assert len(caplog.records) == 2, "another outage is another line"


def test_E14_many_dead_files_are_cleaned_up(folder: Path, source: DirectorySource) -> None:
    """The newest stay for their time, the rest goes; their number is told."""
    for n in range(300):
        put(folder, a_file(process=f"worker-{n}"))
    reading = source.read()
    assert len(reading.up) == MAX_ENDED == len(list(folder.iterdir()))
    assert reading.sizes["dead"] == MAX_ENDED
    assert reading.sizes["removed"] == 300 - MAX_ENDED


def test_the_temporary_file_of_a_killed_writer_goes(
    folder: Path, source: DirectorySource, clock: Clock
) -> None:
    """When nobody has touched it for a minute."""
    left = folder / f".a{FILE_SUFFIX}.tmp"
    left.write_text("half")
    source.read()
    clock.now += 59
    source.read()
    assert left.exists()
    clock.now += 2
    source.read()
    assert not left.exists()


def test_a_file_that_cannot_be_removed_leaves_the_page(
    folder: Path, source: DirectorySource, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that may only read: counted, and nothing of it is shown for ever."""

    def denied(path: str) -> None:
        raise PermissionError(13, "denied", path)

    monkeypatch.setattr(os, "unlink", denied)
    put(folder, a_file())
    source.read()
    clock.now += RETENTION_S + 1
    for _ in range(2):
        reading = source.read()
        assert reading.up == {} and reading.errors["cleanup"] == 1


def test_a_folder_that_does_not_answer_keeps_nobody_waiting(
    folder: Path, source: DirectorySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that hangs: the last reading, and it is counted."""
    monkeypatch.setattr("veloxquant_exporters.sidecar.directory_source.WAIT_S", 0.01)
    put(folder, ours())
    before = source.read()
    with source._lock:
        assert source.read().up == before.up
    assert source.read().errors["busy"] == 1


def test_it_looks_by_itself_while_started(folder: Path) -> None:
    """So that a silence between two scrapes is noticed."""
    with DirectorySource(folder) as source:
        put(folder, a_file(interval_s=0.05))
        wait_for(lambda: [file.state for file in source.files()] == ["dead"], "a look")


# -- check ---------------------------------------------------------------------------------------


def test_check_tells_of_every_file(folder: Path) -> None:
    """State, fault and clash; and changes nothing."""
    put(folder, ours(process="a"), "a1")
    put(folder, ours(process="a"), "a2")
    put(folder, a_file(process="b"), "b")
    put(folder, ours(process="c", state="stopped"), "c")
    (folder / "d").touch()
    report = check_directory(folder)
    found = {file.name: file.state or file.fault for file in report.files}
    assert found == {"a1": "live", "a2": "live", "b": "dead", "c": "stopped", "d": "empty"}
    assert report.clashes == ("a",) and not report.ok
    assert len(list(folder.iterdir())) == 5


def test_check_can_wait_for_a_beat(folder: Path) -> None:
    """A process of another namespace that does not beat is dead after its intervals."""
    put(folder, a_file(pid_namespace=ELSEWHERE, interval_s=0.05), "a")
    assert [file.state for file in check_directory(folder).files] == ["live"]
    assert [file.state for file in check_directory(folder, watch_s=5).files] == ["dead"]


def test_check_says_that_there_is_no_folder(tmp_path: Path) -> None:
    """As a fault of the report, not an exception."""
    report = check_directory(tmp_path / "nowhere")
    assert "nowhere" in report.fault and not report.ok and report.files == ()


def test_identity_without_a_start_time_is_unknown() -> None:
    """A reader cannot tell, and says so."""
    unsaid = ProcessIdentity(os.getpid(), "", "0" * 16, own_namespace())
    assert identity.liveness(unsaid, own_namespace()) == "unknown"
    assert identity.liveness(OURS, own_namespace()) == "alive"
    assert identity.liveness(OURS, "") == "unknown"
