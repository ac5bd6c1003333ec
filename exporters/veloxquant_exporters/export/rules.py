"""Prometheus rules with the user's runbooks and job, as rule files or as operator manifests.

The rules are changed as text, so that they read as they were written and no YAML library is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Final

from veloxquant_exporters.export.errors import ExportError
from veloxquant_exporters.export.shipped import shipped

__all__ = ["operator_files", "rule_files"]

_PURPOSE: Final = {
    "alerts.yaml": "Alerts. Load records.yaml with them: they read what it records.",
    "records.yaml": "Recording rules: what boards and alerts share.",
    "bridge.yaml": (
        "For metrics that come over OTLP: records gauges under their Prometheus names.\n"
        "Where metrics are scraped, these rules match nothing."
    ),
}
_LINK: Final = re.compile(r"(?m)^(\s*runbook_url:\s*)RUNBOOKS/")
# The matchers by which rules find our targets; one on another job is somebody's for a reason.
_OURS: Final = re.compile(r'\bjob\s*=~\s*"(?:[^"\\]|\\.)*veloxquant(?:[^"\\]|\\.)*"')
_ABSENT: Final = re.compile(rf"\babsent\((\w+)\{{{_OURS.pattern}\}}\)")


def rule_files(*, runbooks: str, jobs: Sequence[str] = ()) -> dict[str, str]:
    """Rule files for `rule_files:` of Prometheus: text by name.

    Args:
        runbooks: Address that runbook links begin with.
        jobs: Jobs that scrape our exporters; none leaves the rules to any job that names
            veloxquant.
    """
    return {
        name: _header(name) + _groups(name, text, runbooks, jobs)
        for name, text in shipped("rules").items()
    }


def operator_files(
    *,
    runbooks: str,
    jobs: Sequence[str] = (),
    namespace: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The same as `PrometheusRule` manifests of the Prometheus operator: text by name.

    Args:
        runbooks: As of `rule_files`.
        jobs: As of `rule_files`.
        namespace: Namespace of the manifests; None leaves it to who applies them.
        labels: Labels of the manifests: a Prometheus' `ruleSelector` may ask for some.
    """
    return {
        name: _header(name)
        + _manifest_head(f"veloxquant-{name.removesuffix('.yaml')}", namespace, labels or {})
        + indent(_groups(name, text, runbooks, jobs), "  ")
        for name, text in shipped("rules").items()
    }


def _groups(name: str, text: str, runbooks: str, jobs: Sequence[str]) -> str:
    """The rules from `groups:` on, with the links and jobs put in."""
    start = re.search(r"(?m)^groups:$", text)
    if start is None:
        raise ExportError(f"the rules {name} of this installation are damaged: no groups")
    changed = _LINK.sub(lambda match: f"{match[1]}{runbooks}/", text[start.start() :])
    if jobs:
        changed = _ABSENT.sub(lambda match: _absent(match[1], jobs), changed)
        changed = _OURS.sub(lambda _: _matcher(jobs), changed)
    return changed


def _absent(metric: str, jobs: Sequence[str]) -> str:
    """Any of the jobs: of several in one matcher, `absent` would miss only all, and name none."""
    return " or ".join(f'absent({metric}{{job="{job}"}})' for job in jobs)


def _matcher(jobs: Sequence[str]) -> str:
    if len(jobs) == 1:
        return f'job="{jobs[0]}"'
    # Of what a job's name may hold here, only the dot means something in a regular expression, and
    # a class says so without a backslash, which PromQL and YAML would each take for theirs.
    return 'job=~"' + "|".join(job.replace(".", "[.]") for job in jobs) + '"'


def _header(name: str) -> str:
    lines = _PURPOSE.get(name, "Rules.").splitlines()
    return "".join(f"# {line}\n" for line in [*lines, "Written by `vqmon export rules`."])


def _manifest_head(name: str, namespace: str | None, labels: Mapping[str, str]) -> str:
    lines = ["apiVersion: monitoring.coreos.com/v1", "kind: PrometheusRule", "metadata:"]
    lines += [f"  name: {name}"]
    lines += [f"  namespace: {json.dumps(namespace)}"] if namespace else []
    lines += ["  labels:"]
    # Quoted: a key such as `true` or `1` is no text in YAML. The user's may replace ours.
    all_labels = {"app.kubernetes.io/name": "veloxquant-mlx-monitor", **labels}
    lines += [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in all_labels.items()]
    return "\n".join([*lines, "spec:"]) + "\n"
