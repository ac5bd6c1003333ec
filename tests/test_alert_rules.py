"""The alert rules: promtool accepts them, their tests pass and can fail, each has its runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

from dashboards.drill.series import braces  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
ALERTS = ROOT / "dashboards" / "alerts"
ALERT_TESTS = ROOT / "dashboards" / "alert_tests"
RUNBOOKS = ROOT / "docs" / "runbooks"

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian package prometheus)"
)

CATALOGUE_NAME = re.compile(r"\bveloxquant_[a-z0-9_]+\b")


def rules() -> list[dict[str, Any]]:
    """Every rule of alerts.yaml and records.yaml."""
    files = [ALERTS / "alerts.yaml", ALERTS / "records.yaml"]
    return [
        rule
        for file in files
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]


def alerts() -> list[dict[str, Any]]:
    """The alerts among them."""
    return [rule for rule in rules() if "alert" in rule]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@promtool
def test_promtool_accepts_the_rules() -> None:
    """All files of the folder, the generated bridge too."""
    result = run("check", "rules", *map(str, sorted(ALERTS.glob("*.yaml"))))
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
@pytest.mark.parametrize("file", sorted(ALERT_TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_alert_tests_pass(file: Path) -> None:
    """Which alerts fire in each case, and that no other does."""
    result = run("test", "rules", str(file))
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_alert_tests_can_fail(tmp_path: Path) -> None:
    """A threshold moved out of reach is noticed."""
    for folder in ("alerts", "alert_tests"):
        shutil.copytree(ROOT / "dashboards" / folder, tmp_path / folder)
    moved = tmp_path / "alerts" / "alerts.yaml"
    moved.write_text(moved.read_text().replace("> 0.01\n", "> 2\n"))
    result = run("test", "rules", str(tmp_path / "alert_tests" / "pool.yaml"))
    assert result.returncode != 0
    assert "VeloxQuantPoolExhaustionSustained" in result.stdout + result.stderr


# Alerts on a target, and on what there is one of; all others are on a process.
A_TARGET = {"VeloxQuantExporterDown"}
ONE = {"VeloxQuantExporterAbsent", "VeloxQuantBenchmarkRegression", "VeloxQuantBenchmarkStale"}
# Jobs and processes with pools of the same names.
PROCESSES = (("veloxquant", "w0"), ("veloxquant", "w1"), ("veloxquant-b", "w0"))
SELECTOR = re.compile(r"^(\w+)\{(.*)\}$")
MATCHER = re.compile(r'(\w+)="(.*?)"')


def copies(series: str) -> list[str]:
    """The series as each of `PROCESSES` has it, or each of their jobs; others as they are."""
    found = SELECTOR.match(series)
    assert found is not None, series
    name, labels = found[1], dict(MATCHER.findall(found[2]))
    if labels.get("job") != "veloxquant" or name.startswith("veloxquant_bench_"):
        return [series]
    if name == "up":
        more = [{"job": job} for job in dict(PROCESSES)]
    else:
        more = [{"job": job, "process": process} for job, process in PROCESSES]
    return [name + braces({**labels, **one}.items()) for one in more]


def multiplied(file: Path, to: Path) -> None:
    """The alert tests over `copies`: each alert as often as there are those it is about.

    Beside them no alert is expected, so that promtool prints what each of them says.
    """
    tests = yaml.safe_load(file.read_text("utf-8"))
    tests["rule_files"] = [str((file.parent / rule).resolve()) for rule in tests["rule_files"]]
    for test in tests["tests"]:
        test["input_series"] = [
            {**one, "series": copy}
            for one in test["input_series"]
            for copy in copies(one["series"])
        ]
        test["alert_rule_test"] = []
        for expectation in test["promql_expr_test"]:
            for sample in expectation["exp_samples"]:
                alert = dict(MATCHER.findall(sample["labels"]))["alertname"]
                n_targets = len(dict(PROCESSES))
                sample["value"] *= (
                    1 if alert in ONE else n_targets if alert in A_TARGET else len(PROCESSES)
                )
                question = {"eval_time": expectation["eval_time"], "alertname": alert}
                test["alert_rule_test"].append({**question, "exp_alerts": []})
    to.write_text(yaml.safe_dump(tests), "utf-8")


@promtool
@pytest.mark.parametrize("file", sorted(ALERT_TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_processes_with_pools_of_the_same_names_are_told_apart(file: Path, tmp_path: Path) -> None:
    """No expression matches many to many or adds up two; each says in plain text which it is."""
    multiplied(file, tmp_path / "many.yaml")
    ran = run("test", "rules", str(tmp_path / "many.yaml"))
    printed = ran.stdout + ran.stderr
    assert not re.search(r"^\s+(?:expr:|rule:|group:)|err: ", printed, re.MULTILINE), printed
    said = re.findall(r"Labels:\{(.*?)\}\n\s+Annotations:\{(.*)\}", printed)
    assert said
    for labels, notes in said:
        # A template that failed, a number that nobody reads, a gap.
        assert not re.search(r"%!|<no value>|<error|NaN|Inf|\{\{|\d{7}", notes), notes
        assert not re.search(r'  |" | \.|\(\)| "', notes.replace(", ", ",")), notes
        process = dict(MATCHER.findall(labels)).get("process")
        assert process is None or re.search(rf"\b{process}\b", notes), notes


def test_every_alert_is_tested_firing() -> None:
    """Its name stands among the expected alerts of some case."""
    text = "".join(file.read_text() for file in ALERT_TESTS.glob("*.yaml"))
    untested = [a["alert"] for a in alerts() if f'alertname="{a["alert"]}"' not in text]
    assert untested == []


def test_every_alert_has_what_a_pager_needs() -> None:
    """Severity, a summary, a description with a number or a name, a runbook."""
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        notes = alert["annotations"]
        assert notes["summary"]
        said = notes["summary"] + notes["description"]
        assert "$value" in said or "$labels" in said or "absent" in alert["expr"]
        assert notes["runbook_url"].startswith("RUNBOOKS/")


def test_every_alert_heads_its_runbook() -> None:
    """And every runbook is some alert's, and names only alerts that are there."""
    names = {alert["alert"] for alert in alerts()}
    linked = set()
    for alert in alerts():
        book = RUNBOOKS / alert["annotations"]["runbook_url"].removeprefix("RUNBOOKS/")
        linked.add(book)
        heading = next(x for x in book.read_text().splitlines() if x.startswith("Alerts:"))
        assert f"`{alert['alert']}`" in heading
    assert set(RUNBOOKS.glob("*.md")) == linked
    for book in linked:
        assert set(re.findall(r"`(VeloxQuant\w+)`", book.read_text())) <= names


def test_runbooks_have_every_section() -> None:
    """In one order."""
    wanted = ["Meaning", "Impact", "Confirm", "Mitigate", "Root causes", "False positives"]
    for book in RUNBOOKS.glob("*.md"):
        assert re.findall(r"^## (.+)$", book.read_text(), re.MULTILINE) == wanted, book.name


def test_expressions_name_metrics_of_the_catalogue() -> None:
    """A renamed metric must not leave a rule that matches nothing."""
    from veloxquant_mlx.telemetry import CATALOGUE

    known = {metric.name for metric in CATALOGUE}
    known |= {f"{m.name}_{part}" for m in CATALOGUE for part in ("bucket", "sum", "count")}
    for rule in rules():
        used = {
            name for name in CATALOGUE_NAME.findall(rule["expr"]) if f":{name}" not in rule["expr"]
        }
        assert used <= known, rule.get("alert", rule.get("record"))
