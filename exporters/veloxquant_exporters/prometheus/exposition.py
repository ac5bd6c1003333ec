"""Exposition: plain families as text, byte for byte what prometheus-client makes of them, sooner.

prometheus-client looks at every name and label of every sample anew; on a page of 64 pools that is
most of the time, and the time is the model server's. Here labels are written once for all samples
that share them. Only gauges, counters and histograms without extras are plain: for all else
`render_plain` says no, and prometheus-client renders the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from prometheus_client.metrics_core import Metric  # noqa: TC002 - loaded below anyway
from prometheus_client.samples import Exemplar  # noqa: TC002
from prometheus_client.utils import floatToGoString

__all__ = ["render_plain"]

_PLAIN_TYPES: Final = frozenset({"gauge", "counter", "histogram"})
# Of metrics and labels; a metric's colon is for recording rules, and prometheus-client's to judge.
_PLAIN_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# The text format moves these samples to families of their own.
_MOVED: Final = ("_created", "_gsum", "_gcount")


class _NotPlainError(ValueError):
    """There is something on the page that prometheus-client had better render."""


def render_plain(families: Iterable[Metric], *, openmetrics: bool) -> bytes | None:
    """The page in UTF-8, in the text format or in OpenMetrics 1.0; None if not all is plain."""
    lines: list[str] = []
    names, labels = _Names(), _Labels()
    try:
        for family in families:
            lines.append(_head(family, names, openmetrics=openmetrics))
            for sample in family.samples:
                if sample.timestamp is not None or sample.native_histogram is not None:
                    return None
                end = "\n"
                if openmetrics and sample.exemplar is not None:
                    end = _exemplar(family, sample.exemplar)
                # Most samples are 0.
                value = floatToGoString(sample.value) if sample.value else "0.0"  # type: ignore[no-untyped-call]
                name, braces = names[sample.name], labels[tuple(sample.labels.items())]
                lines.append(f"{name}{braces} {value}{end}")
    except _NotPlainError:
        return None
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode("utf-8")


class _Names(dict[str, str]):
    """Names of samples, each looked at once."""

    def __missing__(self, name: str) -> str:
        if not _PLAIN_NAME.fullmatch(name) or name.endswith(_MOVED):
            raise _NotPlainError(name)
        return self.setdefault(name, name)


class _Labels(dict[tuple[tuple[str, str], ...], str]):
    """The labels of a sample, in braces and in order, by their names and values."""

    def __init__(self) -> None:
        super().__init__({(): ""})
        self._pairs = _Pairs()

    def __missing__(self, labels: tuple[tuple[str, str], ...]) -> str:
        text = ",".join([self._pairs[item] for item in sorted(labels)])
        return self.setdefault(labels, f"{{{text}}}")


class _Pairs(dict[tuple[str, str], str]):
    """A label as it is written, by its name and value."""

    def __missing__(self, item: tuple[str, str]) -> str:
        name, value = item
        if not _PLAIN_NAME.fullmatch(name):
            raise _NotPlainError(name)
        text = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        return self.setdefault(item, f'{name}="{text}"')


def _head(family: Metric, names: _Names, *, openmetrics: bool) -> str:
    if family.type not in _PLAIN_TYPES or family.unit:
        raise _NotPlainError(family.type)
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    name = names[family.name]
    if openmetrics:
        text = text.replace('"', r"\"")
    elif family.type == "counter":
        name += "_total"
    return f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"


def _exemplar(family: Metric, exemplar: Exemplar) -> str:
    if family.type != "counter":
        raise _NotPlainError(family.name)
    labels = _Labels()
    # Unlike a sample's, an exemplar's braces stay when they are empty.
    braces = labels[tuple(exemplar.labels.items())] or "{}"
    value = floatToGoString(exemplar.value)  # type: ignore[no-untyped-call]
    when = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {braces} {value}{when}\n"
