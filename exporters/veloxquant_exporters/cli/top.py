"""`vqmon top`: the options; what it does is in `veloxquant_exporters.top`."""

from __future__ import annotations

import click

__all__ = ["command"]

_WANTED = "a snapshot folder, the URL of a metrics page, or a trace file"


@click.command("top")
@click.argument("source", metavar="DIR|URL|TRACE", required=False)
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(0.05, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between readings.",
)
@click.option(
    "--at",
    "at_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="Begin at this place of a trace, in seconds from its beginning. [default: its end]",
)
@click.option("--once", is_flag=True, help="Print one frame as plain text, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one reading as JSON, and end.")
@click.option(
    "--tls-ca",
    "ca_file",
    metavar="FILE",
    help="Trust the authorities in this file, PEM, instead of the system's.",
)
@click.option("--tls-cert", "cert_file", metavar="FILE", help="Show this certificate, PEM.")
@click.option("--tls-key", "key_file", metavar="FILE", help="Its key, PEM, without a passphrase.")
@click.option(
    "--token-file",
    metavar="FILE",
    help="Send the bearer token in this file. A name and password go into the URL.",
)
def command(
    source: str | None,
    interval_s: float,
    at_s: float | None,
    once: bool,
    as_json: bool,
    ca_file: str | None,
    cert_file: str | None,
    key_file: str | None,
    token_file: str | None,
) -> int:
    """Watch pools, memory and alerts on the terminal.

    Reads a snapshot folder, a metrics page (of a process or of `vqmon serve`), or a recorded
    trace. --once and --json take two readings, an interval apart, so that rates are known.

    Exit status: 1 if nothing can be read at first; 0 after q, Ctrl-C or SIGTERM.

    Example: vqmon top /run/veloxquant; vqmon top http://localhost:9465/metrics --json
    """
    if not source:
        raise click.UsageError(f"say what to watch: {_WANTED}")
    if once and as_json:
        raise click.UsageError("--once and --json are two forms of one answer: take one")
    if key_file and not cert_file:
        raise click.UsageError("--tls-key needs --tls-cert")
    from veloxquant_exporters.top.access import Access
    from veloxquant_exporters.top.run import Settings, run
    from veloxquant_exporters.top.source import SourceError

    if not (once or as_json):
        _check_terminal()
    access = Access(ca_file, cert_file, key_file, token_file)
    try:
        return run(
            Settings(
                source=source,
                interval_s=interval_s,
                at_s=at_s,
                once=once,
                as_json=as_json,
                access=access,
            )
        )
    except SourceError as error:
        raise click.ClickException(str(error)) from error


def _check_terminal() -> None:
    import os
    import sys

    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise click.UsageError("the screens need a terminal; --once prints a frame, --json JSON")
