"""Listening sockets: from the address a user typed to sockets that are bound, or one clear error."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Final

from veloxquant_exporters.port_holder import port_holder

__all__ = ["BACKLOG", "StartError", "bind", "shown_host"]

BACKLOG: Final = 1024  # bursts wait here; the system may allow fewer
# Families that a name resolves to and this machine may not have.
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# A port that is free on 127.0.0.1 may be taken on ::1: then another one is tried.
_TRIES: Final = 8

_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


class StartError(OSError):
    """The server could not start; the text says why and what to do, in one line.

    `errno` is that of the cause, None where there is none.
    """

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.errno = number


def bind(addr: str, port: int) -> list[socket.socket]:
    """Bound, listening sockets for an address, all on one port.

    Args:
        addr: A name or an IPv4 or IPv6 address, in brackets or not. "::" takes IPv4 as well; a name
            with several addresses, as localhost, takes each one that this machine has.
        port: 0 takes a free one.

    Raises:
        StartError: The address is none of this machine's, or the port cannot be had.
        ValueError: The port is out of 0..65535, or the address empty.
        TypeError: The port is no int.
    """
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"port must be an int, got {port!r}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be 0 (any free one) to 65535, got {port}")
    addresses = _resolve(addr)
    for left in reversed(range(_TRIES)):
        try:
            return _bind_all(addresses, port)
        except OSError as error:
            if port == 0 and error.errno == errno.EADDRINUSE and left:
                continue
            raise _start_error(addr, port, error) from error
    raise AssertionError  # pragma: no cover - the last try raises


def shown_host(sock: socket.socket) -> str:
    """The host to put into a URL for a bound socket; this machine's own for a wildcard."""
    host: str = sock.getsockname()[0]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"[{host}]" if ":" in host else host


def _resolve(addr: str) -> list[_Address]:
    host = addr[1:-1] if addr.startswith("[") and addr.endswith("]") else addr
    if not host:
        raise ValueError("addr must be an address or a name; '127.0.0.1' is this machine only, "
                         "'::' all its interfaces")  # fmt: skip
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartError(f"cannot serve on {addr!r}: no such address or name ({error})") from error
    return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))


def _bind_all(addresses: list[_Address], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, sockaddr in addresses:
            try:
                sockets.append(_bind_one(family, (sockaddr[0], port, *sockaddr[2:])))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
            else:
                port = sockets[0].getsockname()[1]
        if not sockets:
            assert missing is not None
            raise missing
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bind_one(family: socket.AddressFamily, sockaddr: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            # The last server's connections may linger in TIME_WAIT; they must not bar a restart.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(sockaddr[0] != "::"))
        sock.bind(sockaddr)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _start_error(addr: str, port: int, error: OSError) -> StartError:
    if error.errno == errno.EADDRINUSE:
        text = (
            f"port {port} of {addr} is taken{port_holder(port)}; stop what holds it, or choose another "
            "port (0 takes a free one)"
        )
    elif error.errno == errno.EACCES:
        text = f"port {port} is not allowed for this user; choose one above 1023"
    elif error.errno in _NOT_HERE:
        text = f"cannot serve on {addr!r}: this machine has no such address; 127.0.0.1 always works"
    else:
        text = f"cannot serve on port {port} of {addr}: {error.strerror or error}"
    return StartError(text, error.errno)
