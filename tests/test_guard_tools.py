"""The tools around the guard: comparing, publishing, profiling, and `vqmon bench`."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.guard import compare, flame, publish, suite
from benchmarks.guard.compare import main as compared
from benchmarks.guard.publish import main as published
from benchmarks.guard.ratios import paired
from benchmarks.guard.worktrees import ROOT, RevisionError, checkout, resolve
from veloxquant_exporters.bench.document import SCHEMA, machine
from veloxquant_exporters.bench.survey import shape, survey
from veloxquant_exporters.bench.target import TargetError, load

DAY_S = 86_400


def run_of(factor: float, at_s: int = 1_700_000_000, **more: Any) -> dict[str, Any]:
    """A guard document with one benchmark, `factor` times as slow as that of factor 1."""
    times = {
        "sizes": [1024, 4096],
        "target_s": [1e-6 * factor, 4e-6 * factor],
        "median_s": [2e-6 * factor, 5e-6 * factor],
        "twin_s": [],
    }
    return {
        "schema": SCHEMA,
        "created_s": at_s + 5.0,
        "commit": {"id": f"{at_s:040x}", "time_s": at_s, "dirty": False},
        "machine": machine(),
        "ok": True,
        "benchmarks": {"allocate": {"status": "pass", "figures": {}, "times": times}},
    } | more


def stored(folder: Path, name: str, document: Any) -> str:
    """The path of a JSON file."""
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return str(path)


# -- comparing ----------------------------------------------------------------------------------


def test_G06_comparing_files_can_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A known slowdown is exit code 1, none is 0, and the ratio is printed."""
    base, same, slow = (
        stored(tmp_path, name, run_of(factor))
        for name, factor in (("base.json", 1.0), ("same.json", 1.1), ("slow.json", 2.0))
    )
    assert compared(["files", base, same]) == 0
    assert compared(["files", base, slow]) == 1
    assert "2.000" in capsys.readouterr().out
    assert compared(["files", slow, base]) == 0


def test_G06_other_machines_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of different interpreters or processors need a word of consent."""
    base = stored(tmp_path, "base.json", run_of(1.0))
    other = run_of(1.0)
    other["machine"] = {**other["machine"], "python": "3.99.0"}
    head = stored(tmp_path, "head.json", other)
    assert compared(["files", base, head]) == 2
    assert "3.99.0" in capsys.readouterr().err
    assert compared(["files", base, head, "--any-machine"]) == 0


def test_G07_a_run_is_not_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Explicit paths only, and two different ones."""
    base = stored(tmp_path, "base.json", run_of(1.0))
    assert compared(["files", base, str(tmp_path / "." / "base.json")]) == 2
    assert "with itself" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compared(["files", base])


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/9", "benchmarks": {}}'])
def test_G01_a_corrupt_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """Exit code 2, and the message has the file's name."""
    base = stored(tmp_path, "base.json", run_of(1.0))
    bad = stored(tmp_path, "corrupt.json", text)
    assert compared(["files", base, bad]) == 2
    assert "corrupt.json" in capsys.readouterr().err
    assert compared(["files", base, str(tmp_path / "missing.json")]) == 2


