"""The scaling guard: every planted fault is caught by its layer, and what it cannot judge is red."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.guard import __main__ as program
from benchmarks.guard.check import OURS, TWIN, GuardError, guard
from veloxquant_exporters.bench.budgets import BudgetError, read_budgets
from veloxquant_exporters.bench.run import MeasureError, counts_of, judge_all, times_of
from veloxquant_exporters.bench.timed import Samples
from veloxquant_exporters.bench.verdict import Verdict, judge
from veloxquant_exporters.bench.workloads import WORKLOADS

BUDGETS_FILE = Path(program.HERE) / "budgets.toml"
BUDGETS = read_budgets(BUDGETS_FILE)
# Read off the project's own pool alone, which the twin and strangers are not.
COMMON = [name for name, workload in WORKLOADS.items() if not workload.needs_ours]

# Fault, the benchmark that meets it, layers of the exact part that must fail.
FAULTS = [
    ("linear:VisitsEveryBlock", "free_all", {"counts", "lock"}),
    ("quadratic:HeadFirst", "free_all", {"counts"}),
    ("quadratic:NewestFirst", "free_all", {"counts"}),
    ("quadratic:RebuiltPerBlock", "free_all", {"counts"}),
    ("pool_wide:Rescan", "free_all_in_pool", {"counts"}),
    ("pool_wide:HeldOverScan", "mark_used", {"counts", "lock"}),
    ("dearer:NLogN", "free_list", {"counts"}),
]


@cache
def counts(target: str, names: str) -> dict[str, Any]:
    """Counts of a target, made once for all tests that ask."""
    return counts_of(target, names.split(","))


def counted(fault: str, benchmark: str) -> Verdict:
    """The verdict of the exact layer on one planted fault."""
    beside = counts(TWIN, ",".join(COMMON))[benchmark]
    found = counts(f"tests.planted.{fault}", benchmark)[benchmark]
    return judge(benchmark, BUDGETS[benchmark], None, found, beside)


def failing(verdict: Verdict) -> set[str]:
    """The layers that fail a verdict."""
    return {finding.layer for finding in verdict.findings if finding.fails}


def test_unchanged_code_passes_the_counts() -> None:
    """Every benchmark of this project's own pool is within its exact budget."""
    found = counts(OURS, ",".join(BUDGETS))
    verdicts = judge_all(BUDGETS, None, found, counts(TWIN, ",".join(COMMON)))
    assert {v.name: v.findings for v in verdicts if v.status == "fail"} == {}
    assert len(verdicts) == len(WORKLOADS)


def test_A07_free_all_does_not_grow_by_a_single_step() -> None:
    """The release of an owner, bare or watched, costs the same to the instruction at every size."""
    found = counts(OURS, ",".join(BUDGETS))
    for name in ("free_all", "free_all_in_pool", "free_all_watched", "mark_used", "n_free"):
        assert len(set(found[name]["steps"])) == 1, name
        assert len(set(found[name]["moves"])) == 1, name


@pytest.mark.parametrize(("fault", "call", "layers"), FAULTS)
def test_a_planted_fault_is_caught_by_the_counts(fault: str, call: str, layers: set[str]) -> None:
    """Each fault of shape fails the exact layer, without a clock."""
    verdict = counted(fault, call)
    assert verdict.status == "fail"
    assert failing(verdict) == layers
    assert not verdict.only_timed


@pytest.mark.parametrize("fault", ["quadratic:HeadFirst", "quadratic:NewestFirst"])
def test_instructions_alone_are_blind_to_the_historical_fault(fault: str) -> None:
    """Its instructions look linear: what is quadratic happens inside one of them."""
    figures = counted(fault, "free_all").figures
    assert figures["steps_exponent"] < 1.05
    assert figures["moves_exponent"] > 1.9


def test_a_rebuilt_list_is_seen_by_instructions() -> None:
    """The other half of the exact layer sees the list that is made anew."""
    figures = counted("quadratic:RebuiltPerBlock", "free_all").figures
    assert figures["steps_exponent"] > 1.9


