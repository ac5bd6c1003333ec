"""Prometheus: does it scrape an exporter of ours, often enough, and do boards and rules find data?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from veloxquant_exporters.doctor.board_queries import Board, PanelQuery, boards, rule_names
from veloxquant_exporters.doctor.pools import unbounded
from veloxquant_exporters.doctor.prometheus_api import ApiError, PrometheusApi, seconds
from veloxquant_exporters.doctor.settings import Settings
from veloxquant_exporters.findings import Finding, printable

__all__ = ["find"]

# Rules look back five minutes, and boards over four intervals.
MAX_INTERVAL_S: Final = 60.0
_DEFAULT_INTERVAL_S: Final = 15.0
_JOB: Final = re.compile("veloxquant")
_SCRAPE: Final = """\
in prometheus.yml, under scrape_configs:
  - job_name: veloxquant
    scrape_interval: 15s
    static_configs: [{targets: ["127.0.0.1:9464"]}]"""
_RULES: Final = """\
vqmon export rules ./rules, and in prometheus.yml:
rule_files: ["rules/*.yaml"]"""
_BENCHMARKS: Final = "Benchmarks"
_SERVERS: Final = "Model server"  # so has that of programs which vqmon run watches
_NAMES: Final = 'group by (__name__) ({__name__=~"(.+:)?veloxquant_.+"})'


def find(settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    assert settings.prometheus is not None
    api = PrometheusApi(settings.prometheus)
    try:
        yield _reachable(api, settings.prometheus)
    except ApiError as error:
        yield Finding("problem", printable(error.what), "", error.fix)
        return
    targets = _targets(api)
    jobs, findings = _jobs(api, targets)
    yield from findings
    yield from _rules(api)
    if jobs:
        intervals = [target.interval_s for target in targets if target.job in jobs]
        yield from _boards(api, max([*intervals, _DEFAULT_INTERVAL_S]))
        yield from _unbounded(api)


def _reachable(api: PrometheusApi, url: str) -> Finding:
    found = api.get("status/buildinfo")
    host = url.rpartition("@")[2]
    return Finding("ok", printable(f"Prometheus {found.get('version', '')} answers at {host}"))


# -- targets -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    job: str
    instance: str
    health: str
    error: str
    interval_s: float
    url: str


def _targets(api: PrometheusApi) -> list[_Target]:
    """What the server scrapes; nothing from a server that only stores."""
    try:
        active = api.get("targets", state="active").get("activeTargets")
    except ApiError:
        return []
    rows = active if isinstance(active, list) else []
    return [_target(row) for row in rows if isinstance(row, dict)]


def _target(row: dict[str, Any]) -> _Target:
    labels = row.get("labels") or {}
    return _Target(
        job=str(labels.get("job", "")),
        instance=str(labels.get("instance", "")),
        health=str(row.get("health", "")),
        error=str(row.get("lastError", "")),
        interval_s=seconds(row.get("scrapeInterval", "")) or _DEFAULT_INTERVAL_S,
        url=str(row.get("scrapeUrl", "")),
    )


def _jobs(api: PrometheusApi, targets: list[_Target]) -> tuple[set[str], list[Finding]]:
    """The jobs that bring metrics of ours, and what is to be said of them."""
    rows = api.query("count by (job, instance) (veloxquant_exporter_up)")
    with_data = {(_label(row, "job"), _label(row, "instance")) for row in rows}
    jobs = {job for job, _ in with_data}
    named = [target for target in targets if _JOB.search(target.job) or target.job in jobs]
    findings = list(_of_targets(named, with_data))
    if not jobs and not named:
        findings.append(
            Finding("problem", "no job of it scrapes an exporter of ours",
                    "no metric veloxquant_exporter_up is there", _SCRAPE)
        )  # fmt: skip
    for job in sorted(jobs):
        n = sum(name == job for name, _ in with_data)
        findings.append(
            Finding("ok", printable(f"job {job!r} brings metrics of {n} instance{'s' * (n > 1)}"))
        )
        if not _JOB.search(job):
            findings.append(
                Finding(
                    "warning",
                    printable(f"the name of job {job!r} does not hold veloxquant"),
                    "the rules on targets that are down look for that word, and miss this job",
                    f"vqmon export rules ./rules --force --job {printable(job)}",
                )
            )
    return jobs, findings


def _of_targets(targets: list[_Target], with_data: set[tuple[str, str]]) -> Iterator[Finding]:
    for target in targets:
        who = printable(f"target {target.instance} of job {target.job!r}")
        if target.health == "down":
            yield Finding(
                "problem",
                f"{who} is down: {printable(target.error, 200)}",
                "",
                printable(f"vqmon check {target.url}"),
            )
        elif (target.job, target.instance) not in with_data and target.health == "up":
            yield Finding(
                "problem",
                f"{who} is up and has no metric of ours",
                "the address is another program's, or no pool is watched",
                printable(f"vqmon check {target.url}"),
            )
        if target.interval_s > MAX_INTERVAL_S:
            yield Finding(
                "warning",
                f"{who} is scraped every {target.interval_s:g} s",
                "rates over five minutes need four samples and more; alerts come late or never",
                "in prometheus.yml, in that job: scrape_interval: 15s",
            )


def _label(row: dict[str, Any], name: str) -> str:
    metric = row.get("metric")
    return str(metric.get(name, "")) if isinstance(metric, dict) else ""


# -- rules ---------------------------------------------------------------------------------------


def _rules(api: PrometheusApi) -> Iterator[Finding]:
    try:
        groups = api.get("rules").get("groups")
    except ApiError as error:
        yield Finding("note", f"rules cannot be asked for: {printable(error.what)}")
        return
    loaded = [
        rule
        for group in (groups if isinstance(groups, list) else [])
        if isinstance(group, dict)
        for rule in group.get("rules") or ()
        if isinstance(rule, dict)
    ]
    there = {str(rule.get("name")) for rule in loaded}
    for kind, wanted in rule_names().items():
        yield _loaded(kind, wanted, there)
    ours = set().union(*rule_names().values())
    for rule in loaded:
        if rule.get("name") in ours:
            yield from _of_rule(rule)


def _loaded(kind: str, wanted: set[str], there: set[str]) -> Finding:
    missing = sorted(wanted - there)
    rules = "alert rules" if kind == "alert" else "recording rules"
    if not missing:
        return Finding("ok", f"all {len(wanted)} {rules} are loaded")
    if len(missing) == len(wanted):
        why = "nobody is told of trouble" if kind == "alert" else "panels that read them stay empty"
        return Finding("warning", f"none of our {len(wanted)} {rules} is loaded", why, _RULES)
    return Finding(
        "warning",
        f"{len(missing)} of {len(wanted)} {rules} are not loaded: {_some(missing)}",
        "the files are of an older version, or some were left out",
        "vqmon export rules ./rules --force, then reload Prometheus",
    )


def _of_rule(rule: dict[str, Any]) -> Iterator[Finding]:
    name = printable(str(rule.get("name")))
    if rule.get("health") == "err":
        said = printable(str(rule.get("lastError", "")), 200)
        yield Finding("problem", f"rule {name} cannot be evaluated: {said}", "", _RULES)
    if rule.get("state") == "firing":
        notes = rule.get("annotations")
        link = notes.get("runbook_url", "") if isinstance(notes, dict) else ""
        yield Finding("warning", f"alert {name} is firing", "", printable(str(link)))


# -- boards --------------------------------------------------------------------------------------


def _boards(api: PrometheusApi, interval_s: float) -> Iterator[Finding]:
    there = {_label(row, "__name__") for row in api.query(_NAMES)}
    for board in boards(range_s=int(max(300.0, 4 * interval_s))):
        yield from _of_board(api, board, there)


def _of_board(api: PrometheusApi, board: Board, there: set[str]) -> Iterator[Finding]:
    empty: list[PanelQuery] = []
    for query in board.queries:
        try:
            if not api.query(query.expression):
                empty.append(query)
        except ApiError as error:
            if not error.bad_query:
                raise
            empty.append(query)
            yield Finding(
                "problem",
                printable(f"board {board.title!r}, panel {query.panel!r}: {error.what}"),
                "this server refuses the expression",
                "update it: the boards are tried with Prometheus 2.42 and newer",
            )
    yield _data_of(board, empty, there)


def _data_of(board: Board, empty: list[PanelQuery], there: set[str]) -> Finding:
    """How many queries of a board have data; and where none, whether the metric is there at all."""
    n, of = len(board.queries) - len(empty), len(board.queries)
    what = f"board {board.title!r}: {n} of {of} queries have data"
    if not empty:
        return Finding("ok", what)
    absent = sorted(set().union(*(query.metrics for query in empty)) - there)
    if n:
        what += f"; none for {', '.join(dict.fromkeys(query.panel for query in empty))}"
        why = "no harm where nothing of the kind happened"
        if absent:
            why = (
                f"not on this server: {_some(absent)}; without a storage, MLX or an event, none is"
            )
        return Finding("note", what, why)
    if _BENCHMARKS in board.title:
        return Finding(
            "note", what, "no benchmarks are published to this server", "make bench-guard, in CI"
        )
    if _SERVERS in board.title:
        return Finding(
            "note",
            what,
            "no model server is watched on this server",
            "vqmon run -- mlx_lm.server ...",
        )
    return Finding(
        "warning",
        what,
        f"this server has no {_some(absent)}" if absent else "rates take two scrapes",
        "ask again in a minute; if it stays empty: vqmon check http://127.0.0.1:9464/metrics",
    )


def _some(names: list[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _unbounded(api: PrometheusApi) -> Iterator[Finding]:
    for row in api.query('veloxquant_block_pool_config_info{grow="true",max_blocks="none"}'):
        name, instance = _label(row, "pool"), _label(row, "instance")
        yield unbounded(printable(f"pool {name!r} at {instance}"))
