"""`vqmon check`: the options; what it finds is found by `veloxquant_exporters.check`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from veloxquant_exporters.cli.access_options import access_of, access_options
from veloxquant_exporters.cli.completing import files
from veloxquant_exporters.cli.times import Time

if TYPE_CHECKING:
    from veloxquant_exporters.check import Checked
    from veloxquant_exporters.sidecar.check import CheckedFile, DirectoryReport

__all__ = ["command"]


@click.command("check")
@click.argument("target", metavar="URL|FILE|DIR", shell_complete=files)
@click.option(
    "--watch",
    "watch_s",
    metavar="TIME",
    type=Time(0.0, 3600),
    default="0s",
    show_default=True,
    help="Of an address, fetch again after this time, to see whether a counter falls. Of a folder, "
    "wait this long for running processes to publish again.",
)
@access_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with each pool's last state.")
def command(target: str, watch_s: float, as_json: bool, **access: str | None) -> int:
    """Lint a metrics page, a snapshot folder or a trace.

    A page is given by its address, as a saved file, or as - on standard input: is it well-formed,
    does it hold what the catalogue of metrics says, do its values add up? A folder is the one that
    processes publish into: can all files be read, does every process live? A trace: is it whole,
    were calls lost, could a pool have done what it says?

    \b
    Exit codes: 0 if there is no problem (warnings there may be), 1 if there is one.

    \b
    Example: vqmon check http://127.0.0.1:9464/metrics --watch 15
    Example: vqmon check /run/veloxquant --watch 3
    Example: vqmon check incident.vqtrace
    Example: curl -s http://127.0.0.1:9465/metrics | vqmon check -
    """  # noqa: D301 - \b is click's mark for lines that stay as they are
    from veloxquant_exporters.check import check

    checked = check(target, watch_s=watch_s, access=access_of(**access))
    click.echo(json.dumps(_as_json(target, checked), indent=1) if as_json else _as_text(checked))
    return int(not checked.ok)


def _as_text(checked: Checked) -> str:
    from veloxquant_exporters.cli.shown import as_line
    from veloxquant_exporters.findings import Finding

    lines = list(map(as_line, checked.findings))
    if checked.summary and checked.ok:
        lines.insert(0, as_line(Finding("ok", checked.summary)))
    return "\n".join(lines)


def _as_json(target: str, checked: Checked) -> dict[str, Any]:
    from veloxquant_exporters.cli.shown import as_dict
    from veloxquant_exporters.fetch import without_password

    return {
        "ok": checked.ok,
        "target": without_password(target),
        "kind": checked.kind,
        "summary": checked.summary,
        "findings": list(map(as_dict, checked.findings)),
        **checked.more,
        **({} if checked.folder is None else _folder(checked.folder)),
    }


def _folder(report: DirectoryReport) -> dict[str, Any]:
    return {
        "fault": report.fault,
        "clashes": list(report.clashes),
        "files": list(map(_file, report.files)),
    }


def _file(checked: CheckedFile) -> dict[str, Any]:
    from veloxquant_mlx.telemetry.snapshot_json import process_to_dict

    return {
        "name": checked.name,
        "state": checked.state,
        "fault": checked.fault,
        "text": checked.text,
        "snapshot": None if checked.file is None else process_to_dict(checked.file.snapshot),
    }
