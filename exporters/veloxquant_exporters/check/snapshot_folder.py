"""A snapshot folder, or one file of it, in findings; see `sidecar.check` for how it is looked at."""

from __future__ import annotations

from collections.abc import Iterator

from veloxquant_exporters.findings import Finding, printable
from veloxquant_exporters.sidecar.check import CheckedFile, DirectoryReport

__all__ = ["folder_findings"]

_FIXES = {
    "permission_denied": "let this user read it: add it to the group of the file (chgrp, chmod 640)",
    "version": "install the same version of veloxquant-mlx-monitor for writer and reader",
    "not_a_file": "remove it: nothing but snapshot files belongs into the folder",
    "oversized": "remove it: no publisher writes one of this size",
}
_REMOVE = "remove it, unless a process is about to write it anew"


def folder_findings(report: DirectoryReport) -> Iterator[Finding]:
    """One finding a file, and one for each name that several processes have."""
    if report.fault:
        yield Finding(
            "problem",
            f"the folder cannot be read: {printable(report.fault)}",
            "",
            "name the folder that publish() or VELOXQUANT_SNAPSHOT_DIR names",
        )
        return
    if not report.files:
        yield Finding(
            "note",
            "no snapshot files",
            "no process has published here, or all ended long ago",
            "in the server: publish(DIR), or set VELOXQUANT_SNAPSHOT_DIR",
        )
    yield from map(_of_file, report.files)
    for name in report.clashes:
        yield Finding(
            "problem",
            f"{printable(name)}: several running processes have this name",
            "only the newest of them is seen",
            "give each its own: publish(DIR, worker=NAME), or VELOXQUANT_WORKER",
        )


def _of_file(checked: CheckedFile) -> Finding:
    name = printable(checked.name)
    if checked.file is None:
        return Finding(
            "problem",
            f"{name}: cannot be read ({checked.fault}): {printable(checked.text)}",
            "",
            _FIXES.get(checked.fault, _REMOVE),
        )
    pools = ", ".join(
        f"{pool.name} {pool.blocks_in_use} of {pool.n_blocks} blocks in use"
        for pool in checked.file.snapshot.pools
    )
    what = f"{name}: {checked.state}; {printable(pools or 'no pools')}"
    pid = checked.file.header.identity.pid
    if checked.state == "dead":
        return Finding(
            "problem",
            what,
            f"process {pid} ended without a last word: killed, or crashed",
            "see the log of the server, and docs/runbooks/exporter-down-and-stale.md",
        )
    if checked.state == "stale":
        return Finding(
            "problem",
            what,
            f"process {pid} runs and has stopped publishing: suspended, or its interpreter is blocked",
            f"py-spy dump --pid {pid}, or kill -CONT {pid} if it was stopped",
        )
    return Finding("ok", what)
