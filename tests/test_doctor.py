"""`vqmon doctor`: each thing that can be wrong, made so for real, and what is said of it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("click", reason="the extra cli")
pytest.importorskip("prometheus_client", reason="the extra prometheus")

from tests.real_prometheus import running_prometheus, until
from tests.sidecar_help import ROOT, Sidecar, Worker, a_file, environment, put
from veloxquant_exporters.cli.group import run
from veloxquant_exporters.doctor import CHECKS, Settings, checks, clashes, device, examine
from veloxquant_exporters.doctor import environment as environment_check
from veloxquant_exporters.doctor import folder as folder_check
from veloxquant_exporters.doctor import pools as pools_check
from veloxquant_exporters.doctor import ports as ports_check
from veloxquant_exporters.doctor import prometheus as prometheus_check
from veloxquant_exporters.doctor.board_queries import boards, rule_names
from veloxquant_exporters.doctor.prometheus_api import ApiError, PrometheusApi, seconds
from veloxquant_exporters.doctor.versions import parse_requirement, version_key
from veloxquant_exporters.findings import Finding
from veloxquant_mlx.telemetry.snapshot_json import SnapshotFile

pytestmark = pytest.mark.timeout(60)

Said = pytest.CaptureFixture[str]


def texts(findings: Iterator[Finding] | list[Finding], *levels: str) -> list[str]:
    """Level and text of findings, of some levels or all."""
    return [f"{f.level} {f.what}" for f in findings if not levels or f.level in levels]


def one(findings: Iterator[Finding] | list[Finding], text: str) -> Finding:
    """The one finding whose text has this in it."""
    found = list(findings)
    wanted = [finding for finding in found if text in finding.what]
    assert len(wanted) == 1, found
    return wanted[0]


# -- the table of checks --------------------------------------------------------------------------


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; what was found before it raised is kept; and the code is 1."""

    def find(_: Settings) -> Iterator[Finding]:
        yield Finding("ok", "this much")
        raise RuntimeError("sick\x1b[31m")

    monkeypatch.setattr(device, "find", find)
    monkeypatch.setattr(checks, "CHECKS", [c for c in CHECKS if c.name in ("device", "ports")])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    results = {check.name: found for check, found in examine(Settings(ports=(port,)))}
    first, failed = results["device"]
    assert (first.what, failed.level) == ("this much", "problem")
    assert failed.what == "the check 'device' itself failed: RuntimeError: sick\\x1b[31m"
    assert results["ports"][0].level == "ok"


def test_a_module_of_another_package_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of ours that fails is the clash that the doctor is there for."""

    def find(_: Settings) -> Iterator[Finding]:
        raise ImportError("cannot import name 'x'", name="veloxquant_mlx.telemetry")

    monkeypatch.setattr(device, "find", find)
    (found,) = next(c for c in CHECKS if c.name == "device").find(Settings())
    assert "veloxquant_mlx is not as it should be" in found.what
    assert "--force-reinstall" in found.fix


def test_every_finding_that_is_bad_says_how_to_mend_it(tmp_path: Path, capsys: Said) -> None:
    """As JSON, with every key, in a folder with all kinds of trouble; code 1."""
    folder = tmp_path / "snapshots"
    put(folder, a_file())
    folder.chmod(0o777)
    (folder / "garbage.snapshot.json").write_text("{}")
    assert run(["doctor", "--json", "--snapshot-dir", str(folder), "--port", "1"]) == 1
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["ok"], said.err) == (False, "")
    assert {"check", "level", "what", "why", "fix"} == set(report["findings"][0])
    bad = [f for f in report["findings"] if f["level"] in ("warning", "problem")]
    assert len(bad) >= 3
    assert [f for f in bad if not f["fix"]] == []
    names = {f["check"] for f in report["findings"]}
    assert names == {check.name for check in CHECKS} - {"prometheus"}


def test_text_ends_in_a_count(capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """A title a check, the reason and the fix below what was found; no problem is code 0."""

    def find(_: Settings) -> Iterator[Finding]:
        yield Finding("warning", "it creaks", "old", "oil it\nor not")

    monkeypatch.setattr(device, "find", find)
    monkeypatch.setattr(checks, "CHECKS", [c for c in CHECKS if c.name == "device"])
    assert run(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "MLX",
        "warning  it creaks",
        "         why: old",
        "         fix: oil it",
        "              or not",
        "",
        "1 warning",
    ]


# -- environment and libraries --------------------------------------------------------------------


def test_this_environment_is_as_it_should_be() -> None:
    """Python, platform, distribution, libraries: nothing worse than a note."""
    wanted = ("environment", "clashes", "libraries")
    for check in CHECKS:
        if check.name in wanted:
            found = check.find(Settings())
            assert found
            assert texts(found, "warning", "problem") == []


def test_a_variable_with_a_slip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nothing reads is likely meant as something that is read."""
    monkeypatch.setenv("VELOXQUANT_SNAPSHOTS_DIR", "/run/x")
    found = one(environment_check.find(Settings()), "VELOXQUANT_SNAPSHOTS_DIR")
    assert (found.level, found.why) == ("warning", "did you mean VELOXQUANT_SNAPSHOT_DIR?")