def test_twice_the_work_is_a_warning() -> None:
    """A constant is no shape: it is said, with the factor, and fails nothing."""
    verdict = counted("dearer:TwiceTheWork", "free_all")
    assert verdict.status == "warn"
    assert verdict.figures["work_level"] > 1.8


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("linear:VisitsEveryBlock", "free_all"),
        ("quadratic:HeadFirst", "free_all"),
        ("pool_wide:Rescan", "free_all_in_pool"),
    ],
)
def test_a_planted_fault_is_caught_by_the_clock_too(fault: str, call: str) -> None:
    """What C code does between two instructions only time can see, so time must see shapes alone."""
    times = times_of(f"tests.planted.{fault}", [call], twin=TWIN, rounds=3)
    verdict = judge(call, BUDGETS[call], times[call], None)
    assert failing(verdict) == {"time"}
    assert verdict.only_timed


def test_unchanged_code_passes_the_clock() -> None:
    """The headline calls pass the timed layer here and now, whatever else this machine does."""
    budgets = {name: BUDGETS[name] for name in ("free_all", "allocate", "mark_used")}
    verdicts, _ = guard(budgets)
    assert {v.name: v.findings for v in verdicts if v.status == "fail"} == {}


def samples(sizes: list[int], times: list[float], twin: list[float]) -> Samples:
    """Samples made by hand."""
    return Samples(sizes=sizes, target_s=times, median_s=times, twin_s=twin, rounds=5)


def test_a_linear_call_fails_only_when_its_ratio_bends_too() -> None:
    """Caches bend target and twin alike; only what bends beside the twin is the code's."""
    sizes = [1024, 4096, 16384, 65536]
    bent = [1e-9 * n**1.4 for n in sizes]
    straight = [1e-9 * n for n in sizes]
    budget = BUDGETS["allocate"]
    assert failing(judge("allocate", budget, samples(sizes, bent, straight), None)) == {"time"}
    assert failing(judge("allocate", budget, samples(sizes, bent, bent), None)) == set()
    assert failing(judge("allocate", budget, samples(sizes, bent, []), None)) == {"time"}


def test_a_timed_failure_is_heard_again_and_a_counted_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise may bribe the clock once; a second, fresh process acquits. Counts need no second run."""
    sizes = [1024, 4096, 16384, 65536]
    slow = samples(sizes, [1e-9 * n for n in sizes], [1e-6] * 4)
    fast = samples(sizes, [1e-6] * 4, [1e-6] * 4)
    asked: list[list[str]] = []

    def times(target: str, names: list[str], **_: Any) -> dict[str, Samples]:
        asked.append(list(names))
        return dict.fromkeys(names, slow if len(asked) == 1 else fast)

    found = {"sizes": [1, 2], "steps": [9, 9], "moves": [0, 0], "longest_hold": [3, 3]}
    monkeypatch.setattr("benchmarks.guard.check.times_of", times)
    monkeypatch.setattr(
        "benchmarks.guard.check.counts_of", lambda target, names: dict.fromkeys(names, found)
    )
    budgets = {"free_all": BUDGETS["free_all"], "n_free": BUDGETS["n_free"]}
    verdicts, notes = guard(budgets)
    assert asked == [["free_all", "n_free"], ["free_all", "n_free"]]
    assert {verdict.status for verdict in verdicts} == {"pass"}
    assert len(notes) == 2
    found["steps"] = [9, 18]
    asked.clear()
    verdicts, notes = guard(budgets)
    assert len(asked) == 1
    assert not notes
    assert {verdict.status for verdict in verdicts} == {"fail"}


# -- no verdict is no pass ----------------------------------------------------------------------


def test_a_blind_counter_is_an_error() -> None:
    """A target that takes the hook away is not counted as free of work."""
    with pytest.raises(MeasureError, match="BlindCounterError"):
        counts_of("tests.planted.blinding:TakesTheHook", ["free_all"])


def test_a_target_that_does_nothing_is_an_error() -> None:
    """Every round is checked for the work it should have done."""
    with pytest.raises(MeasureError, match="n_free"):
        times_of("tests.planted.idle:KeepsAll", ["free_all"], twin=None)


@pytest.mark.parametrize("change", ["drop", "rename", "misspell"])
def test_budgets_and_benchmarks_must_match(tmp_path: Path, change: str) -> None:
    """A benchmark without budget, a budget without benchmark, and a wrong key are all refused."""
    text = BUDGETS_FILE.read_text("utf-8")
    changed = {
        "drop": text.replace("[n_free]", "[n_free_gone]").split("[n_free_gone]")[0]
        + text[text.index("[stats_snapshot]") :],
        "rename": text.replace("[free_all]", "[release]"),
        "misspell": text.replace("cpu_slope = 0.65", "slope = 0.65", 1),
    }[change]
    path = tmp_path / "budgets.toml"
    path.write_text(changed, "utf-8")
    with pytest.raises(BudgetError, match=r"n_free|release|slope"):
        read_budgets(path)
    assert program.main(["--budgets", str(path)]) == 2


def test_a_missing_result_is_an_error() -> None:
    """A benchmark that ran in no layer, or was switched off, is not a pass."""
    found = {"free_all": {"unsupported": "no such method"}}
    with pytest.raises(MeasureError, match=r"n_free.*missing, renamed or disabled"):
        judge_all({n: BUDGETS[n] for n in ("free_all", "n_free")}, None, found)
    (verdict,) = judge_all({"free_all": BUDGETS["free_all"]}, None, found)
    assert verdict.status == "fail"
    (verdict,) = judge_all(
        {"free_all": BUDGETS["free_all"]}, {"free_all": Samples(unsupported="gone")}, None
    )
    assert verdict.status == "fail"


def test_xdist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers share the cores that are to be timed."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    with pytest.raises(GuardError, match="xdist"):
        guard(BUDGETS)
    assert program.main([]) == 2
    assert "no verdict" in capsys.readouterr().err


def test_a_target_that_cannot_be_loaded_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, not a pass and not a traceback."""
    assert program.main(["--target", "tests.planted.nowhere:Pool", "--only", "free_all"]) == 2
    assert "tests.planted.nowhere" in capsys.readouterr().err