def test_a_benchmark_missing_from_the_newer_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A renamed benchmark is not skipped in silence."""
    newer = run_of(1.0)
    newer["benchmarks"] = {"renamed": newer["benchmarks"]["allocate"]}
    base = stored(tmp_path, "base.json", run_of(1.0))
    assert compared(["files", base, stored(tmp_path, "head.json", newer)]) == 2
    assert "allocate" in capsys.readouterr().err


def test_pytest_benchmark_files_are_read(tmp_path: Path) -> None:
    """Its JSON compares and publishes like our own, by calls a round."""

    def document(factor: float) -> dict[str, Any]:
        stats = {"min": 4e-6 * factor, "median": 6e-6 * factor}
        sized = {"name": "test_x[1024]", "extra_info": {"n_blocks": 1024, "calls": 4}}
        return {
            "machine_info": {"python": "3", "machine": "x", "cpu": {"brand_raw": "a", "hz": factor}},
            "commit_info": {"id": "a" * 40, "time": "2023-11-14T22:13:20+00:00"},
            "benchmarks": [{**sized, "stats": stats}, {**sized, "name": "y", "extra_info": {}, "stats": stats}],
        }  # fmt: skip

    base, slow = (stored(tmp_path, f"{f}.json", document(f)) for f in (1.0, 3.0))
    assert compared(["files", base, slow]) == 1
    out = tmp_path / "bench.om"
    assert published([base, "--openmetrics", str(out)]) == 0
    text = out.read_text("utf-8")
    assert 'benchmark="test_x",n_blocks="1024",stat="min"} 1e-06 1700000000.000' in text
    assert 'benchmark="y",n_blocks="0"' in text


def test_an_interval_holds_the_ratio() -> None:
    """Pairs that agree give a narrow interval, pairs that do not a wide one; one pair gives none."""
    sure = paired([math.log(2.0), math.log(2.02), math.log(1.98), math.log(2.0)])
    assert sure.low < 2.0 < sure.high
    assert sure.slower_than(1.9)
    unsure = paired([math.log(1.0), math.log(3.0), math.log(0.7), math.log(4.0)])
    assert unsure.value > 1.15
    assert not unsure.slower_than(1.15)
    with pytest.raises(ValueError, match="2 pairs"):
        paired([0.0])


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small repository with three commits of the allocator: as it is, the same, and linear."""
    if shutil.which("git") is None:
        pytest.skip("git is not there")
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "veloxquant_mlx", folder / "veloxquant_mlx")

    def git(*args: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(folder), *who, *args], check=True, capture_output=True)

    git("init", "--quiet")
    git("add", "-A")
    git("commit", "--quiet", "-m", "as it is")
    git("commit", "--quiet", "--allow-empty", "-m", "the same")
    pool = folder / "veloxquant_mlx" / "memory" / "block_pool.py"
    with pool.open("a", encoding="utf-8") as source:
        source.write(
            "\n\nclass _Slow(BlockPoolAllocator):\n"
            "    def free_all(self, owner):\n"
            "        for block in self.blocks_for(owner):\n"
            "            block.n_used\n"
            "        super().free_all(owner)\n\n\n"
            "_Slow.__name__ = 'BlockPoolAllocator'\n"
            "BlockPoolAllocator = _Slow\n"
        )
    git("commit", "--quiet", "-am", "slow")
    return folder


