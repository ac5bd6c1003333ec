"""Ports: whether an exporter could listen there, or one does already."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from veloxquant_exporters.doctor.settings import DEFAULT_PORTS, Settings
from veloxquant_exporters.fetch import FetchError, fetch
from veloxquant_exporters.findings import Finding, printable
from veloxquant_exporters.port_holder import port_holder

__all__ = ["find"]

_HOST = "127.0.0.1"
_ASK_S = 3.0
_USES = dict(zip(DEFAULT_PORTS, ("the exporter in a server", "the sidecar"), strict=True))


def find(settings: Settings) -> Iterator[Finding]:
    """The findings; see `checks`."""
    for port in settings.ports:
        yield _look(port)


def _look(port: int) -> Finding:
    use = f", for {_USES[port]}" if port in _USES else ""
    fault = _bind(port)
    if fault is None:
        return Finding("ok", f"port {port} is free{use}")
    if fault.errno == errno.EACCES:
        return Finding(
            "problem",
            f"port {port} is not for this user",
            "ports below 1024 are root's",
            "choose one above: --port 9464",
        )
    if fault.errno != errno.EADDRINUSE:
        return Finding("problem", f"port {port} cannot be had: {fault.strerror or fault}")
    return _taken(port, use)


def _bind(port: int) -> OSError | None:
    """Why a server could not listen, None if it could; asked as our server asks."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((_HOST, port))
            sock.listen(1)
        except OSError as error:
            return error
    return None


def _taken(port: int, use: str) -> Finding:
    holder = printable(port_holder(port))
    url = f"http://{_HOST}:{port}/metrics"
    if _is_ours(url):
        return Finding(
            "ok",
            f"port {port} is taken{holder}: an exporter of ours",
            f"its page can be looked at: vqmon check {url}",
        )
    return Finding(
        "warning",
        f"port {port} is taken{holder}{use}",
        "what answers there has no metrics of block pools, and an exporter could not start",
        "stop it, or choose another: start_http_server(0), vqmon serve --port 0",
    )


def _is_ours(url: str) -> bool:
    try:
        answer = fetch(url, timeout_s=_ASK_S)
    except FetchError:
        return False
    return answer.status == 200 and b"# TYPE veloxquant_exporter_up " in answer.body
