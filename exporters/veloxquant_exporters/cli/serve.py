"""`vqmon serve`: the options of the sidecar; what it does is in `veloxquant_exporters.sidecar`."""

from __future__ import annotations

from typing import Any

import click

from veloxquant_exporters.cli.completing import files, folders
from veloxquant_exporters.cli.times import Time

__all__ = ["command"]


@click.command("serve")
@click.option(
    "--snapshot-dir",
    "directory",
    metavar="DIR",
    shell_complete=folders,
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
    "--host",
    "--addr",
    "addr",
    default="127.0.0.1",
    show_default=True,
    help='What to listen on: this machine only, or "::" for every interface.',
)
@click.option(
    "--retention",
    "retention_s",
    metavar="TIME",
    type=Time(),
    default="15m",
    show_default=True,
    help="How long a process that ended is remembered: a dead one's up is 0 for that time.",
)
@click.option(
    "--tls-cert",
    "certfile",
    metavar="FILE",
    shell_complete=files,
    help="Serve HTTPS: the certificate, PEM.",
)
@click.option(
    "--tls-key",
    "keyfile",
    metavar="FILE",
    shell_complete=files,
    help="Its key, PEM, without a passphrase.",
)
@click.option(
    "--tls-client-ca",
    "client_cafile",
    metavar="FILE",
    shell_complete=files,
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
    type=Time(),
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
