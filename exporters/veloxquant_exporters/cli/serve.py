"""`vqmon serve`: the options of the sidecar; what it does is in `veloxquant_exporters.sidecar`."""

from __future__ import annotations

import re
from typing import Any, Final

import click

__all__ = ["command"]

_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """Seconds, from text as in 90, 90s, 15m, 1h or 2d."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)", value)
    if not found or not 0 < (seconds := float(found[1]) * _UNITS[found[2]]) <= 30 * _UNITS["d"]:
        raise click.BadParameter(f"{value!r} is no time as in 90s, 15m or 1h, of at most 30d")
    return seconds


@click.command("serve")
@click.option(
    "--snapshot-dir",
    "directory",
    metavar="DIR",
    envvar="VELOXQUANT_SNAPSHOT_DIR",
    required=True,
    show_envvar=True,
    help="Folder into which processes publish their snapshots. It need not exist yet.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9465,
    show_default=True,
    help="Serve /metrics on this port; 0 takes a free one.",
)
@click.option(
    "--addr",
    default="127.0.0.1",
    show_default=True,
    help='What to listen on: this machine only, or "::" for every interface.',
)
@click.option(
    "--retention",
    "retention_s",
    metavar="TIME",
    callback=_seconds,
    default="15m",
    show_default=True,
    help="How long a process that ended is remembered: a dead one's up is 0 for that time.",
)
@click.option("--tls-cert", "certfile", metavar="FILE", help="Serve HTTPS: the certificate, PEM.")
@click.option("--tls-key", "keyfile", metavar="FILE", help="Its key, PEM, without a passphrase.")
@click.option(
    "--tls-client-ca",
    "client_cafile",
    metavar="FILE",
    help="Let only clients in that have a certificate of these authorities, PEM.",
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="Push over OTLP as well, to a collector as in http://localhost:4318.",
)
@click.option(
    "--otlp-interval",
    "otlp_interval_s",
    metavar="TIME",
    callback=_seconds,
    show_default="60s, or OTEL_METRIC_EXPORT_INTERVAL",
    help="How often to push.",
)
@click.option(
    "--log.level",
    "log_level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What to log.",
)
@click.option(
    "--log.format",
    "log_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Lines of text, or of JSON.",
)
def command(**options: Any) -> int:
    """Serve the metrics of the processes that publish into a folder.

    One sidecar a machine or pod, beside any number of workers that call publish() or have
    VELOXQUANT_SNAPSHOT_DIR set. It outlives them: of a process that died, the last snapshot stays
    at /debug/last/PROCESS.

    SIGTERM or Ctrl-C ends it with exit code 0; 1 means that it could not start.

    Example: vqmon serve --snapshot-dir /run/veloxquant
    """
    from veloxquant_exporters.sidecar.serve import Settings, run

    return run(Settings(**options))
