"""`vqmon replay`: the options; the work is done by `veloxquant_exporters.replay`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from veloxquant_exporters.replay.timing import Timing
    from veloxquant_mlx.telemetry.trace import Trace

__all__ = ["command"]


@click.command("replay")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--speed",
    type=click.Choice(["max", "real"]),
    default="max",
    show_default=True,
    help="As fast as it goes, or as fast as it was recorded.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    show_default="5; 1 at real speed",
    help="Times to replay it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(trace: Path, speed: str, rounds: int | None, as_json: bool) -> None:
    """Do a recorded trace again, check it, and time it.

    Every outcome, count of free blocks and holding must be as it was recorded; the first that is
    not is named. Then the calls are timed, one by one.

    Exit codes: 0 if all agrees, 1 if not or if the file is no whole trace, 2 if a library is missing.

    Example: vqmon replay benchmarks/traces/chat.vqtrace --rounds 9
    """
    from veloxquant_exporters.replay.check import disagreement
    from veloxquant_exporters.replay.timing import quiet_collector, replay_round, summarize
    from veloxquant_mlx.telemetry.trace import TraceError, load_trace

    real = speed == "real"
    try:
        loaded = load_trace(trace)
        fault = disagreement(loaded)
        with quiet_collector():
            done = [replay_round(loaded, real=real) for _ in range(rounds or (1 if real else 5))]
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    timings = summarize(done)
    late_ns = max(one.late_ns for one in done)
    found = _as_dict(trace, loaded, fault, timings, late_ns if real else None)
    click.echo(json.dumps(found, indent=1) if as_json else _as_text(found))
    if fault is not None:
        raise SystemExit(1)


def _as_dict(
    path: Path, trace: Trace, fault: str | None, timings: dict[str, Timing], late_ns: int | None
) -> dict[str, Any]:
    return {
        "trace": str(path),
        "pool": trace.header.pool,
        "calls": trace.n_calls,
        "seconds": trace.duration_ns / 1e9,
        "cut": trace.cut,
        "lost": trace.n_lost,
        "agrees": fault is None,
        "disagreement": fault,
        "late_ns": late_ns,
        "operations": {
            name: {
                "calls": timing.calls,
                "ns": round(timing.ns, 1),
                "noise": None if math.isnan(timing.noise) else round(timing.noise, 4),
            }
            for name, timing in timings.items()
        },
    }


def _as_text(found: dict[str, Any]) -> str:
    cut = ", cut" if found["cut"] else ""
    lost = f", {found['lost']} calls lost" if found["lost"] else ""
    lines = [
        f"{found['trace']}: {found['calls']} calls, {found['seconds']:.3f} s{cut}{lost}",
        "agrees with the recording, call by call"
        if found["agrees"]
        else f"disagrees: {found['disagreement']}",
    ]
    if found["late_ns"] is not None:
        lines.append(f"at most {found['late_ns'] / 1e6:.2f} ms behind the recording")
    lines.append(f"{'operation':<12} {'calls':>9} {'ns a call':>10} {'noise':>6}")
    for name, timing in found["operations"].items():
        noise = "-" if timing["noise"] is None else f"{timing['noise']:.0%}"
        lines.append(f"{name:<12} {timing['calls']:>9} {timing['ns']:>10.0f} {noise:>6}")
    return "\n".join(lines)
