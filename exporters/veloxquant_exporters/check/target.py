"""From what was typed behind `vqmon check` to findings: an address, a folder, a file, or stdin."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from veloxquant_exporters.access import Access
from veloxquant_exporters.check.page import check_page
from veloxquant_exporters.check.page_address import check_address
from veloxquant_exporters.check.snapshot_folder import folder_findings
from veloxquant_exporters.fetch import MAX_BODY_BYTES, is_url, without_password
from veloxquant_exporters.findings import Finding, printable
from veloxquant_exporters.sidecar.check import DirectoryReport, check_directory, check_file

__all__ = ["STDIN", "Checked", "check"]

STDIN: Final = "-"
_SNAPSHOT_START: Final = b'{"header":'
# As of `veloxquant_mlx.telemetry.trace.schema`, which need not be loaded to look at a page.
_TRACE_START: Final = b"VQTRACE"
_TRACE_SUFFIX: Final = ".vqtrace"

Kind = Literal["page", "folder", "snapshot", "trace", "nothing"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What was looked at, and what was found.

    Attributes:
        kind: What it turned out to be.
        summary: What there is, in a few words; "" where the findings say it.
        findings: In the order in which they are best read.
        folder: The folder's report, of a folder or a snapshot file.
        more: What else a program may want to know, as JSON values.
    """

    kind: Kind
    summary: str
    findings: tuple[Finding, ...]
    folder: DirectoryReport | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if nothing is a problem."""
        return all(finding.level != "problem" for finding in self.findings)


def check(target: str, *, watch_s: float = 0.0, access: Access | None = None) -> Checked:
    """Look at whatever `target` names.

    Args:
        target: A URL, the path of a file or a folder, or "-" for a page on standard input.
        watch_s: Of a URL, the seconds between two fetches; of a folder, the longest time to wait for
            processes to publish again.
        access: How to get at the page of a URL.
    """
    if is_url(target):
        page = check_address(target, watch_s=watch_s, access=access)
        return Checked("page", page.summary, tuple(page.findings))
    if target == STDIN:
        return _page(sys.stdin.buffer.read(MAX_BODY_BYTES + 1))
    if not target:
        return _nothing("nothing is named")
    try:
        mode = os.stat(target).st_mode  # noqa: PTH116 - a path that is none raises here, too
        if stat.S_ISDIR(mode):
            return _folder(target, watch_s)
        if not stat.S_ISREG(mode):
            return _nothing(f"{target} is neither a file nor a folder")
        return _file(target)
    except FileNotFoundError:
        shown = without_password(target)  # which may be an address of another kind
        return _nothing(f"{shown} cannot be read: there is no such file or folder")
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        return _nothing(f"{target} cannot be read: {text}")


def _nothing(what: str) -> Checked:
    fix = (
        "name a folder of snapshot files, a saved metrics page, a trace, or an address: http://..."
    )
    return Checked("nothing", "", (Finding("problem", printable(what), "", fix),))


def _folder(path: str, watch_s: float) -> Checked:
    """Snapshot files, and traces that lie among them or alone."""
    report = check_directory(path, watch_s=watch_s)
    traces = [file.name for file in report.files if file.name.endswith(_TRACE_SUFFIX)]
    if not traces:
        return Checked("folder", "", tuple(folder_findings(report)), report)
    report = replace(report, files=tuple(file for file in report.files if file.name not in traces))
    findings = list(folder_findings(report)) if report.files else []
    found = {name: _trace(os.path.join(path, name)) for name in traces}  # noqa: PTH118 - any bytes
    for name, trace in found.items():
        first = [Finding("ok", trace.summary)] if trace.summary else []
        for finding in (*first, *trace.findings):
            text = finding.what if name in finding.what else f"{name}: {finding.what}"
            findings.append(replace(finding, what=printable(text)))
    traces_of = {name: trace.more.get("trace") for name, trace in found.items()}
    return Checked("folder", "", tuple(findings), report, {"traces": traces_of})


def _trace(path: str) -> Checked:
    from veloxquant_exporters.check.trace import check_trace

    found = check_trace(Path(path))
    return Checked("trace", found.summary, found.findings, more={"trace": found.header})


def _file(path: str) -> Checked:
    with Path(path).open("rb") as file:
        start = file.read(len(_SNAPSHOT_START))
        if start.startswith(_TRACE_START) or path.endswith(_TRACE_SUFFIX):
            return _trace(path)
        if start == _SNAPSHOT_START:
            report = DirectoryReport((check_file(path),))
            return Checked("snapshot", "", tuple(folder_findings(report)), report)
        return _page(start + file.read(MAX_BODY_BYTES))


def _page(body: bytes) -> Checked:
    if len(body) > MAX_BODY_BYTES:
        return _nothing(f"it is longer than {MAX_BODY_BYTES // 2**20} MiB, and no metrics page")
    page = check_page(body)
    return Checked("page", page.summary, tuple(page.findings))