# -- the whole program --------------------------------------------------------------------------


def test_G12_the_report_says_what_a_round_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table and JSON state blocks a call, calls a round, and the time of a block."""
    names = "allocate,grow_one"
    assert program.main(["--only", names, "--out", str(tmp_path), "--no-pictures"]) == 0
    shown = capsys.readouterr().out
    assert "a block" in shown
    assert "rounds of 2/32 calls" in shown
    found = json.loads((tmp_path / "guard.json").read_text("utf-8"))
    assert found["ok"] is True
    assert found["benchmarks"]["allocate"]["times"]["calls"] == WORKLOADS["allocate"].calls
    assert "| allocate |" in (tmp_path / "guard.md").read_text("utf-8")


def test_G01_G08_the_guard_needs_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, on any interpreter, the first run has a verdict and stores nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(program.ROOT))
    assert program.main(["--only", "n_free"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_failing_run_says_so_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, the sizes on the console, FAILED on the CI page, and ok false in the JSON."""
    page = tmp_path / "page.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    what = ["--target", "tests.planted.pool_wide:Rescan", "--only", "free_all_in_pool"]
    assert program.main([*what, "--out", str(tmp_path), "--no-pictures"]) == 1
    assert "of the size before" in capsys.readouterr().out
    assert "FAILED: free_all_in_pool" in page.read_text("utf-8")
    assert json.loads((tmp_path / "guard.json").read_text("utf-8"))["ok"] is False


def test_pictures_are_drawn(tmp_path: Path) -> None:
    """SVG and PNG of a run, with the guides' names."""
    pytest.importorskip("matplotlib", reason="matplotlib belongs to the group 'bench'")
    from benchmarks.guard.plot import bars, draw

    sizes = [1024, 4096]
    times = samples(sizes, [1e-6, 1e-6], [1e-6, 2e-6])
    verdict = judge("free_all", BUDGETS["free_all"], times, None)
    found = {
        "benchmarks": {"free_all": verdict.as_json()},
        "ok": True,
        "machine": {"implementation": "CPython", "python": "3", "cpus": 2, "machine": "x"},
    }
    draw(found, tmp_path)
    bars({"free_all": (1.0, 0.9, 1.1)}, "ratio", tmp_path / "compare")
    assert (tmp_path / "guard.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "guard.svg").read_text("utf-8").count("<g id=") > 10
    assert (tmp_path / "compare.svg").exists()


def test_levels_are_per_benchmark() -> None:
    """A budget's level decides, so that a known dearer call can be allowed to be so."""
    sizes = [1024, 4096]
    times = samples(sizes, [2e-6, 2e-6], [1e-6, 1e-6])
    assert judge("free_all", BUDGETS["free_all"], times, None).status == "warn"
    lenient = replace(BUDGETS["free_all"], level=3.0)
    assert judge("free_all", lenient, times, None).status == "pass"
