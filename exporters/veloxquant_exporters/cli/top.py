"""`vqmon top`: the options; what it does is in `veloxquant_exporters.top`."""

from __future__ import annotations

import click

from veloxquant_exporters.cli.access_options import access_of, access_options
from veloxquant_exporters.cli.completing import files
from veloxquant_exporters.cli.times import Time

__all__ = ["command"]

_WANTED = "a snapshot folder, the URL of a metrics page, or a trace file"


@click.command("top")
@click.argument("source", metavar="DIR|URL|TRACE", required=False, shell_complete=files)
@click.option(
    "--interval",
    "interval_s",
    metavar="TIME",
    type=Time(0.05, 3600),
    default="1s",
    show_default=True,
    help="Time between readings.",
)
@click.option(
    "--at",
    "at_s",
    metavar="TIME",
    type=Time(0.0),
    show_default="its end",
    help="Begin at this place of a trace, counted from its beginning.",
)
@click.option("--once", is_flag=True, help="Print one frame as plain text, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one reading as JSON, and end.")
@access_options
def command(
    source: str | None,
    interval_s: float,
    at_s: float | None,
    once: bool,
    as_json: bool,
    **access: str | None,
) -> int:
    """Watch pools, memory and alerts on the terminal.

    Reads a snapshot folder, a metrics page (of a process or of `vqmon serve`), or a recorded
    trace. --once and --json take two readings, an interval apart, so that rates are known.

    \b
    Exit codes: 0 after q, Ctrl-C, SIGTERM or SIGHUP; 1 if nothing can be read at first.

    \b
    Example: vqmon top /run/veloxquant
    Example: vqmon top http://localhost:9465/metrics --json
    Example: vqmon top incident.vqtrace --at 12
    """  # noqa: D301 - \b is click's mark for lines that stay as they are
    if not source:
        raise click.UsageError(f"say what to watch: {_WANTED}")
    if once and as_json:
        raise click.UsageError("--once and --json are two forms of one answer: take one")
    from veloxquant_exporters.top.run import Settings, run
    from veloxquant_exporters.top.source import SourceError

    if not (once or as_json):
        _check_terminal()
    try:
        return run(
            Settings(
                source=source,
                interval_s=interval_s,
                at_s=at_s,
                once=once,
                as_json=as_json,
                access=access_of(**access),
            )
        )
    except SourceError as error:
        raise click.ClickException(str(error)) from error


def _check_terminal() -> None:
    import os
    import sys

    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise click.UsageError("the screens need a terminal; --once prints a frame, --json JSON")
