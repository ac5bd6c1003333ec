"""Versions against bounds, as far as our own requirements use them; after PEP 440."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Requirement", "parse_requirement", "version_key"]

_VERSION: Final = re.compile(
    r"v?(?:\d+!)?(?P<release>\d+(?:\.\d+)*)(?:[-_.]?(?P<stage>a|b|rc)[-_.]?(?P<n>\d*))?"
    r"(?:[-_.]?post\d*)?(?P<dev>\.?dev\d*)?(?:\+[\w.]+)?",
    re.IGNORECASE,
)
_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?\s*(?P<bounds>[^;]*)"
    r"(?:;.*?extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"])?"
)
_STAGES: Final = {"a": 0, "b": 1, "rc": 2}
_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}

Key = tuple[tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class Requirement:
    """A library with its bounds.

    Attributes:
        name: Normalised: lower case, one hyphen for each run of separators.
        bounds: Operator and version, each.
        extra: The extra that asks for it; "" for all installations.
    """

    name: str
    bounds: tuple[tuple[str, str], ...]
    extra: str = ""

    @property
    def text(self) -> str:
        """The bounds, the lower one first."""
        return ",".join(f"{sign}{version}" for sign, version in sorted(self.bounds, reverse=True))

    def side(self, version: str) -> str:
        """Where a version lies: "within", "below" or "above" the bounds."""
        key = version_key(version)
        for sign, bound in self.bounds:
            limit = version_key(bound)
            # An early release of the next version is that one's, not below it.
            if _OPERATORS[sign](key, limit) and not (sign == "<" and key[0] == limit[0]):
                continue
            low = sign in (">", ">=") or (sign in ("==", "!=") and key < limit)
            return "below" if low else "above"
        return "within"


def parse_requirement(text: str, extra: str = "") -> Requirement | None:
    """A requirement as packaging writes it; None if it is of a kind that we do not use."""
    found = _REQUIREMENT.match(text)
    if found is None:
        return None
    bounds = [_bound(part.strip(" ()")) for part in found["bounds"].split(",") if part.strip()]
    whole = tuple(bound for bound in bounds if bound is not None)
    if len(whole) != len(bounds):
        return None
    name = re.sub(r"[-_.]+", "-", found["name"]).lower()
    return Requirement(name, whole, found["extra"] or extra)


def _bound(text: str) -> tuple[str, str] | None:
    sign = next((sign for sign in _OPERATORS if text.startswith(sign)), None)
    if sign is None or not _VERSION.fullmatch(version := text[len(sign) :].strip()):
        return None
    return sign, version


def version_key(version: str) -> Key:
    """What orders versions: a pre-release goes before its release.

    Raises:
        ValueError: It is no version.
    """
    found = _VERSION.fullmatch(version.strip())
    if found is None:
        raise ValueError(f"{version!r} is no version")
    release = tuple(map(int, found["release"].split(".")))
    stage = _STAGES[found["stage"].lower()] if found["stage"] else -1 if found["dev"] else 3
    return _without_zeros(release), stage, int(found["n"] or 0)


def _without_zeros(release: Iterable[int]) -> tuple[int, ...]:
    parts = list(release)
    while len(parts) > 1 and not parts[-1]:
        del parts[-1]
    return tuple(parts)
