"""`vqmon check`: the options; what it finds is found by `veloxquant_exporters.sidecar.check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from veloxquant_exporters.sidecar.check import CheckedFile, DirectoryReport

__all__ = ["command"]


@click.command("check")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    show_default=True,
    help="Seconds to wait for running processes to publish again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with each pool's last state.")
def command(directory: Path, watch_s: float, as_json: bool) -> None:
    """Tell how the processes of a snapshot folder are.

    Exit status: 0 if all is well, 1 if a file cannot be read, a process died or hangs, or two have
    one name.

    Example: vqmon check /run/veloxquant --watch 3
    """
    from veloxquant_exporters.sidecar.check import check_directory

    report = check_directory(directory, watch_s=watch_s)
    click.echo(json.dumps(_as_json(report), indent=1) if as_json else _as_text(report))
    if not report.ok:
        raise SystemExit(1)


def _as_text(report: DirectoryReport) -> str:
    if report.fault:
        return f"the folder cannot be read: {report.fault}"
    lines = [_line(file) for file in report.files] or ["no snapshot files"]
    lines += [f"{name}: several running processes have this name" for name in report.clashes]
    return "\n".join(lines)


def _line(checked: CheckedFile) -> str:
    if checked.file is None:
        return f"{checked.name}: cannot be read ({checked.fault}): {checked.text}"
    pools = ", ".join(
        f"{pool.name} {pool.blocks_in_use} of {pool.n_blocks} blocks in use"
        for pool in checked.file.snapshot.pools
    )
    return f"{checked.name}: {checked.state}; {pools or 'no pools'}"


def _as_json(report: DirectoryReport) -> dict[str, object]:
    from veloxquant_mlx.telemetry.snapshot_json import process_to_dict

    return {
        "ok": report.ok,
        "fault": report.fault,
        "clashes": list(report.clashes),
        "files": [
            {
                "name": checked.name,
                "state": checked.state,
                "fault": checked.fault,
                "text": checked.text,
                "snapshot": None
                if checked.file is None
                else process_to_dict(checked.file.snapshot),
            }
            for checked in report.files
        ],
    }
