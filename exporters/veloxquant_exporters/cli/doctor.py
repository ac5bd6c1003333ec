"""`vqmon doctor`: the options; what it finds is found by `veloxquant_exporters.doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from veloxquant_exporters.cli.completing import folders

if TYPE_CHECKING:
    from collections.abc import Iterable

    from veloxquant_exporters.doctor import Check, Settings
    from veloxquant_exporters.findings import Finding

__all__ = ["command"]


@click.command("doctor")
@click.option(
    "--prometheus",
    metavar="URL",
    help="A Prometheus server: does it scrape us, do boards and rules find data?",
)
@click.option(
    "--snapshot-dir",
    metavar="DIR",
    shell_complete=folders,
    envvar="VELOXQUANT_SNAPSHOT_DIR",
    show_envvar=True,
    help="Folder into which processes publish their snapshots.",
)
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    show_default="9464 and 9465",
    help="A port that an exporter wants; repeat for several.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    prometheus: str | None, snapshot_dir: str | None, ports: tuple[int, ...], as_json: bool
) -> int:
    """Find what keeps pools from being watched, and how to mend it.

    Looks at Python and its libraries, at packages that clash with this one, at MLX (in a process of
    its own), ports, the snapshot folder with the pools in it, and, if given, at Prometheus. Changes
    nothing.

    Exit codes: 0 if there is no problem (warnings there may be), 1 if there is one.

    \b
    Example: vqmon doctor
    Example: vqmon doctor --snapshot-dir /run/veloxquant --prometheus http://127.0.0.1:9090
    """  # noqa: D301 - \b is click's mark for lines that stay as they are
    from veloxquant_exporters.doctor import Settings, examine

    settings = Settings(prometheus=prometheus, snapshot_dir=snapshot_dir)
    if ports:
        settings = Settings(prometheus=prometheus, snapshot_dir=snapshot_dir, ports=ports)
    results = _as_text(settings) if not as_json else list(examine(settings))
    if as_json:
        click.echo(json.dumps(_as_json(results), indent=1))
    return int(any(finding.level == "problem" for _, found in results for finding in found))


Results = list[tuple["Check", "list[Finding]"]]


def _as_text(settings: Settings) -> Results:
    """Print what each check finds as it ends, as some take their time."""
    from veloxquant_exporters.cli.shown import as_block, counted
    from veloxquant_exporters.doctor import examine

    results: Results = []
    for check, found in examine(settings):
        click.secho(check.title, bold=True)
        for finding in found:
            click.echo(as_block(finding))
        click.echo()
        results.append((check, found))
    click.echo(counted(finding for _, found in results for finding in found))
    return results


def _as_json(results: Iterable[tuple[Check, list[Finding]]]) -> dict[str, object]:
    from veloxquant_exporters.cli.shown import as_dict

    findings = [
        {"check": check.name, **as_dict(finding)} for check, found in results for finding in found
    ]
    return {
        "ok": all(finding["level"] != "problem" for finding in findings),
        "findings": findings,
    }
