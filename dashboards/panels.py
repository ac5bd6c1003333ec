"""Panel components for grafana-dashboard-builder: today's panel types, from few words of YAML.

A panel in YAML::

    - series-panel:
        title: Blocks in use
        size: 12x8                       # columns of 24 x rows of 30 px
        colours: {chat: blue}            # of single series, where the palette will not do
        unit: short
        description: ...                 # what it tells, and what to do about it
        runbook: near-capacity
        targets:
          - {expr: "sum by (pool)(veloxquant_block_pool_blocks_in_use%S)", legend: "[[pool]]"}

In expressions `%S` stands for the selector of the board's variables, `%S(a="b")` for that and more,
`%J` for the selector without `pool`, `%R` for `[$__rate_interval]`. `[[label]]` in a legend is
Grafana's label placeholder: the library takes braces for its own.
"""

from __future__ import annotations

import copy
import re
from typing import Any, ClassVar

from grafana_dashboards.components.panels import PanelsItemBase

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_POOL = 'job=~"$job",instance=~"$instance",pool=~"$pool"'
_JOB = 'job=~"$job",instance=~"$instance"'

Json = dict[str, Any]


def expand(expression: str) -> str:
    """`expression` with its abbreviations written out."""

    def selector(match: re.Match[str]) -> str:
        base = _POOL if match[1] == "S" else _JOB
        return "{" + base + ("," + match[2] if match[2] else "") + "}"

    # The extra matchers stand in parentheses right behind and hold no parentheses themselves.
    text = re.sub(r'%([SJ])(?:\(((?:\w+(?:=~|!=|=)"[^"]*",?)+)\))?', selector, expression)
    return text.replace("%R", "[$__rate_interval]").strip()


class _Panel(PanelsItemBase):  # type: ignore[misc] # the library has no annotations
    """What all panels have; subclasses say which type and options."""

    grafana_type: ClassVar[str]
    default_options: ClassVar[Json] = {}
    default_custom: ClassVar[Json] = {}
    instant: ClassVar[bool] = False

    def gen_json_from_data(self, data: Json, context: Any) -> Json:
        """The panel as Grafana has it, but for its place."""
        width, height = map(int, data.get("size", "12x8").split("x"))
        defaults: Json = {"unit": data.get("unit", "short"), "custom": dict(self.default_custom)}
        for key in ("min", "max", "decimals", "mappings", "noValue"):
            if key in data:
                defaults[key] = data[key]
        defaults["custom"].update(data.get("custom", {}))
        steps = [{"color": data.get("base", "green"), "value": None}]
        steps += [{"color": c, "value": v} for v, c in data.get("thresholds", [])]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["color"] = data.get("color", {"mode": self._colour_mode(data)})
        panel: Json = {
            "type": self.grafana_type,
            "title": data["title"],
            "description": data["description"].strip(),
            "datasource": DATASOURCE,
            "fieldConfig": {"defaults": defaults, "overrides": self._overrides(data)},
            "options": {**copy.deepcopy(self.default_options), **data.get("options", {})},
            "targets": [self._target(t) for t in data.get("targets", [])],
            "_size": [width, height],
        }
        if "transformations" in data:
            panel["transformations"] = data["transformations"]
        if "runbook" in data:
            panel["links"] = [
                {
                    "title": f"Runbook: {data['runbook']}",
                    "url": f"${{runbooks}}/{data['runbook']}.md",
                    "targetBlank": True,
                }
            ]
        return panel

    def _overrides(self, data: Json) -> list[Json]:
        """Those given, and one for each name in `colours:`."""
        fixed = [
            {
                "matcher": {"id": "byName", "options": name},
                "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
            }
            for name, colour in data.get("colours", {}).items()
        ]
        return [*fixed, *data.get("overrides", [])]

    def _colour_mode(self, data: Json) -> str:
        return "thresholds" if data.get("thresholds") else "palette-classic"

    def _target(self, target: Json) -> Json:
        instant = target.get("instant", self.instant)
        expression = expand(target["expr"])
        # As seldom as anyone scrapes: rates are over four times that, and so never over one sample,
        # whether or not the data source is told the real interval.
        step = {"interval": "1m"} if "$__rate_interval" in expression else {}
        return {
            **step,
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expression,
            "format": target.get("format", "time_series"),
            "instant": instant,
            "legendFormat": target.get("legend", "__auto").replace("[[", "{{").replace("]]", "}}"),
            "range": not instant,
        }


class SeriesPanel(_Panel):
    """Lines over time."""

    grafana_type = "timeseries"
    default_options: ClassVar[Json] = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    default_custom: ClassVar[Json] = {
        "drawStyle": "line",
        "fillOpacity": 0,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
    }

    def gen_json_from_data(self, data: Json, context: Any) -> Json:
        """With `stack: true`, `events: true` for bars, `mirrored:` for what is drawn below zero.

        Thresholds are dashed lines, and a legend of many names stands at the right with
        `legend: right`, as a table whose rows do not hide each other.
        """
        panel: Json = super().gen_json_from_data(data, context)
        custom = panel["fieldConfig"]["defaults"]["custom"]
        if data.get("stack") or data.get("events"):
            custom["stacking"] = {"mode": "normal", "group": "A"}
            custom["fillOpacity"] = 60
            custom["lineWidth"] = 0
        if data.get("events"):
            custom["drawStyle"] = "bars"
        if data.get("thresholds"):
            custom["thresholdsStyle"] = {"mode": "dashed"}
        if data.get("legend") == "right":
            panel["options"]["legend"] |= {
                "calcs": ["lastNotNull", "max"],
                "displayMode": "table",
                "placement": "right",
            }
        custom |= data.get("custom", {})
        return panel

    def _colour_mode(self, data: Json) -> str:
        return "palette-classic"


class NumberPanel(_Panel):
    """One number."""

    grafana_type = "stat"
    default_options: ClassVar[Json] = {
        "colorMode": "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }


class BarsPanel(_Panel):
    """One bar a series, as of now."""

    grafana_type = "bargauge"
    instant = True
    default_options: ClassVar[Json] = {
        "displayMode": "basic",
        "namePlacement": "auto",
        "showUnfilled": True,
        "valueMode": "color",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }


class BucketsPanel(_Panel):
    """Buckets of a histogram over time: its target is `sum by (le)` of a bucket rate."""

    grafana_type = "heatmap"
    default_options: ClassVar[Json] = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5,
                  "fill": "dark-orange"},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "yAxis": {"axisPlacement": "left"},
        "legend": {"show": True},
        "cellValues": {},
        "filterValues": {"le": 1e-9},
    }  # fmt: skip

    def gen_json_from_data(self, data: Json, context: Any) -> Json:
        """The unit is that of the bounds, so it goes to the axis."""
        panel: Json = super().gen_json_from_data(data, context)
        panel["options"]["yAxis"]["unit"] = data.get("unit", "short")
        panel["options"]["cellValues"] = {"unit": data.get("cells", "short")}
        for target in panel["targets"]:
            target["format"], target["legendFormat"] = "heatmap", "{{le}}"
        return panel


class StatesPanel(_Panel):
    """A state over time, a row a series."""

    grafana_type = "state-timeline"
    default_options: ClassVar[Json] = {
        "alignValue": "left",
        "mergeValues": True,
        "rowHeight": 0.8,
        "showValue": "auto",
    }


class RowsPanel(_Panel):
    """A table, a row a series."""

    grafana_type = "table"
    instant = True
    default_options: ClassVar[Json] = {"cellHeight": "sm", "showHeader": True}

    def _target(self, target: Json) -> Json:
        return super()._target({**target, "format": "table"})
