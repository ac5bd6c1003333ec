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
_STRING: Final = r'"(?:[^"\\]|\\.)*"'
# The matchers by which rules find our targets; one on another job is somebody's for a reason.
_OURS: Final = re.compile(r'\bjob\s*=~\s*"(?:[^"\\]|\\.)*veloxquant(?:[^"\\]|\\.)*"')


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
    head = _manifest_head(namespace, labels or {})
    return {
        name: _header(name)
        + head.replace("NAME", f"veloxquant-{name.removesuffix('.yaml')}")
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
        changed = _OURS.sub(lambda _: _matcher(jobs), changed)
    return changed


def _matcher(jobs: Sequence[str]) -> str:
    if len(jobs) == 1:
        return f'job="{jobs[0]}"'
    # Of what a job's name may hold here, only the dot means something in a regular expression, and
    # a class says so without a backslash, which PromQL and YAML would each take for theirs.
    return 'job=~"' + "|".join(job.replace(".", "[.]") for job in jobs) + '"'


def _header(name: str) -> str:
    lines = _PURPOSE.get(name, "Rules.").splitlines()
    return "".join(f"# {line}\n" for line in [*lines, "Written by `vqmon export rules`."])


def _manifest_head(namespace: str | None, labels: Mapping[str, str]) -> str:
    lines = ["apiVersion: monitoring.coreos.com/v1", "kind: PrometheusRule", "metadata:"]
    lines += ["  name: NAME"]
    lines += [f"  namespace: {json.dumps(namespace)}"] if namespace else []
    lines += ["  labels:", "    app.kubernetes.io/name: veloxquant-mlx-monitor"]
    lines += [f"    {key}: {json.dumps(value)}" for key, value in labels.items()]
    return "\n".join([*lines, "spec:"]) + "\n"