def test_two_commits_are_compared_in_worktrees(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a fresh clone: the slower commit is exit code 1 with its interval, and nothing is left over."""
    monkeypatch.setattr(compare, "resolve", lambda rev: resolve(rev, clone))
    monkeypatch.setattr(compare, "checkout", lambda revs: checkout(revs, clone))
    out = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "benchmarks.guard.plot", None)
    common = ["commits", "--runs", "2", "--only", "free_all", "--threshold", "3", "--out", str(out)]
    assert compared([*common, "--base", "HEAD~1"]) == 1
    assert "SLOWER" in capsys.readouterr().out
    ratio = json.loads((out / "compare.json").read_text("utf-8"))["ratios"]["free_all"]
    assert ratio["low"] > 3
    assert compared([*common, "--base", "HEAD", "--head", "HEAD~1"]) == 0
    listed = subprocess.run(
        ["git", "-C", str(clone), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1
    assert compared([*common, "--base", "no-such-rev"]) == 2
    assert "no-such-rev" in capsys.readouterr().err


def test_a_shallow_clone_is_told_what_it_lacks(clone: Path, tmp_path: Path) -> None:
    """The message says how to fetch the history."""
    shallow = tmp_path / "shallow"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", clone.as_uri(), str(shallow)], check=True
    )
    with pytest.raises(RevisionError, match="unshallow"):
        resolve("HEAD~1", shallow)


# -- publishing ---------------------------------------------------------------------------------


def promtool(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool, or skip."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not there")
    return subprocess.run(
        [program, *args], input=stdin, capture_output=True, text=True, check=False
    )


def test_the_textfile_is_what_the_collector_takes(tmp_path: Path) -> None:
    """Lint-clean, no timestamps, the newest run and the comparison; every name in the catalogue."""
    runs = [
        stored(tmp_path, f"{day}.json", run_of(1.0 + day, 1_700_000_000 + day * DAY_S))
        for day in range(2)
    ]
    ratios = stored(
        tmp_path, "compare.json", {"ratios": {"allocate": {"ratio": 1.5, "low": 1, "high": 2}}}
    )
    out = tmp_path / "bench.prom"
    assert published([*runs, "--compare", ratios, "--textfile", str(out)]) == 0
    text = out.read_text("utf-8")
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(len(line.rpartition("} ")[2].split()) == 1 for line in samples)
    assert 'veloxquant_bench_regression_ratio{benchmark="allocate"} 1.5' in samples
    assert 'duration_seconds{benchmark="allocate",n_blocks="1024",stat="min"} 2e-06' in text
    assert list(tmp_path.glob(".*")) == []
    done = promtool("check", "metrics", stdin=text)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_history_backfills(tmp_path: Path) -> None:
    """promtool makes blocks of it, each run at the time of its commit."""
    start = int(time.time()) - 40 * DAY_S
    runs = [
        stored(tmp_path, f"{day}.json", run_of(1.0, start + day * 10 * DAY_S)) for day in (2, 0, 1)
    ]
    out = tmp_path / "history.om"
    assert published([*runs, "--openmetrics", str(out)]) == 0
    text = out.read_text("utf-8")
    assert text.endswith("# EOF\n")
    assert text.count("# TYPE veloxquant_bench_duration_seconds gauge") == 1
    done = promtool("tsdb", "create-blocks-from", "openmetrics", str(out), str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "data").iterdir())) == 3


def test_a_run_without_commit_has_no_place_in_a_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named, with exit code 2; a label that needs escaping is escaped."""
    path = stored(tmp_path, "a.json", run_of(1.0, commit=None))
    assert published([path, "--openmetrics", str(tmp_path / "a.om")]) == 2
    assert "commit" in capsys.readouterr().err
    text = publish.textfile([("guard_ok", ('a"b\\',), 1.0)])
    assert 'benchmark="a\\"b\\\\"' in text
    with pytest.raises(KeyError, match="catalogue"):
        publish.textfile([("made_up", ("a",), 1.0)])


def test_the_slowest_benchmark_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flame page names the allocator's own functions."""
    pytest.importorskip("pyinstrument", reason="pyinstrument belongs to the group 'bench'")
    monkeypatch.setattr(flame, "WATCHED_S", 0.02)
    page = tmp_path / "flame.html"
    assert flame.main([stored(tmp_path, "a.json", run_of(1.0)), "--out", str(page)]) == 0
    assert "taking.py" in page.read_text("utf-8")


# -- any allocator ------------------------------------------------------------------------------


def test_any_allocator_is_measured() -> None:
    """A plain list pool: its linear calls are called so, what it lacks is left out and named."""
    verdicts, notes = survey(
        "veloxquant_exporters.bench.reference:ListPool",
        only=["free_all", "mark_used", "registration"],
        rounds=2,
        quick=True,
    )
    shapes = {verdict.name: shape(verdict) for verdict in verdicts}
    assert "linear" in shapes["free_all"]
    assert "constant" in shapes["mark_used"]
    assert [note for note in notes if "register_owner" in note]


def test_what_telemetry_does_not_watch_is_left_out() -> None:
    """An allocator of another package has no hooks to be measured with, and keeps its own figures."""
    verdicts, notes = survey(
        "veloxquant_exporters.bench.reference:ListPool",
        only=["mark_used", "telemetry_snapshot"],
        rounds=2,
        quick=True,
    )
    assert [verdict.name for verdict in verdicts] == ["mark_used"]
    assert [note for note in notes if "telemetry watches no such pool" in note]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nocolon", "module:factory"),
        ("no.such.module:x", "cannot be loaded"),
        ("math:nothing", "cannot be loaded"),
        ("math:pi", "not callable"),
        ("builtins:list", "makes no pool"),
        ("builtins:range", "without allocate"),
        ("math:sqrt", "without allocate"),
    ],
)
def test_a_target_that_is_none_says_why(target: str, why: str) -> None:
    """Wrong spelling, wrong module, wrong name, and what is no allocator."""
    with pytest.raises(TargetError, match=why):
        load(target)


