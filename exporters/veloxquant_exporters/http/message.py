"""Request and Response: what a handler gets and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Handler", "Request", "Response", "text_response"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request without its body.

    Attributes:
        path: Without the query.
        query: As sent, without the question mark.
        headers: By name in lower case; repeated ones joined by a comma.
        method: As sent.
    """

    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"

    def header(self, name: str) -> str:
        """A header by its name in lower case, "" if it is not there."""
        return self.headers.get(name, "")


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. For HEAD the body is left out, and its length told."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[Request], Response]


def text_response(status: int, text: str, *headers: tuple[str, str]) -> Response:
    """A line of text as an answer."""
    return Response(status, f"{text}\n".encode(), headers=headers)
