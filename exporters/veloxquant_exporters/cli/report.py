"""`vqmon report`: the options; what it draws is in `veloxquant_exporters.report`."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import click

__all__ = ["command"]


@click.command("report")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="TRACE with .html",
    help="File to write; one that is there is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: what was written, and of what.")
def command(trace: Path, output: Path | None, as_json: bool) -> int:
    """Draw a trace as one HTML page that needs no server.

    Shows what was held over time, a map of the blocks coloured by owner, the owners' lifetimes,
    latency by operation and size, events, and who held most. The page loads nothing from the
    network, so it can be mailed or attached to a ticket.

    \b
    Exit codes: 0 done, 1 the trace cannot be read or the page cannot be written, 2 wrong usage.

    \b
    Example: vqmon report chat.vqtrace -o report.html
    """  # noqa: D301 - \b is click's mark for lines that stay as they are
    from rich.console import Console
    from rich.progress import Progress

    from veloxquant_exporters.report import write_report
    from veloxquant_mlx.telemetry.trace import TraceError, load_trace

    if trace.is_dir():  # told before a name is made of it
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(trace))
    output = output or trace.with_suffix(".html")
    if os.path.realpath(output) == os.path.realpath(trace):
        raise click.UsageError(f"--output: {output} is the trace itself; name another file")
    console = Console(stderr=True)
    try:
        loaded = load_trace(trace)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("replaying", total=max(1, loaded.n_calls))
            write_report(loaded, output, progress=lambda n: bar.update(task, completed=n))
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    n_bytes = output.stat().st_size
    if as_json:
        found = {"trace": str(trace), "output": str(output), "bytes": n_bytes}
        click.echo(json.dumps({**found, "calls": loaded.n_calls, "lost": loaded.n_lost}, indent=1))
    else:
        click.echo(f"wrote {output} ({n_bytes / 1e6:.1f} MB)")
    return 0
