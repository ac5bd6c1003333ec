"""Publish: runs as metrics, for the node exporter's textfile collector and for backfill.

    python -m benchmarks.guard.publish RUN.json... [--compare compare.json]
        [--textfile bench.prom] [--openmetrics history.om]

The textfile form shows the newest run, without timestamps, and is replaced whole. The OpenMetrics form
has every run at the time of its commit::

    promtool tsdb create-blocks-from openmetrics history.om DATA

Names, help and labels are those of the catalogue. Keep a backfilled Prometheus longer than its 15 days
(`--storage.tsdb.retention.time=5y`), or it deletes the blocks at its start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.guard.results import commit_time_s, durations
from veloxquant_exporters.bench.document import DocumentError, read
from veloxquant_exporters.bench.fit import slope
from veloxquant_mlx.telemetry import CATALOGUE

__all__ = ["main", "openmetrics", "samples_of", "textfile"]

PREFIX = "veloxquant_bench_"
FAMILIES = {metric.name: metric for metric in CATALOGUE if metric.name.startswith(PREFIX)}

# Family, label values in the catalogue's order, value.
Sample = tuple[str, tuple[str, ...], float]


def samples_of(found: Mapping[str, Any]) -> list[Sample]:
    """All that one run says."""
    samples: list[Sample] = []
    for stat in ("min", "median"):
        for name, by_size in durations(found, stat).items():
            samples += [
                ("duration_seconds", (name, str(size), stat), seconds)
                for size, seconds in by_size.items()
            ]
    for name, by_size in durations(found).items():
        if len(by_size) > 1:
            fitted = slope(list(by_size), list(by_size.values()))
            samples.append(("scaling_exponent", (name,), fitted))
    benchmarks = found["benchmarks"]
    if isinstance(benchmarks, Mapping):
        for name, one in benchmarks.items():
            samples.append(("guard_ok", (name,), float(one["status"] != "fail")))
    created = found.get("created_s")
    if created is not None:
        for name in durations(found):
            samples.append(("last_success_timestamp_seconds", (name,), float(created)))
    return samples


def ratios_of(compared: Mapping[str, Any]) -> list[Sample]:
    """What a comparison of two commits says."""
    return [("regression_ratio", (name,), one["ratio"]) for name, one in compared["ratios"].items()]


def textfile(samples: Sequence[Sample]) -> str:
    """Prometheus text format 0.0.4, without timestamps: with one, the whole file is skipped."""
    lines: list[str] = []
    for family, group in _grouped(samples):
        lines += _header(family)
        lines += [f"{family}{_labels(family, values)} {value!r}" for values, value, _ in group]
    return "\n".join(lines) + "\n"


def openmetrics(runs: Iterable[tuple[float, Sequence[Sample]]]) -> str:
    """OpenMetrics with timestamps in seconds; samples of a family together, oldest first."""
    timed = [(*sample, at) for at, samples in sorted(runs, key=_time) for sample in samples]
    lines: list[str] = []
    for family, group in _grouped(timed):
        lines += _header(family)
        lines += [
            f"{family}{_labels(family, values)} {value!r} {at:.3f}"
            for values, value, at in sorted(group, key=lambda one: (one[0], one[2]))
        ]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _time(run: tuple[float, Sequence[Sample]]) -> float:
    return run[0]


def _grouped(
    samples: Iterable[Any],
) -> list[tuple[str, list[tuple[tuple[str, ...], float, float]]]]:
    groups: dict[str, list[tuple[tuple[str, ...], float, float]]] = {}
    for family, values, value, *at in samples:
        groups.setdefault(PREFIX + family, []).append((values, value, at[0] if at else 0.0))
    unknown = groups.keys() - FAMILIES.keys()
    if unknown:
        raise KeyError(f"not in the catalogue: {', '.join(sorted(unknown))}")
    return [(name, groups[name]) for name in FAMILIES if name in groups]


def _header(family: str) -> list[str]:
    metric = FAMILIES[family]
    return [f"# HELP {family} {metric.help}", f"# TYPE {family} {metric.kind}"]


def _labels(family: str, values: tuple[str, ...]) -> str:
    names = FAMILIES[family].labels
    if len(names) != len(values):
        raise ValueError(f"{family} has the labels {names}, got {values}")
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def replace(path: Path, text: str) -> None:
    """Write whole or not at all: the collector may read at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Read runs, write what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard.publish")
    parser.add_argument("runs", nargs="+", type=Path, help="JSON of the guard or pytest-benchmark")
    parser.add_argument("--compare", type=Path, help="compare.json; goes into the textfile")
    parser.add_argument("--textfile", type=Path)
    parser.add_argument("--openmetrics", type=Path)
    options = parser.parse_args(argv)
    try:
        found = [read(path) for path in options.runs]
        newest = max(found, key=lambda run: run.get("created_s", 0.0))
        if options.textfile:
            compared = json.loads(options.compare.read_text("utf-8")) if options.compare else None
            more = ratios_of(compared) if compared else []
            replace(options.textfile, textfile([*samples_of(newest), *more]))
        if options.openmetrics:
            timed = [(commit_time_s(run), samples_of(run)) for run in found]
            replace(options.openmetrics, openmetrics(timed))
    except (DocumentError, OSError, ValueError) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
