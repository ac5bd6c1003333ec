"""Findings as the commands print them: a line each, or a few; and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from veloxquant_exporters.findings import Finding, Level

__all__ = ["as_block", "as_dict", "as_line", "counted"]

_COLOURS: Final = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "red"}
_WIDTH: Final = len("warning") + 2
_NAMES: Final[tuple[tuple[Level, str, str], ...]] = (
    ("problem", "problem", "problems"),
    ("warning", "warning", "warnings"),
    ("note", "note", "notes"),
)


def as_line(finding: Finding) -> str:
    """The finding on one line."""
    text = finding.what
    if finding.why:
        text += f": {finding.why}"
    if finding.fix:
        text += f". Fix: {finding.fix}"
    return _level(finding) + text


def as_block(finding: Finding) -> str:
    """The finding with its reason and its fix on lines of their own."""
    lines = [_level(finding) + finding.what]
    for head, text in (("why: ", finding.why), ("fix: ", finding.fix)):
        if text:
            lines += [" " * _WIDTH + (head if n == 0 else " " * len(head)) + line
                      for n, line in enumerate(text.splitlines())]  # fmt: skip
    return "\n".join(lines)


def as_dict(finding: Finding) -> dict[str, Any]:
    """The finding for a program; every key is there."""
    return {
        "level": finding.level,
        "what": finding.what,
        "why": finding.why,
        "fix": finding.fix,
    }


def counted(findings: Iterable[Finding]) -> str:
    """How many there are of each level that asks for something, in words."""
    levels = Counter(finding.level for finding in findings)
    parts = [_number(levels[level], one, many) for level, one, many in _NAMES if levels[level]]
    return ", ".join(parts) if parts else "nothing found"


def _number(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _level(finding: Finding) -> str:
    # click takes the colour away where the output is no terminal, or NO_COLOR is set.
    return click.style(finding.level, fg=_COLOURS[finding.level]) + " " * (
        _WIDTH - len(finding.level)
    )
