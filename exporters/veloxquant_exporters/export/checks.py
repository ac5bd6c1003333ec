"""What may be put into boards and rules as text: each check gives back what can stand there.

Each raises ValueError, with what is allowed, for what would break the YAML, the query or the link
it goes into.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["job", "label", "namespace", "runbook_base"]

# What stays one word in YAML, in JSON and in a link: no blanks, quotes, braces or brackets.
_URL: Final = re.compile(r"(?:https?://|file:///)[^/\s\"'<>{}|\\^`#][^\s\"'<>{}|\\^`#]*", re.ASCII)
_JOB: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@-]*(?<!:)")
_KEY: Final = re.compile(
    r"(?:[a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?", re.ASCII
)
_VALUE: Final = re.compile(r"(?:[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_NAMESPACE: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def runbook_base(url: str) -> str:
    """`url` without the slash at its end; `/<runbook>.md` is put behind it.

    Raises:
        ValueError: It is no address that can stand in a rule and in a link.
    """
    if not _URL.fullmatch(url):
        raise ValueError(
            f"{url!r} cannot be where runbooks are: allowed is http://, https:// or file:// and "
            "an address without blanks, quotes, braces or '#'"
        )
    return url.rstrip("/")


def job(name: str) -> str:
    """The job's name, if it can stand in a rule.

    Raises:
        ValueError: It cannot.
    """
    if not _JOB.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be a job here: allowed are letters, digits and any of _ . / : @ - "
            "after the first, not ending in a colon"
        )
    return name


def label(text: str) -> tuple[str, str]:
    """Key and value of a manifest's label written KEY=VALUE.

    Raises:
        ValueError: Kubernetes would refuse it.
    """
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise ValueError(
            f"{text!r} cannot be a label: allowed is KEY=VALUE, of letters, digits, '_', '.' and "
            "'-', the key with a 'domain/' before it if need be"
        )
    return key, value


def namespace(name: str) -> str:
    """The namespace's name, if there can be one.

    Raises:
        ValueError: Kubernetes would refuse it.
    """
    if not _NAMESPACE.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be a namespace: allowed are small letters, digits and '-' between them"
        )
    return name
