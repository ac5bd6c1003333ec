"""PrometheusApi: the few questions that the doctor asks of a Prometheus server."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import urlencode

from veloxquant_exporters.fetch import FetchError, fetch, is_url, without_password

__all__ = ["ApiError", "PrometheusApi", "seconds"]

_TIMEOUT_S: Final = 15.0
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class ApiError(Exception):
    """It does not answer, or not as Prometheus does.

    Attributes:
        what: The fact.
        fix: What to do.
        bad_query: The server understood, and refuses the expression.
    """

    def __init__(self, what: str, fix: str = "", *, bad_query: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.bad_query = bad_query


class PrometheusApi:
    """A server, or what speaks its API (Thanos, Mimir, VictoriaMetrics).

    Args:
        url: Its address, with the prefix it may be served under.
    """

    def __init__(self, url: str) -> None:
        self._base = url.rstrip("/").removesuffix("/api/v1")

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """What a call gives as `data`.

        Raises:
            ApiError: There is no such answer.
        """
        if not is_url(self._base):
            raise ApiError(
                f"{without_password(self._base)!a} is no address",
                "write all of the server's own, as in http://127.0.0.1:9090",
            )
        url = f"{self._base}/api/v1/{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            answer = fetch(url, accept="application/json", timeout_s=_TIMEOUT_S)
        except FetchError as error:
            raise ApiError(error.what, error.fix) from error
        try:
            content = json.loads(answer.body)
            if content["status"] == "success" and isinstance(content["data"], dict):
                data: dict[str, Any] = content["data"]
                return data
            said = f"{content['errorType']}: {content['error']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ApiError(
                f"what answers at {answer.url.partition('?')[0]} is no Prometheus "
                f"(status {answer.status}, {answer.content_type or 'no content type'})",
                "give the server's own address, as in http://127.0.0.1:9090; behind a proxy or in "
                "Grafana's name it has a path or another port",
            ) from None
        raise ApiError(said, bad_query=answer.status in (400, 422))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query: each with `metric` and `value`.

        Raises:
            ApiError: As of `get`.
        """
        data = self.get("query", query=expression)
        if data.get("resultType") in ("scalar", "string"):
            return [{"metric": {}, "value": data.get("result")}]
        result = data.get("result")
        return [row for row in result if isinstance(row, dict)] if isinstance(result, list) else []


def seconds(text: object) -> float | None:
    """A duration as Prometheus writes it (`15s`, `1m30s`), in seconds; None if it is none."""
    rest, total = str(text), 0.0
    while rest:
        digits = len(rest) - len(rest.lstrip("0123456789"))
        unit = next((unit for unit in _UNITS if rest[digits:].startswith(unit)), None)
        if not digits or unit is None:
            return None
        total += int(rest[:digits]) * _UNITS[unit]
        rest = rest[digits + len(unit) :]
    return total or None
