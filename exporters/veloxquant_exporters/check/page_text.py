"""A metrics page as text becomes samples; what breaks the rules of its format becomes findings.

prometheus-client's parsers say only whether they can read a page, and the one for the text format
reads much that Prometheus does not. This one names the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from veloxquant_exporters.findings import Findings, printable

__all__ = ["Page", "Sample", "parse_page"]

Labels = tuple[tuple[str, str], ...]

TYPES: Final = {
    False: ("counter", "gauge", "histogram", "summary", "untyped"),
    True: (
        "counter", "gauge", "histogram", "gaugehistogram", "summary", "info", "stateset", "unknown",
    ),
}  # fmt: skip
# What a family of a kind may call its samples, beside its own name.
_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "summary": ("", "_sum", "_count", "_created"),
    "gaugehistogram": ("_bucket", "_gsum", "_gcount"),
}
_OPEN_SUFFIXES: Final = {**_SUFFIXES, "counter": ("_total", "_created"), "info": ("_info",)}

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\[\\n"])*)"')
# No two parts of it can take the same digits: a long number that is none must not take for ever.
_NUMBER: Final = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|Inf)|NaN", re.ASCII)
_ESCAPE: Final = re.compile(r'\\([\\n"])')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line with a value.

    Attributes:
        name: As it stands there, with a suffix such as `_bucket`.
        labels: Names and values, in the order of the names.
        value: Possibly NaN or infinite.
        line: Its number, from 1.
    """

    name: str
    labels: Labels
    value: float
    line: int

    @property
    def series(self) -> tuple[str, Labels]:
        """What tells it from every other sample of a page."""
        return self.name, self.labels

    def __str__(self) -> str:
        inside = ",".join(f'{name}="{value}"' for name, value in self.labels)
        return printable(f"{self.name}{{{inside}}}" if inside else self.name)


@dataclass(slots=True)
class Page:
    """What a page holds.

    Attributes:
        openmetrics: Whether it is OpenMetrics, or the text format.
        kinds: Type by family; in OpenMetrics a counter's family lacks the `_total`.
        samples: In order.
        findings: Where it breaks the rules of its format.
    """

    openmetrics: bool
    kinds: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)

    def sample_kinds(self) -> dict[str, str]:
        """Type by the name that samples have in both formats: a counter's ends in `_total`."""
        return {
            f"{name}_total" if self.openmetrics and kind == "counter" else name: kind
            for name, kind in self.kinds.items()
        }


class _SyntaxFaultError(ValueError):
    """A line is none of its format."""


def parse_page(text: str, *, openmetrics: bool) -> Page:
    """Read a whole page; a bad line costs itself only.

    Args:
        text: The page.
        openmetrics: Read it as OpenMetrics 1.0, or as the text format 0.0.4.
    """
    return _Reader(openmetrics).read(text)


