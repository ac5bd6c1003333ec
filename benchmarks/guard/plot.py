"""Plot: CPU time over size, log-log, with guides and verdicts; SVG and PNG.

Needs matplotlib (dependency group `bench`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from veloxquant_exporters.bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bars", "draw"]

COLOURS = {"pass": "#1b7f3b", "warn": "#b7791f", "fail": "#c53030"}
GUIDES = ((0, "O(1)", ":"), (1, "O(n)", "--"), (2, "O(n²)", "-."))
TWIN_COLOUR = "#8a8f98"
# The same bytes for the same numbers.
STEADY: Any = {"svg.hashsalt": "veloxquant-bench"}


def draw(found: Mapping[str, Any], out: Path) -> None:
    """Write `guard.svg` and `guard.png` of a run into the folder `out`."""
    shown = {
        name: one
        for name, one in found["benchmarks"].items()
        if one["times"] and one["times"]["sizes"]
    }
    columns = 4
    rows = max(1, math.ceil(len(shown) / columns))
    with mpl.rc_context(STEADY):
        figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for name, one in shown.items():
            _panel(next(axes), name, one)
        for spare in axes:
            spare.set_axis_off()
        figure.suptitle(_title(found))
        _save(figure, out / "guard")


def bars(rows: Mapping[str, tuple[float, float, float]], title: str, path: Path) -> None:
    """Write ratios with their intervals as `path` plus .svg and .png.

    Args:
        rows: By name: ratio, lower and upper bound.
        title: Heading.
        path: Without suffix.
    """
    names = list(rows)[::-1]
    with mpl.rc_context(STEADY):
        figure = Figure(figsize=(8, 0.4 * len(names) + 1.4), layout="constrained")
        axis = figure.subplots()
        middle = [rows[name][0] for name in names]
        reach = [
            [rows[name][0] - rows[name][1] for name in names],
            [rows[name][2] - rows[name][0] for name in names],
        ]
        axis.barh(names, middle, xerr=reach, color="#4c78a8", ecolor="#20262e", capsize=3)
        axis.axvline(1, color=TWIN_COLOUR, linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("ratio of CPU time, with 95 % interval")
        axis.set_title(title)
        _save(figure, path)


def _panel(axis: Axes, name: str, one: Mapping[str, Any]) -> None:
    times, colour = one["times"], COLOURS[one["status"]]
    sizes, mine = times["sizes"], times["target_s"]
    axis.loglog(sizes, mine, "o-", color=colour, label="measured")
    if times["twin_s"]:
        axis.loglog(sizes, times["twin_s"], "x-", color=TWIN_COLOUR, label="frozen twin")
    for power, label, style in GUIDES:
        guide = [mine[0] * (size / sizes[0]) ** power for size in sizes]
        axis.loglog(sizes, guide, style, color=TWIN_COLOUR, linewidth=0.8)
        axis.annotate(label, (sizes[-1], guide[-1]), fontsize=7, color=TWIN_COLOUR)
    top = max(*mine, *times["twin_s"], mine[0] * sizes[-1] / sizes[0])
    axis.set_ylim(min(*mine, *times["twin_s"]) / 2, top * 3)
    slope = one["figures"].get("cpu_slope", float("nan"))
    axis.set_title(f"{name}: slope {slope:.2f}, {one['status']}", fontsize=9, color=colour)
    axis.set_xlabel(WORKLOADS[name].axis if name in WORKLOADS else "size", fontsize=8)
    axis.set_ylabel("CPU seconds a call", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=6, loc="upper left")


def _title(found: Mapping[str, Any]) -> str:
    where, commit = found["machine"], found.get("commit")
    rev = f", commit {commit['id'][:12]}" if commit else ""
    return (
        f"Scaling guard: {'passed' if found['ok'] else 'FAILED'}{rev}; "
        f"{where['implementation']} {where['python']}, {where['cpus']} {where['machine']} cores"
    )


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=110)