def test_pages_that_findings_name_are_there() -> None:
    """A fix that sends the reader to a page which does not exist is none."""
    rooms = [ROOT / "exporters" / "veloxquant_exporters" / name for name in ("check", "doctor")]
    texts_of = [path.read_text("utf-8") for room in rooms for path in room.rglob("*.py")]
    named = {page for text in texts_of for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert len(named) > 5
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_the_variables_are_those_that_the_code_reads() -> None:
    """None forgotten, none made up."""
    sources = [*(ROOT / "veloxquant_mlx").rglob("*.py"), *(ROOT / "exporters").rglob("*.py")]
    named = {name for path in sources for name in
             re.findall(r"[\"'](VELOXQUANT_[A-Z_]+[A-Z])[\"']", path.read_text("utf-8"))}  # fmt: skip
    assert set(environment_check.VARIABLES) == named - {"VELOXQUANT_SNAPSHOTS_DIR"}


@pytest.mark.parametrize(
    ("bounds", "version", "side"),
    [
        (">=8.1,<9", "8.1", "within"),
        (">=8.1,<9", "8.1.0", "within"),
        (">=8.1,<9", "8.1rc1", "below"),
        (">=8.1,<9", "8.0.9", "below"),
        (">=8.1,<9", "9", "above"),
        (">=8.1,<9", "9.0.dev1", "above"),
        (">=0.57b0,<1", "0.57b0", "within"),
        (">=0.57b0,<1", "0.57", "within"),
        (">=0.57b0,<1", "0.56b2", "below"),
        (">=1.36,<2", "1.36.0.post1", "within"),
        (">=0.32,<0.33", "0.32.4+cpu", "within"),
        ("==1.2", "1.3", "above"),
        ("==1.2", "1.1", "below"),
        (">1", "1", "below"),
        ("", "3", "within"),
    ],
)
def test_where_a_version_lies(bounds: str, version: str, side: str) -> None:
    """Against bounds as packaging writes them."""
    need = parse_requirement(f"name{bounds}; extra == 'x'")
    assert need is not None
    assert (need.name, need.extra, need.side(version)) == ("name", "x", side)


@pytest.mark.parametrize("text", ["", "a>=", "a@https://x", "a~=1.2", "a>=1.*"])
def test_a_requirement_that_we_do_not_use_is_none(text: str) -> None:
    """Nothing is said of a bound that was not understood."""
    assert parse_requirement(text) is None


def test_versions_are_ordered_as_packaging_orders_them() -> None:
    """Where that library is there to be asked."""
    version = pytest.importorskip("packaging.version").Version
    some = ["1", "1.0a1", "1.0b2", "1.0rc1", "1.0.1", "2.0", "1.10", "1.9", "1.0.dev3", "0.57b0"]
    assert sorted(some, key=version_key) == sorted(some, key=version)


# -- clashes: real folders, in a process of its own -----------------------------------------------


def distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Files in a folder as an installer leaves them, with metadata that say so."""
    record = []
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{path},sha256={digest.decode()},{len(text.encode())}")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join([*record, f"{info.name}/RECORD,,", ""]))


def doctor_says(folder: Path, *more: Path) -> dict[str, dict[str, str]]:
    """The findings on clashes of a process that has these folders on its path, by text."""
    code = (
        "import json\n"
        "from veloxquant_exporters.doctor import CHECKS, Settings\n"
        "(check,) = [c for c in CHECKS if c.name == 'clashes']\n"
        "print(json.dumps([[f.level, f.what, f.why, f.fix] for f in check.find(Settings())]))"
    )
    path = os.pathsep.join(map(str, (folder, *more)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(), "PYTHONPATH": path},
        cwd=folder,  # -c puts it first
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)
    return {what: {"level": level, "why": why, "fix": fix} for level, what, why, fix in rows}


CHECKOUT = (ROOT, ROOT / "exporters")


def test_the_peer_beside_us_is_told(tmp_path: Path) -> None:
    """Its metadata say so, wherever its files are; the fix removes it and mends us."""
    distribution(tmp_path, "veloxquant-mlx", "0.9", {"veloxquant_mlx/extra.txt": "x"})
    said = doctor_says(*CHECKOUT, tmp_path)
    (what,) = (what for what in said if "veloxquant-mlx 0.9 is installed" in what)
    assert said[what]["level"] == "problem"
    assert said[what]["fix"].startswith("pip uninstall -y veloxquant-mlx && pip install ")


def test_a_folder_that_comes_first_is_told(tmp_path: Path) -> None:
    """Python takes another's package, although ours is there."""
    distribution(
        tmp_path, "x", "1", {"veloxquant_mlx/__init__.py": "", "exporters/__init__.py": ""}
    )
    said = doctor_says(tmp_path, *CHECKOUT)
    assert any(what.startswith(f"veloxquant_mlx is imported from {tmp_path}") for what in said)
    (what,) = (what for what in said if "top-level package `exporters`" in what)
    assert "of the package x" in what
    assert said[what]["level"] == "note"


def test_files_that_another_overwrote_or_removed_are_told(tmp_path: Path) -> None:
    """After the peer was installed over us, and after it was uninstalled again."""
    ours = {f"veloxquant_mlx/{name}.py": f"# {name}\n" for name in ("__init__", "a", "b", "c")}
    distribution(tmp_path, "veloxquant-mlx-monitor", "0.1.0", ours)
    (tmp_path / "veloxquant_mlx/a.py").write_text("# another's")
    (tmp_path / "veloxquant_mlx/b.py").unlink()
    said = doctor_says(tmp_path, *CHECKOUT)
    assert "1 files of veloxquant_mlx are missing: veloxquant_mlx/b.py" in said
    assert "1 files of veloxquant_mlx are not as they were installed: veloxquant_mlx/a.py" in said


def test_without_our_package_the_doctor_still_runs(tmp_path: Path) -> None:
    """The whole command, where the peer's files have replaced ours: problems, and no traceback."""
    (tmp_path / "veloxquant_mlx").mkdir()
    (tmp_path / "veloxquant_mlx/__init__.py").write_text("__version__ = '9'\n")
    (tmp_path / "veloxquant_exporters").symlink_to(ROOT / "exporters" / "veloxquant_exporters")
    done = subprocess.run(
        [sys.executable, "-c", "from veloxquant_exporters.cli import main; main()",
         "doctor", "--json", "--snapshot-dir", str(tmp_path)],
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    whats = [finding["what"] for finding in report["findings"] if finding["level"] == "problem"]
    assert any("is imported from" in what for what in whats), whats
    assert any("veloxquant_mlx is not as it should be" in what for what in whats), whats


def test_the_version_is_read_and_not_run(tmp_path: Path) -> None:
    """A package of a stranger's is looked at, no more."""
    (tmp_path / "__init__.py").write_text('raise SystemExit\n\n__version__ = "3"\n')
    assert clashes._version(tmp_path) == "3"
    assert clashes._version(tmp_path / "nowhere") == ""


# -- MLX ------------------------------------------------------------------------------------------


@pytest.fixture
def fake_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file `mlx/core.py` of a package that a child process imports instead of MLX."""
    core = tmp_path / "mlx" / "core.py"
    core.parent.mkdir()
    (core.parent / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return core


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "ends the process with SIGSEGV",
        ),
        ("import os; os.abort()", "ends the process with SIGABRT"),
        ("raise ImportError('libmlx.so: no such file')", "does not work: ImportError: libmlx.so"),
        ("import sys; sys.exit(3)", "is installed and does not work"),
        ("import time; time.sleep(600)", "does not compute a sum within 0.5 s"),
        ("print('noise')", "does not work: AttributeError"),
        ("raise SystemExit(0)", "is installed and does not work"),
    ],
)
def test_mlx_that_crashes_or_hangs_is_a_finding(fake_mlx: Path, program: str, text: str) -> None:
    """And costs the doctor no more than its timeout."""
    fake_mlx.write_text(program)
    timeout_s = 0.5 if "sleep" in program else 30.0
    monkey = Settings(device_timeout_s=timeout_s)
    (found,) = device.find(monkey)
    assert text in found.what
    assert (found.level, bool(found.fix)) == ("problem", True)


@pytest.mark.parametrize("reply", ["[]", "{", "null", '{"sum": 1, "version": "9"}'])
def test_what_a_child_says_is_not_believed_blindly(reply: str) -> None:
    """Whatever comes after the mark."""
    said = device.ask(f"print({device._MARK + reply!r})", 30.0)
    found = list(device._computed(said.found)) if said.found else [device._fault(said, 1)]
    assert found[0].level == "problem"


def test_the_real_mlx_computes() -> None:
    """Where it is installed."""
    pytest.importorskip("mlx.core")
    assert "computes on" in texts(device.find(Settings()), "ok")[0]


# -- ports ----------------------------------------------------------------------------------------


def test_a_port_is_free_taken_or_ours(tmp_path: Path) -> None:
    """Taken by a stranger, who is named; by an exporter of ours, which is fine; and by nobody."""
    with socket.socket() as sock, Sidecar(tmp_path / "none") as sidecar:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        theirs = sock.getsockname()[1]
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            free = other.getsockname()[1]
        patience, ports_check._ASK_S = ports_check._ASK_S, 0.2
        try:
            ours, stranger, nobody = ports_check.find(Settings(ports=(sidecar.port, theirs, free)))
        finally:
            ports_check._ASK_S = patience
    assert (ours.level, stranger.level, nobody.level) == ("ok", "warning", "ok")
    assert ours.what.startswith(f"port {sidecar.port} is taken")
    assert stranger.what.startswith(f"port {theirs} is taken")
    if sys.platform == "linux":  # elsewhere only root is told
        assert f"by process {sidecar.process.pid}" in ours.what
        assert "by this process itself" in stranger.what
    assert "--port 0" in stranger.fix
    assert nobody.what == f"port {free} is free"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may have any port")
def test_a_port_of_roots_is_told() -> None:
    """Below 1024."""
    (found,) = ports_check.find(Settings(ports=(81,)))
    assert (found.level, "81" in found.what) == ("problem", True)


# -- the folder and its pools ---------------------------------------------------------------------


def folder_says(path: Path) -> list[Finding]:
    """The findings on a snapshot folder."""
    return list(folder_check.find(Settings(snapshot_dir=str(path))))


def test_no_folder_one_to_come_and_what_is_none(tmp_path: Path) -> None:
    """Notes, and a problem."""
    assert next(iter(folder_check.find(Settings()))).level == "note"
    assert one(folder_says(tmp_path / "later"), "does not exist yet").level == "note"
    (tmp_path / "file").touch()
    assert one(folder_says(tmp_path / "file"), "is no folder").level == "problem"
    assert one(folder_says(tmp_path / "file" / "in"), "cannot be looked at").level == "problem"


@pytest.mark.parametrize(
    ("mode", "level", "text"),
    [
        (0o777, "problem", "and delete what others wrote"),
        (0o1777, "warning", "everyone may write into"),
        (0o770, "note", "new files get the group of who writes them"),
        (0o2770, "ok", "mode 2770"),
        (0o750, "ok", "mode 0750"),
    ],
)
def test_modes_that_let_strangers_in(tmp_path: Path, mode: int, level: str, text: str) -> None:
    """World-writable, sticky, without the group's bit, and two that are right."""
    tmp_path.chmod(mode)
    try:
        found = folder_says(tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert one(found, text).level == level
    bad = texts(found, "warning", "problem")
    assert bool(bad) == (level in ("warning", "problem"))


AS_NOBODY = """
import os, sys, json
from veloxquant_exporters.doctor import Settings, folder
from veloxquant_exporters.check import snapshot_folder
from veloxquant_exporters.sidecar import check
from veloxquant_mlx.telemetry import json_codec
os.setgroups([]); os.setgid(65534); os.setuid(65534)
found = folder.find(Settings(snapshot_dir=sys.argv[1]))
print(json.dumps([f"{f.level} {f.what}" for f in found]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (0o700, "problem this user cannot read"),
        (0o755, "note this user cannot write into"),
    ],
)
def test_another_user_is_told_what_it_may_not(mode: int, text: str) -> None:
    """A sidecar's user and the servers' need not be one."""
    # Not below pytest's folder, which is for one user alone at every level.
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        folder = Path(above) / "snapshots"
        put(folder, a_file())
        folder.chmod(mode)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(folder)],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
    assert any(line.startswith(text) for line in json.loads(done.stdout)), done.stdout


def test_a_folder_of_which_nothing_can_be_read_is_not_ok(tmp_path: Path) -> None:
    """The count of the files is not said to be as it should be."""
    (tmp_path / "bad.snapshot.json").write_text("{")
    assert one(folder_says(tmp_path), "snapshot files: 1 unreadable").level == "note"


def test_dead_stale_and_unreadable_files_are_told(tmp_path: Path) -> None:
    """A worker that lives, one that hangs, one that died, garbage, and what a writer left."""
    put(tmp_path, a_file(process="dead"))
    (tmp_path / "bad.snapshot.json").write_text("{")
    left = tmp_path / ".x.snapshot.json.tmp"
    left.touch()
    os.utime(left, (time.time() - 7200,) * 2)
    with Worker(tmp_path, "alive"):
        found = folder_says(tmp_path)
    assert one(found, "snapshot files: 1 dead, 1 live, 1 unreadable").level == "ok"
    assert one(found, "dead; main").fix
    assert one(found, "bad.snapshot.json: cannot be read").level == "problem"
    assert one(found, "1 temporary files").level == "note"


def with_pool(file: SnapshotFile, **changes: object) -> SnapshotFile:
    """The file with changes to its one pool."""
    (pool,) = file.snapshot.pools
    changed = replace(pool, **changes)  # type: ignore[arg-type]
    return replace(file, snapshot=replace(file.snapshot, pools=(changed,)))


def test_settings_of_pools_that_will_bite(tmp_path: Path) -> None:
    """Unbounded growth; one block for two streams; refused allocations; broken books."""
    base = a_file()
    (pool,) = base.snapshot.pools
    empty = {**pool.streams, "v": replace(pool.streams["v"], managed=0, free=0)}
    put(tmp_path, with_pool(a_file(process="a"), grow_on_exhaustion=True, max_blocks=None))
    put(tmp_path, with_pool(a_file(process="b"), streams=empty, name="one\x1b"))
    put(tmp_path, with_pool(a_file(process="c"), n_exhausted=7))
    put(tmp_path, with_pool(a_file(process="d"), invariant_violations={"owners": 2}))
    put(tmp_path, with_pool(a_file(process="e"), n_pools=3, name="other"))
    found = list(pools_check.find(Settings(snapshot_dir=str(tmp_path))))
    growing = one(found, "pool 'main' of 'a' may grow without a bound")
    assert (growing.level, "max_blocks none" in growing.why) == ("warning", True)
    assert "max_blocks=N" in growing.fix
    lacking = one(found, "stream v has none of its 8 blocks")
    assert lacking.level == "problem"
    assert "\\x1b" in lacking.what
    assert one(found, "7 allocations failed").level == "note"
    assert one(found, "its books broken 2 times").level == "problem"
    assert one(found, "3 pools are summed").level == "note"
    assert one(found, "looked at 5 pools").level == "ok"


def test_a_folder_without_pools_says_how_to_get_some(tmp_path: Path) -> None:
    """A note."""
    found = one(pools_check.find(Settings(snapshot_dir=str(tmp_path))), "no pool is published")
    assert "instrument(pool)" in found.fix


# -- Prometheus -----------------------------------------------------------------------------------


def prometheus_says(url: str) -> list[Finding]:
    """The findings on a server."""
    return list(prometheus_check.find(Settings(prometheus=url)))


def test_a_real_prometheus_with_an_exporter_of_ours(tmp_path: Path) -> None:
    """Reachable, scraped, four boards of five have data, and the rules are missed."""
    folder = tmp_path / "snapshots"
    put(folder, with_pool(a_file(process="open"), grow_on_exhaustion=True, max_blocks=None))
    with Worker(folder, "w") as worker, Sidecar(folder) as sidecar:
        worker.do("load()")
        targets = (f"127.0.0.1:{sidecar.port}", "127.0.0.1:1")
        with running_prometheus(tmp_path, *targets) as server:
            until(lambda: server.values("rate(veloxquant_block_pool_allocations_total[5m])"))
            until(lambda: server.values('up{instance="127.0.0.1:1"} == 0'))
            found = prometheus_says(server.url)
    assert one(found, "answers at http://127.0.0.1:").level == "ok"
    assert one(found, "job 'veloxquant' brings metrics of 1 instance").level == "ok"
    down = one(found, "target 127.0.0.1:1 of job 'veloxquant' is down")
    assert (down.level, down.fix) == ("problem", "vqmon check http://127.0.0.1:1/metrics")
    assert "vqmon export rules" in one(found, "alert rules is loaded").fix
    assert one(found, "recording rules is loaded").level == "warning"
    told = [finding for finding in found if finding.what.startswith("board ")]
    assert len(told) == 6
    assert [f.what for f in told if f.level in ("warning", "problem")] == []
    assert ": 0 of " in one(told, "Benchmarks").what


@contextmanager
def api(answers: Mapping[str, object]) -> Iterator[str]:
    """A server that answers a Prometheus API call as told; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix("/api/v1/").partition("?")[0]
            body = answers.get(path, {"status": "error", "errorType": "e", "error": "no"})
            self.send_response(200 if path in answers else 404)
            self.end_headers()
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ok(data: object) -> dict[str, object]:
    """An answer of the API."""
    return {"status": "success", "data": data}


HEALTHY = {
    "status/buildinfo": ok({"version": "2.99"}),
    "query": ok(
        {
            "resultType": "vector",
            "result": [{"metric": {"job": "mlx", "instance": "i", "pool": "p"}, "value": [0, "1"]}],
        }
    ),
    "targets": ok(
        {
            "activeTargets": [
                {
                    "labels": {"job": "mlx", "instance": "i"},
                    "health": "up",
                    "lastError": "",
                    "scrapeInterval": "1m30s",
                    "scrapeUrl": "http://i/metrics",
                }
            ]
        }
    ),
}


def rules(*changes: Mapping[str, object]) -> dict[str, object]:
    """All rules of ours as a server gives them, the first ones changed."""
    names = sorted(set().union(*rule_names().values()))
    rows: list[dict[str, object]] = [{"name": name, "health": "ok"} for name in names]
    for row, change in zip(rows, changes, strict=False):
        row.update(change)
    return ok({"groups": [{"rules": rows}]})


def test_slow_scrapes_odd_jobs_and_rules_that_fail_are_told() -> None:
    """With a server that says so."""
    sick = {"health": "err", "lastError": "parse error"}
    loud = {"state": "firing", "annotations": {"runbook_url": "https://x/y.md"}}
    with api({**HEALTHY, "rules": rules(sick, loud)}) as url:
        found = prometheus_says(url)
    assert "scrape_interval: 15s" in one(found, "is scraped every 90 s").fix
    assert one(found, "does not hold veloxquant").fix.endswith("--job mlx")
    assert one(found, "cannot be evaluated: parse error").level == "problem"
    assert one(found, "is firing").fix == "https://x/y.md"
    assert one(found, "alert rules are loaded").level == "ok"
    assert one(found, "pool 'p' at i may grow without a bound").level == "warning"
    assert sum(finding.what.startswith("board ") for finding in found) == 6


def test_rules_of_an_older_version_are_told() -> None:
    """Some are there, and some are not."""
    names = sorted(rule_names()["alert"])
    some = ok({"groups": [{"rules": [{"name": name} for name in names[3:]]}]})
    with api({**HEALTHY, "rules": some}) as url:
        found = one(prometheus_says(url), f"3 of {len(names)} alert rules are not loaded")
    assert names[0] in found.what


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b'{"status":"success"}', b'{"status":"success","data":3}',
     b"[" * 100_000, b"\xff"],
)  # fmt: skip
def test_what_is_no_prometheus_is_one_finding(body: bytes) -> None:
    """Whatever it answers."""
    with api({"status/buildinfo": body}) as url:
        (found,) = prometheus_says(url)
    assert found.level == "problem"
    assert "is no Prometheus" in found.what


def test_a_server_that_scrapes_nothing_of_ours_is_told_how_to() -> None:
    """With the lines to write."""
    answers = {**HEALTHY, "targets": ok({"activeTargets": []}), "rules": rules()}
    with api({**answers, "query": ok({"resultType": "vector", "result": []})}) as url:
        found = one(prometheus_says(url), "no job of it scrapes an exporter of ours")
    assert "job_name: veloxquant" in found.fix


@pytest.mark.parametrize("junk", [None, 3, "x", [None], {"activeTargets": [3, {"labels": 3}]}, {}])
def test_half_an_api_breaks_nothing(junk: object) -> None:
    """What speaks some of the API, and that in its own way, raises nothing out of the check."""
    answers = {**HEALTHY, "targets": ok(junk), "rules": ok(junk), "query": ok(junk)}
    check = next(c for c in CHECKS if c.name == "prometheus")
    with api(answers) as url:
        found = check.find(Settings(prometheus=url))
    assert one(found, "Prometheus 2.99 answers").level == "ok"


def test_nobody_there_is_one_finding() -> None:
    """And a password is not shown."""
    (found,) = prometheus_says("http://user:secret@127.0.0.1:1/")
    assert found.what.startswith("nothing listens at http://127.0.0.1:1/")


@pytest.mark.parametrize("url", ["nonsense", "", "127.0.0.1:9090", "ftp://user:secret@host/"])
def test_what_is_no_address_is_told_as_it_was_typed(url: str) -> None:
    """Without the paths that are asked there, without the password, and with a Prometheus' address."""
    (found,) = prometheus_says(url)
    assert found.what == f"{url.replace('user:secret@', '').rstrip('/')!r} is no address"
    assert "http://127.0.0.1:9090" in found.fix


def test_a_refused_expression_is_told_apart() -> None:
    """From a server that is away."""
    with api({}) as url, pytest.raises(ApiError, match="e: no") as caught:
        PrometheusApi(url).query("x(")
    assert caught.value.bad_query is False


@pytest.mark.parametrize(
    ("text", "value"), [("15s", 15), ("1m30s", 90), ("250ms", 0.25), ("1h", 3600), ("", None), ("x", None), ("5", None)]
)  # fmt: skip
def test_durations(text: str, value: float | None) -> None:
    """As Prometheus writes them."""
    assert seconds(text) == value


def test_boards_and_rules_are_found_whole() -> None:
    """Six boards; no variable is left in an expression; rules of both kinds."""
    found = boards(300)
    assert len(found) == 6
    queries = [query for board in found for query in board.queries]
    assert len(queries) > 50
    assert [query for query in queries if "$" in query.expression] == []
    ours = [query for query in queries if query.metrics]
    assert len(queries) - len(ours) < 5  # of Prometheus itself: up, scrape_samples_scraped
    assert all(len(names) > 5 for names in rule_names().values())


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_ctrl_c_ends_the_doctor_and_all_that_it_started(fake_mlx: Path, tmp_path: Path) -> None:
    """While MLX hangs: code 130, no traceback, and neither a child nor a grandchild is left."""
    note = tmp_path / "pids"
    fake_mlx.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} {{child.pid}} .')\n"
        "time.sleep(600)\n"
    )
    env = {**environment()}
    env["PYTHONPATH"] = os.pathsep.join([str(fake_mlx.parent.parent), env["PYTHONPATH"]])
    with subprocess.Popen(
        [sys.executable, "-m", "veloxquant_exporters.cli", "doctor"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        until(lambda: note.exists() and note.read_text().endswith("."))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    for pid in note.read_text().split()[:2]:
        until(lambda pid=int(pid): gone(pid), 10)  # type: ignore[misc]
