"""Report: verdicts as a console table and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from veloxquant_exporters.bench.verdict import Verdict
from veloxquant_exporters.bench.workloads import WORKLOADS

__all__ = ["detail", "markdown", "table", "unit"]

_HEAD = (
    "benchmark", "over", "sizes", "CPU a call", "a block", "CPU slope", "beside twin", "level",
    "work a call", "growth", "under lock", "verdict",
)  # fmt: skip


def table(verdicts: Sequence[Verdict]) -> str:
    """One line a benchmark, in columns; then what is out of budget, and how to read it."""
    rows = [_HEAD, *(_row(verdict) for verdict in verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += ["", *_findings(verdicts), *_legend(verdicts)]
    return "\n".join(lines)


def markdown(verdicts: Sequence[Verdict], title: str) -> str:
    """The same for a CI job's page."""
    failed = [verdict.name for verdict in verdicts if verdict.status == "fail"]
    lines = [
        f"## {title}",
        "",
        f"**{'FAILED: ' + ', '.join(failed) if failed else 'passed'}**, {len(verdicts)} benchmarks",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{' --- |' * len(_HEAD)}",
        *(f"| {' | '.join(_row(verdict))} |" for verdict in verdicts),
        "",
        *(f"- {line}" for line in _findings(verdicts)),
    ]
    return "\n".join(lines) + "\n"


def detail(verdict: Verdict) -> str:
    """All sizes of one benchmark: time a call and a block, ratio to the twin, and the growth."""
    samples = verdict.samples
    if samples is None or samples.unsupported is not None:
        return f"{verdict.name}: not timed"
    lines = [f"{verdict.name}: {samples.calls} calls a round, minimum of {samples.rounds} rounds"]
    for at, size in enumerate(samples.sizes):
        took = samples.target_s[at]
        line = f"  {size:>7,}  {unit(took):>9}  {unit(took / size):>9} a block"
        if samples.twin_s:
            line += f"  {took / samples.twin_s[at]:5.2f} of the twin"
        if at:
            line += f"  {took / samples.target_s[at - 1]:5.2f} of the size before"
        lines.append(line)
    return "\n".join(lines)


def unit(seconds: float) -> str:
    """Seconds with a unit that reads well."""
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


def _row(verdict: Verdict) -> tuple[str, ...]:
    workload, samples, figures = WORKLOADS[verdict.name], verdict.samples, verdict.figures
    timed = samples if samples is not None and samples.sizes else None
    span = f"{timed.sizes[0]:,}..{timed.sizes[-1]:,}" if timed else "-"
    cost = f"{unit(timed.target_s[0])}..{unit(timed.target_s[-1])}" if timed else "-"
    per_block = workload.blocks == "n" and timed
    exponents = [figures[key] for key in ("steps_exponent", "moves_exponent") if key in figures]
    return (
        verdict.name,
        workload.axis,
        span,
        cost,
        unit(timed.target_s[-1] / timed.sizes[-1]) if per_block and timed else "-",
        _number(figures, "cpu_slope"),
        _number(figures, "ratio_slope", "+.2f"),
        _number(figures, "level"),
        _number(figures, "work_per_call", ",.0f"),
        f"{max(exponents):.2f}" if exponents else "-",
        _number(figures, "longest_hold_exponent"),
        verdict.status.upper() if verdict.status != "pass" else "pass",
    )


def _number(figures: Mapping[str, float], key: str, spec: str = ".2f") -> str:
    value = figures.get(key)
    return "-" if value is None else format(value, spec)


def _findings(verdicts: Iterable[Verdict]) -> list[str]:
    return [
        f"{verdict.name}: {'FAIL' if finding.fails else 'warn'}, {finding.layer}: {finding.text}"
        for verdict in verdicts
        for finding in verdict.findings
    ]


def _legend(verdicts: Sequence[Verdict]) -> list[str]:
    rounds = {v.samples.rounds for v in verdicts if v.samples is not None and v.samples.rounds}
    calls = sorted({v.samples.calls for v in verdicts if v.samples is not None})
    text = (
        f"CPU a call at the smallest..largest size: minimum of {max(rounds, default=0)} rounds of "
        f"{'/'.join(map(str, calls))} calls. growth: exponent of exact counts (0 flat, 1 linear)."
    )
    return [text]
