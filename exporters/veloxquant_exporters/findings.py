"""Finding: one thing that `vqmon check` or `vqmon doctor` found, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["LEVELS", "Finding", "Findings", "Level", "printable"]

Level = Literal["ok", "note", "warning", "problem"]
# From harmless to not.
LEVELS: Final[tuple[Level, ...]] = ("ok", "note", "warning", "problem")
# Of one kind, as one bad line in a file is often followed by a thousand like it.
MAX_ALIKE: Final = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        level: ok: as it should be. note: good to know. warning: it works, and will bite. problem: it
            does not work, or what it says is not true.
        what: The fact, in one line.
        why: Why it matters, or what it comes from; "" where that is plain.
        fix: A command, or a line to change; "" where there is nothing to do.
    """

    level: Level
    what: str
    why: str = ""
    fix: str = ""


class Findings:
    """Findings as they come in; of one kind the first few, and how many more there were."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._kinds: Counter[tuple[Level, str]] = Counter()

    def add(self, level: Level, what: str, why: str = "", fix: str = "", *, kind: str = "") -> None:
        """Take one in.

        Args:
            level: As in `Finding`.
            what: As in `Finding`.
            why: As in `Finding`.
            fix: As in `Finding`.
            kind: What findings that are alike have in common; "" if there can be one only.
        """
        if kind:
            self._kinds[level, kind] += 1
            if self._kinds[level, kind] > MAX_ALIKE:
                return
        self._found.append(Finding(level, what, why, fix))

    def extend(self, findings: Iterable[Finding]) -> None:
        """Take in what another one found."""
        self._found += findings

    def __iter__(self) -> Iterator[Finding]:
        yield from self._found
        for (level, kind), n in self._kinds.items():
            if n > MAX_ALIKE:
                yield Finding(level, f"{n - MAX_ALIKE:,} more like this: {kind}")

    def __bool__(self) -> bool:
        return bool(self._found)


def printable(text: str, limit: int = 500) -> str:
    """`text` on one line and safe on a terminal: what does not print is escaped, the end cut.

    Names of pools, files and processes are other people's text.
    """
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
