"""The drill: what it plays, that its verdict can fail, and that its files are what they claim."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

yaml = pytest.importorskip("yaml")
pytest.importorskip("prometheus_client")

from dashboards.drill.clock import VirtualClock  # noqa: E402
from dashboards.drill.healthy import HEALTHY  # noqa: E402
from dashboards.drill.incidents import INCIDENTS  # noqa: E402
from dashboards.drill.rules import ALERTS, RECORDS, Rules  # noqa: E402
from dashboards.drill.series import Key, Series, notation  # noqa: E402
from veloxquant_mlx.telemetry import CATALOGUE  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian package prometheus)"
)

# One of each kind, of those that are played quickly; `make drill` plays all.
QUICK = (
    "keys-exhausted",
    "double-free",
    "sidecar-silent",
    "sidecar-never-was",
    "benchmark-regresses",
    "first-scrape",
)


def drill(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it, in a process of its own as it replaces the clock."""
    return subprocess.run(
        [sys.executable, "-m", "dashboards.drill", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def promtool_test(*files: Path) -> subprocess.CompletedProcess[str]:
    """Run rule tests."""
    return subprocess.run(
        ["promtool", "test", "rules", *map(str, files)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@promtool
def test_alerts_fire_in_time_and_alone(tmp_path: Path) -> None:
    """On some of the scenarios; what is left behind are rule tests that pass by themselves."""
    ran = drill("--json", "--keep", tmp_path, *QUICK)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, dict[str, Any]] = {one["name"]: one for one in json.loads(ran.stdout)}
    assert set(found) == set(QUICK)
    for one in found.values():
        if one["alert"] is None:
            assert one["fired_s"] == {}
        else:
            assert 0 <= one["fired_s"][one["alert"]] <= one["within_s"]
    files = sorted(tmp_path.glob("*.yaml"))
    assert {file.stem for file in files} == set(QUICK)
    tested = promtool_test(*files)
    assert tested.returncode == 0, tested.stdout


# What is broken in the rule of a sidecar that never was, and what the drill has to say of it.
PLANTED = {
    "never": (
        'absent(up{job=~".*veloxquant.*"})',
        'absent(up{job=~".*"})',
        "VeloxQuantExporterAbsent does not fire",
    ),
    "late": (
        'veloxquant.*"})\n        for: 10m',
        'veloxquant.*"})\n        for: 20m',
        "VeloxQuantExporterAbsent fires after 20 min, not within 12",
    ),
    "says nothing": (
        "was never configured",
        "is fine",
        "VeloxQuantExporterAbsent does not say 'never configured'",
    ),
    "too eager": (
        'up{job=~".*veloxquant.*"} == 0',
        'up{job=~".+"} == 1',
        "VeloxQuantExporterDown fires",
    ),
}


@promtool
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    """A broken rule fails the drill, which names the incident and the alert."""
    good, bad, seen = PLANTED[fault]
    text = ALERTS.read_text()
    assert good in text
    rules = tmp_path / "alerts.yaml"
    rules.write_text(text.replace(good, bad))
    ran = drill("sidecar-never-was", "--alerts", rules)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert f"WRONG sidecar-never-was: {seen}" in ran.stdout


@promtool
def test_rules_that_are_none_are_told(tmp_path: Path) -> None:
    """An expression that does not parse is no alert that does not fire."""
    rules = tmp_path / "alerts.yaml"
    rules.write_text(ALERTS.read_text().replace("[15m]) > 0", "[15m) > 0"))
    ran = drill("sidecar-never-was", "--alerts", rules)
    assert ran.returncode == 1
    assert "could not parse" in ran.stdout


@pytest.mark.parametrize("scenario", INCIDENTS, ids=lambda one: one.name)
def test_runbooks_name_the_companions(scenario: Any) -> None:
    """What may fire beside the right alert stands in its runbook."""
    rules = Rules()
    assert scenario.alert in rules.names()
    assert set(scenario.companions) <= rules.companions(scenario.alert) - {scenario.alert}


def test_every_scenario_is_bounded() -> None:
    """Each incident states a time, and is watched beyond it; names are told apart."""
    everything = (*INCIDENTS, *HEALTHY)
    assert len({one.name for one in everything}) == len(everything)
    for one in INCIDENTS:
        assert 0 < one.within_s <= one.seconds - one.begins_s
    assert all(one.alert is None for one in HEALTHY)
    assert len(HEALTHY) == 10


def test_windows_are_wide_enough() -> None:
    """Four scrapes in each window, a minute apart, and four quarter minutes of waiting."""
    rate = re.compile(r"\b(?:rate|increase|deriv|predict_linear|changes|\w+_over_time)\b")
    for file in (ALERTS, RECORDS):
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                windows = re.findall(r"\[(\d+)([mh])", rule["expr"])
                assert all(int(n) * {"m": 60, "h": 3600}[unit] >= 240 for n, unit in windows)
                if "alert" in rule and rate.search(rule["expr"]):
                    assert re.fullmatch(r"[1-9]\d*[mh]", str(rule.get("for"))), rule["alert"]


# -- what it writes ------------------------------------------------------------------------------


def spelled_out(text: str) -> list[float | None]:
    """Promtool's notation, read naively; a stale marker is no sample."""
    values: list[float | None] = []
    for part in text.split():
        if part == "stale":
            values.append(None)
        elif part.startswith("_"):
            values += [None] * int(part.partition("x")[2] or 1)
        else:
            found = re.fullmatch(
                r"([+-]?(?:inf|[\d.]+(?:e[+-]\d+)?))([+-]\d+)?(?:x(\d+))?", part.lower()
            )
            assert found is not None
            first, step, n = float(found[1]), float(found[2] or 0), int(found[3] or 0)
            values += [first + step * k for k in range(n + 1)]
    return values


numbers = st.integers(-1000, 1000).map(float) | st.sampled_from([0.5, 1e-7, float("inf"), 2.0**60])


@given(st.lists(st.none() | numbers, max_size=40))
def test_notation_loses_nothing(values: list[float | None]) -> None:
    """Whatever was scraped reads back as it was."""
    assert spelled_out(notation(values)) == values


def test_notation_is_short() -> None:
    """Lines are written as lines, and the end of a series as Prometheus marks it."""
    assert notation([0.0, 5.0, 10.0, 15.0, 15.0, 15.0]) == "0+5x3 15x1"
    assert notation([None, None, 1.0, None, None]) == "_x2 1 stale _x1"


def test_series_keep_their_place() -> None:
    """A series that comes late or goes early is missing at the other scrapes."""
    series = Series(15)
    early: Key = ("a", ())
    late: Key = ("b", (("x", '"'),))
    for page in ({early: 1.0}, {early: 2.0, late: 7.0}, {late: 7.0}):
        series.add(page)
    assert dict(series.for_promtool({"a", "b"})) == {"a{}": "1 2 stale", 'b{x="\\""}': "_x1 7x1"}


@promtool
def test_openmetrics_has_the_catalogue(tmp_path: Path) -> None:
    """Every metric of a process, at times that end where they should, in blocks of Prometheus."""
    end_s = 1_800_000_000
    ran = drill("--openmetrics", tmp_path, "--end", end_s, "sidecar-silent")
    assert ran.returncode == 0, ran.stderr
    file = tmp_path / "sidecar-silent.om"
    text = file.read_text()
    names = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    wanted = {one.name.removesuffix("_total") for one in CATALOGUE if one.read_pool is not None}
    assert wanted <= names | {"veloxquant_block_pool_blocks"}
    assert max(re.findall(r" (\d+\.\d+)$", text, re.MULTILINE)) == f"{end_s}.000"
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", file, tmp_path / "data"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_the_clock_only_rises() -> None:
    """And the wall clock begins anew where it is told to."""
    clock = VirtualClock()
    before = clock.now_ns()
    clock.step_to(100.0)
    assert clock.wall_s() == pytest.approx(100.0, abs=1e-3)
    clock.step_to(50.0)
    assert clock.now_ns() > before + 99_000_000_000
    clock.restart_wall()
    assert clock.wall_s() < 1.0
