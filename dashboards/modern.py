"""Turn a board as grafana-dashboard-builder makes it into one of the current classic schema."""

from __future__ import annotations

from string import ascii_uppercase
from typing import Any

from panels import DATASOURCE

Json = dict[str, Any]

# The classic schema of Grafana 12, as grafana-foundation-sdk 0.0.21 has it.
SCHEMA_VERSION = 42
COLUMNS = 24

RUNBOOKS = "https://veloxquant.example/runbooks"

# Events, over the step of `_annotation` and the scrape before.
ANNOTATIONS = (
    ("Exhaustion", "red",
     "sum by (pool)(increase(veloxquant_block_pool_exhausted_total{S}[$__rate_interval])) > 0",
     "{{pool}}: allocations failed"),
    ("Growth", "blue",
     "sum by (pool)(increase(veloxquant_block_pool_grown_total{S}[$__rate_interval])) > 0",
     "{{pool}}: the pool grew"),
    ("Restart", "yellow",
     "sum by (instance, process)(resets(veloxquant_telemetry_overhead_seconds_total{J}[$__rate_interval])) > 0",
     "{{instance}} {{process}}: the process restarted"),
)  # fmt: skip


def modernise(board: Json) -> Json:
    """The board with its rows laid out on the grid, its variables, and what all boards share."""
    pool = any(
        "$pool" in target["expr"]
        for row in board["rows"]
        for panel in row["panels"]
        for target in panel["targets"]
    )
    return {
        "annotations": {"list": [_annotation(*a) for a in ANNOTATIONS] if pool else []},
        "description": board.get("description", ""),
        "editable": False,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [
            {
                "asDropdown": True,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "tags": ["veloxquant"],
                "targetBlank": False,
                "title": "VeloxQuant boards",
                "tooltip": "",
                "type": "dashboards",
                "url": "",
            }
        ],
        "panels": _lay_out(board["rows"]),
        "refresh": board.get("refresh", "30s"),
        "schemaVersion": SCHEMA_VERSION,
        "tags": board.get("tags", ["veloxquant"]),
        "templating": {"list": _variables(board.get("job_metric", _BUILD), pool=pool)},
        "time": board.get("time", {"from": "now-1h", "to": "now"}),
        "timepicker": {},
        "timezone": "browser",
        "title": board["title"],
        "uid": board["uid"],
        "version": 1,
        "weekStart": "",
    }


_BUILD = "veloxquant_build_info"


def _lay_out(rows: list[Json]) -> list[Json]:
    panels: list[Json] = []
    y = 0
    for row in rows:
        panels.append(
            {
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
                "panels": [],
                "title": row["title"],
                "type": "row",
            }
        )
        y = _lay_row(row["panels"], y + 1, panels)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
        for letter, target in zip(ascii_uppercase, panel.get("targets", ()), strict=False):
            target["refId"] = letter
    return panels


def _lay_row(row: list[Json], y: int, panels: list[Json]) -> int:
    """Place panels left to right, wrapping; return the first free grid row below."""
    x = tallest = 0
    for panel in row:
        width, height = panel.pop("_size")
        if x + width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        panel["gridPos"] = {"h": height, "w": width, "x": x, "y": y}
        x, tallest = x + width, max(tallest, height)
        panels.append(panel)
    return y + tallest


def _annotation(name: str, colour: str, expression: str, title: str) -> Json:
    everything = 'job=~"$job",instance=~"$instance"'
    return {
        "datasource": DATASOURCE,
        "enable": True,
        "expr": expression.replace("{S}", "{" + everything + ',pool=~"$pool"}').replace(
            "{J}", "{" + everything + "}"
        ),
        "hide": False,
        "iconColor": colour,
        "name": name,
        "step": "60s",
        "titleFormat": title,
    }


def _variables(job_metric: str, *, pool: bool) -> list[Json]:
    variables = [
        {
            "current": {},
            "hide": 0,
            "includeAll": False,
            "label": "Data source",
            "multi": False,
            "name": "datasource",
            "options": [],
            "query": "prometheus",
            "refresh": 1,
            "regex": "",
            "type": "datasource",
        },
        _query("job", f"label_values({job_metric}, job)"),
        _query("instance", f'label_values({job_metric}{{job=~"$job"}}, instance)'),
    ]
    if pool:
        metric = "veloxquant_block_pool_blocks_managed"
        variables.append(
            _query("pool", f'label_values({metric}{{job=~"$job",instance=~"$instance"}}, pool)')
        )
    variables.append(
        {
            "current": {"text": RUNBOOKS, "value": RUNBOOKS},
            "hide": 2,
            "label": "Runbooks",
            "name": "runbooks",
            "query": RUNBOOKS,
            "type": "constant",
        }
    )
    return variables


def _query(name: str, query: str) -> Json:
    return {
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": DATASOURCE,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": name.capitalize(),
        "multi": True,
        "name": name,
        "options": [],
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "type": "query",
    }
