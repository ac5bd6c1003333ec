"""The names that OTLP metrics get in Prometheus, and the rules that mend those that differ."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from veloxquant_exporters.opentelemetry.bridge import (
    Rule,
    bridge_rules,
    render,
    sanitize,
    translated,
)
from veloxquant_exporters.opentelemetry.naming import HISTOGRAMS, PROCESS, SCOPE, attribute
from veloxquant_mlx.telemetry.catalogue import CATALOGUE, Metric

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "dashboards" / "alerts" / "bridge.yaml"
BY_NAME = {row.name: row for row in CATALOGUE}
# Known to the exporter itself, or constants as labels: there is nothing of theirs over OTLP.
NOT_OVER_OTLP = {
    "veloxquant_block_pool_config_info",
    "veloxquant_build_info",
    "veloxquant_exporter_up",
    "veloxquant_exporter_snapshot_timestamp_seconds",
    "veloxquant_exporter_collect_duration_seconds",
    "veloxquant_exporter_snapshot_files",
    "veloxquant_program_info",
}
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@pytest.mark.parametrize(
    "row", [r for r in CATALOGUE if r.instrument == "counter"], ids=lambda r: r.name
)
def test_a_counter_keeps_its_name(row: Metric) -> None:
    """The translation gives the Prometheus name, with and without `_ratio`."""
    assert translated(row, ratio=True) == translated(row, ratio=False) == row.name


@pytest.mark.parametrize("row", HISTOGRAMS, ids=lambda r: r.name)
def test_a_histogram_keeps_its_name_or_is_bridged(row: Metric) -> None:
    """Occupancy and what the GenAI conventions name do not: they have a rule for each series."""
    if translated(row) != row.name:
        records = {rule.record for rule in bridge_rules()}
        assert {f"{row.name}_{part}" for part in ("bucket", "count", "sum")} <= records
    others = str(row.otel).startswith("gen_ai.")
    others |= row.name == "veloxquant_block_pool_occupancy_ratio"
    assert (translated(row) == row.name) is not others


def test_every_gauge_is_bridged_or_known_not_to_come() -> None:
    """No gauge of the catalogue is forgotten, and none of those left out could come."""
    records = {rule.record for rule in bridge_rules()}
    for row in CATALOGUE:
        if row.kind == "gauge" and not row.name.startswith("veloxquant_bench_"):
            assert (row.name in records) is not (row.name in NOT_OVER_OTLP), row.name


def test_no_rule_feeds_on_what_it_records() -> None:
    """Where a source has the name of the record, it is told apart by a label that is dropped."""
    for rule in bridge_rules():
        if rule.record in rule.sources:
            told_apart = rf'{rule.record}\{{[^}}]*veloxquant_\w+!=""\}}'
            assert re.search(told_apart, rule.expr), rule.record


def test_the_committed_rules_are_what_the_script_writes() -> None:
    """Byte for byte; and the check can fail."""
    assert RULES.read_text(encoding="utf-8") == render()
    script = [sys.executable, str(ROOT / "scripts" / "bridge"), "--check"]
    assert subprocess.run(script, check=False, timeout=60).returncode == 0


def _promtool(*args: str) -> None:
    done = subprocess.run(
        ["promtool", *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_accepts_the_rules() -> None:
    """As Prometheus would read them."""
    _promtool("check", "rules", str(RULES))


def _origin(rule: Rule) -> tuple[Metric, str]:
    """The row that arrives, and the part of a histogram."""
    for part in ("_bucket", "_count", "_sum"):
        if rule.record.endswith(part) and rule.record.removesuffix(part) in BY_NAME:
            return BY_NAME[rule.record.removesuffix(part)], part
    alias = {
        "veloxquant_block_pool_blocks_in_use": "veloxquant_block_pool_stream_blocks_in_use",
        "veloxquant_block_pool_blocks_total": "veloxquant_block_pool_blocks_managed",
    }
    return BY_NAME[alias.get(rule.record, rule.record)], ""


def _case(rule: Rule, style: Any, ratio: bool) -> dict[str, Any]:
    """What arrives for a rule in one way of translating, and what must be recorded."""
    row, part = _origin(rule)
    arriving = f"{translated(row, ratio=ratio)}{part}"
    summed_away = {"stream"} if rule.record == "veloxquant_block_pool_blocks_in_use" else set()
    inputs, expected = [], 0.0
    target: dict[str, str] = {}
    for n, stream in enumerate(("k", "v"), start=1):
        ours = {"job": "veloxquant", "instance": "i-1", "process": "w1"}
        theirs = {"job": "veloxquant", "instance": "i-1"}
        if arriving != rule.record or style == "semantic":
            theirs["otel_scope_name"] = SCOPE  # else it is the very series, and no rule's business
        theirs[sanitize(PROCESS) if style == "semantic" else "process"] = "w1"
        for label in row.all_labels:
            value = stream if label == "stream" else "main"
            ours[label] = value
            theirs[sanitize(attribute(row, label, style))] = value
        theirs |= {sanitize(key): value for key, value in row.attributes.items()}
        if part == "_bucket":
            ours["le"] = theirs["le"] = "0.5"
        target = {k: v for k, v in ours.items() if k not in summed_away}
        expected += n
        inputs.append({"series": _series(arriving, theirs), "values": f"{n}x3"})
        if "stream" not in row.all_labels or not summed_away:
            expected = float(n)
            break
    # Another state must not leak in: usage has one series for each.
    for key, value in row.attributes.items():
        stranger = dict(theirs, **{sanitize(key): f"not-{value}"})
        inputs.append({"series": _series(arriving, stranger), "values": "1000x3"})
    return {
        "interval": "1m",
        "input_series": inputs,
        "promql_expr_test": [
            {
                "expr": f'{rule.record}{{veloxquant_block_pool_name="",veloxquant_process=""}}',
                "eval_time": "2m",
                "exp_samples": [{"labels": _series(rule.record, target), "value": expected}],
            }
        ],
    }


def _series(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{', '.join(f'{k}={json.dumps(v)}' for k, v in sorted(labels.items()))}}}"


def _test_file(path: Path, cases: list[dict[str, Any]]) -> str:
    # JSON is YAML. The rules are named from where the test file lies.
    rules = os.path.relpath(RULES, path.parent)
    path.write_text(json.dumps({"rule_files": [rules], "tests": cases}), encoding="utf-8")
    return str(path)


@promtool
@pytest.mark.parametrize("style", ["semantic", "prometheus"])
@pytest.mark.parametrize("ratio", [True, False])
def test_every_rule_records_the_catalogues_name_and_labels(
    tmp_path: Path, style: str, ratio: bool
) -> None:
    """Prometheus itself evaluates each rule: names, labels and values, `_ratio` on and off."""
    cases = [_case(rule, style, ratio) for rule in bridge_rules()]
    assert len(cases) > 25
    _promtool("test", "rules", _test_file(tmp_path / "tests.yaml", cases))


@promtool
def test_the_rule_test_can_fail(tmp_path: Path) -> None:
    """A wrong value is refused, so that the test above shows something."""
    case = _case(next(iter(bridge_rules())), "semantic", True)
    case["promql_expr_test"][0]["exp_samples"][0]["value"] += 1
    with pytest.raises(AssertionError, match="FAILED"):
        _promtool("test", "rules", _test_file(tmp_path / "tests.yaml", [case]))


@promtool
def test_rules_match_nothing_where_metrics_are_scraped(tmp_path: Path) -> None:
    """The Prometheus exporter's own series are neither doubled nor changed."""
    labels = {"job": "j", "instance": "i", "pool": "main"}
    scraped = {"interval": "1m", "input_series": [], "promql_expr_test": []}
    for row in CATALOGUE:
        if row.kind == "gauge":
            scraped["input_series"].append(  # type: ignore[attr-defined]
                {"series": _series(row.name, labels), "values": "7x3"}
            )
            scraped["promql_expr_test"].append(  # type: ignore[attr-defined]
                {
                    "expr": row.name,
                    "eval_time": "2m",
                    "exp_samples": [{"labels": _series(row.name, labels), "value": 7}],
                }
            )
    _promtool("test", "rules", _test_file(tmp_path / "tests.yaml", [scraped]))