def test_the_command_measures_and_judges(tmp_path: Path) -> None:
    """`vqmon bench` prints shapes, writes JSON, and with --check a fault is exit code 1."""
    pytest.importorskip("click", reason="the command belongs to the extra 'cli'")
    from click.testing import CliRunner

    from veloxquant_exporters.cli.bench import command

    runner = CliRunner()
    path = tmp_path / "run.json"
    fault = ["--target", "tests.planted.linear:VisitsEveryBlock", "--only", "free_all", "--quick"]
    done = runner.invoke(
        command, [*fault, "--rounds", "2", "--out", str(path)], standalone_mode=False
    )
    assert done.return_value == 0
    assert "free_all: linear in blocks an owner" in done.output
    assert json.loads(path.read_text("utf-8"))["target"].endswith("VisitsEveryBlock")
    done = runner.invoke(command, [*fault, "--rounds", "2", "--check"], standalone_mode=False)
    assert done.return_value == 1
    done = runner.invoke(command, ["--only", "no_such"])
    assert done.exit_code == 1
    assert "no_such" in done.output


def test_G03_unit_tests_need_no_benchmark_plugin() -> None:
    """With warnings as errors, tests are collected without pytest-benchmark, xdist or timeout."""
    without = ["-p", "no:benchmark", "-p", "no:xdist", "-p", "no:timeout"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "--collect-only", *without,
         "tests/test_guard.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# -- the suites ---------------------------------------------------------------------------------


def bench(tmp_path: Path, *options: str, file: str = "bench_snapshots.py") -> Any:
    """Run one suite in a process of its own."""
    pytest.importorskip("pytest_benchmark", reason="the suites are of the group 'bench'")
    out = tmp_path / "suite.json"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"benchmarks/{file}",
         "-o", "python_files=bench_*.py", f"--benchmark-json={out}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


def test_G09_G12_a_suite_says_what_a_round_was(tmp_path: Path) -> None:
    """The table, then calls a round; rounds are given, so that nothing is calibrated for a second."""
    done = bench(tmp_path, "-k", "test_take")
    assert done.returncode == 0, done.stdout
    assert "what a round was" in done.stdout
    assert "calls a round (minimum of 30)" in done.stdout
    found = json.loads((tmp_path / "suite.json").read_text("utf-8"))
    assert {one["stats"]["rounds"] for one in found["benchmarks"]} == {30}
    assert {one["stats"]["iterations"] for one in found["benchmarks"]} == {1}
    assert "node" not in found["machine_info"]
    assert suite.main([str(tmp_path / "suite.json")]) == 1


def test_a_disabled_suite_is_refused(tmp_path: Path) -> None:
    """Benchmarks that are run without being measured are a usage error, not green."""
    done = bench(tmp_path, "--benchmark-disable")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "without measuring" in done.stderr


def test_a_missing_benchmark_of_a_suite_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Renamed, without samples, or gone: each is named; a whole run passes."""
    expected = tomllib.loads(suite.EXPECTED.read_text("utf-8"))["expected"]

    def run(change: str = "") -> int:
        benchmarks: list[dict[str, Any]] = [
            {"fullname": f"benchmarks/{file}::{name}[x]", "stats": {"rounds": 3}}
            for file, names in expected.items()
            for name in names
        ]
        if change == "rename":
            benchmarks[0]["fullname"] += "_new"
            benchmarks[0]["fullname"] = benchmarks[0]["fullname"].replace("[x]", "")
        if change == "empty":
            benchmarks[0]["stats"] = {"rounds": 0}
        if change == "drop":
            del benchmarks[0]
        return suite.main([stored(tmp_path, "suite.json", {"benchmarks": benchmarks})])

    assert run() == 0
    first = next(iter(expected.values()))[0]
    for change in ("rename", "empty", "drop"):
        assert run(change) == 1
        assert first in capsys.readouterr().err
    assert suite.main([stored(tmp_path, "guard.json", run_of(1.0))]) == 2
    files = {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert set(expected) <= files


def test_the_workflow_runs_what_a_person_runs() -> None:
    """One script for both, on every supported end of the Python range, and its measurements are kept."""
    yaml: Any = pytest.importorskip("yaml", reason="pyyaml belongs to the group 'test'")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = workflow["jobs"]["check"]["steps"]
    assert ".ci/run" in [step.get("run") for step in steps]
    (kept,) = [step for step in steps if "upload-artifact" in step.get("uses", "")]
    assert kept["if"] == "always()"
    assert kept["with"]["path"] == "build/bench"
    verbs = (ROOT / ".ci" / "run").read_text("utf-8")
    assert "bench-guard" in verbs
    shallow = [
        job for job in ("bench", "compare")
        if workflow["jobs"][job]["steps"][0]["with"].get("fetch-depth") != 0
    ]  # fmt: skip
    assert shallow == [], "comparing and history need the commits"