class _Reader:
    def __init__(self, openmetrics: bool) -> None:
        self.page = Page(openmetrics)
        self._helped: set[str] = set()
        self._seen: dict[tuple[str, Labels], int] = {}
        self._done: set[str] = set()  # families that other samples came after
        self._family = ""

    def read(self, text: str) -> Page:
        lines = text.split("\n")
        if lines[-1]:
            self._fault(len(lines), "the last line does not end; the page is cut off")
        else:
            del lines[-1]
        for number, line in enumerate(lines, 1):
            try:
                self._line(line, number)
            except _SyntaxFaultError as fault:
                self._fault(number, str(fault), line)
        if self.page.openmetrics and (not lines or lines[-1] != "# EOF"):
            self._fault(len(lines), "an OpenMetrics page ends in '# EOF'; this one is cut off")
        return self.page

    def _fault(self, number: int, text: str, line: str = "") -> None:
        where = f"line {number}: {text}"
        shown = f"{where}: {printable(line, 80)}" if line else where
        self.page.findings.add("problem", shown, kind=text)

    def _line(self, line: str, number: int) -> None:
        if line.endswith("\r"):
            raise _SyntaxFaultError("a carriage return at the end; lines end in a newline alone")
        if line.startswith("#"):
            self._comment(line)
        elif line.strip():
            self._sample(line, number)
        elif self.page.openmetrics:
            raise _SyntaxFaultError("OpenMetrics has no empty lines")

    # -- what is said of families ---------------------------------------------------------------

    def _comment(self, line: str) -> None:
        words = line.split(" ", 3)
        if words[0] != "#" or len(words) < 2 or words[1] not in ("HELP", "TYPE", "UNIT"):
            if self.page.openmetrics and line != "# EOF":
                raise _SyntaxFaultError("OpenMetrics has no comments but HELP, TYPE, UNIT and EOF")
            return
        if len(words) < 3 or not _NAME.fullmatch(words[2]):
            raise _SyntaxFaultError(f"{words[1]} names no metric")
        name, rest = words[2], words[3] if len(words) > 3 else ""
        if name in self._done:
            raise _SyntaxFaultError(f"{words[1]} of a metric whose samples stand above")
        if words[1] == "HELP":
            if name in self._helped:
                raise _SyntaxFaultError("a second HELP of one metric")
            self._helped.add(name)
        elif words[1] == "TYPE":
            self._type(name, rest)
        self._enter(name)

    def _type(self, name: str, kind: str) -> None:
        if kind not in TYPES[self.page.openmetrics]:
            raise _SyntaxFaultError("a TYPE that this format does not have")
        if name in self.page.kinds:
            raise _SyntaxFaultError("a second TYPE of one metric")
        if self._family == name and any(s.name.startswith(name) for s in self.page.samples[-1:]):
            raise _SyntaxFaultError("TYPE below the samples that it is of")
        self.page.kinds[name] = kind

    def _enter(self, family: str) -> None:
        """Lines of one family stand together."""
        if family != self._family:
            self._done.add(self._family)
            self._family = family
        if family in self._done:
            raise _SyntaxFaultError("samples of one metric stand apart from each other")

    # -- samples --------------------------------------------------------------------------------

    def _sample(self, line: str, number: int) -> None:
        found = _NAME.match(line)
        if not found:
            raise _SyntaxFaultError("no metric's name at the beginning")
        labels, rest = _labels(line, found.end())
        value, _, more = rest.lstrip(" \t").partition(" ")
        if not _NUMBER.fullmatch(value):
            raise _SyntaxFaultError("the value is no number")
        self._tail(more)
        family = self._family_of(found[0])
        sample = Sample(found[0], labels, float(value), number)
        if sample.series in self._seen:
            raise _SyntaxFaultError(f"the same series as on line {self._seen[sample.series]}")
        self._seen[sample.series] = number
        self.page.samples.append(sample)
        self._enter(family)

    def _tail(self, more: str) -> None:
        """A timestamp may follow, and in OpenMetrics an exemplar."""
        timestamp, mark, exemplar = more.partition("# ")
        if timestamp.strip(" ") and not _NUMBER.fullmatch(timestamp.strip(" ")):
            raise _SyntaxFaultError("what follows the value is no timestamp")
        if not mark:
            return
        if not self.page.openmetrics:
            raise _SyntaxFaultError("the text format has no exemplars")
        rest = _labels(exemplar, 0)[1].split() if exemplar.startswith("{") else []
        if not 1 <= len(rest) <= 2 or not all(map(_NUMBER.fullmatch, rest)):
            raise _SyntaxFaultError("what follows '#' is no exemplar")

    def _family_of(self, name: str) -> str:
        """The family that a sample of this name belongs to: the one that was announced."""
        suffixes = _OPEN_SUFFIXES if self.page.openmetrics else _SUFFIXES
        for candidate in _candidates(name):
            kind = self.page.kinds.get(candidate)
            if kind and name[len(candidate) :] in suffixes.get(kind, ("",)):
                return candidate
        return name


def _candidates(name: str) -> Iterator[str]:
    yield name
    stem, underscore, _ = name.rpartition("_")
    if underscore:
        yield stem


def _labels(line: str, at: int) -> tuple[Labels, str]:
    """The labels that begin at a place of the line, and what comes after them."""
    if line[at : at + 1] != "{":
        if line[at : at + 1] not in (" ", "\t"):
            raise _SyntaxFaultError("neither a label nor a value after the name")
        return (), line[at:]
    at = _blanks(line, at + 1)
    labels: dict[str, str] = {}
    while line[at : at + 1] != "}":
        found = _LABEL.match(line, at)
        if not found:
            raise _SyntaxFaultError('labels are not as in {name="value"}')
        if found[1] in labels:
            raise _SyntaxFaultError("a label stands twice")
        labels[found[1]] = _unescaped(found[2])
        at = _blanks(line, found.end())
        if line[at : at + 1] == ",":
            at = _blanks(line, at + 1)
        elif line[at : at + 1] != "}":
            raise _SyntaxFaultError('labels are not as in {name="value"}')
    return tuple(sorted(labels.items())), line[at + 1 :]


def _blanks(line: str, at: int) -> int:
    """Where the blanks end that begin at a place, which both formats pass over in labels."""
    while line[at : at + 1] in (" ", "\t"):
        at += 1
    return at


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], text)
