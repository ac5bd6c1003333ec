"""TLS: a server context from certificate files, renewed when they are."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from veloxquant_exporters.http.address import StartError

__all__ = ["Tls"]

HANDSHAKE_S: Final = 10.0
SHUTDOWN_S: Final = 1.0

_log = logging.getLogger("veloxquant_exporters.http")


class Tls:
    """The TLS side of a server; TLS 1.2 and newer.

    Args:
        certfile: PEM, the server's certificate first, then what chains it to its root.
        keyfile: PEM, its private key without a passphrase; None if it is in `certfile`.
        client_cafile: PEM; if given, only clients with a certificate of these authorities get in.

    Raises:
        StartError: A file cannot be read, is no PEM, or key and certificate do not fit.
    """

    def __init__(
        self, certfile: str, keyfile: str | None = None, client_cafile: str | None = None
    ) -> None:
        self._certfile, self._keyfile = certfile, keyfile
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._stamp = self._files_stamp()
        self._load()
        if client_cafile is not None:
            try:
                self.context.load_verify_locations(client_cafile)
            except OSError as error:
                raise StartError(
                    f"client_cafile {client_cafile!r} cannot be used: {_reason(error)}"
                ) from error
            self.context.verify_mode = ssl.CERT_REQUIRED

    @property
    def options(self) -> dict[str, Any]:
        """For `loop.create_server`."""
        return {
            "ssl": self.context,
            "ssl_handshake_timeout": HANDSHAKE_S,
            "ssl_shutdown_timeout": SHUTDOWN_S,
        }

    def renew(self) -> None:
        """Load the files again if they have changed; new connections then get the new certificate.

        What cannot be loaded is logged, and the old one stays.
        """
        stamp = self._files_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            # Into a context of its own first: half of a changed pair must not spoil the one in use.
            Tls(self._certfile, self._keyfile)
            self._load()
        except StartError as error:
            _log.warning("the old certificate stays: %s", error)

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(self._certfile, self._keyfile, password=_no_passphrase)
        except (OSError, ValueError) as error:
            files = f"certfile {self._certfile!r}"
            if self._keyfile is not None:
                files += f" with keyfile {self._keyfile!r}"
            raise StartError(f"{files} cannot be used: {_reason(error)}") from error

    def _files_stamp(self) -> Sequence[object]:
        stamps: list[object] = []
        for name in (self._certfile, self._keyfile):
            try:
                found = Path(name).stat() if name is not None else None
            except OSError:
                found = None
            stamps.append(found and (found.st_mtime_ns, found.st_size, found.st_ino))
        return stamps


def _no_passphrase() -> str:
    # Without this, OpenSSL would ask at the terminal, and a server started elsewhere would hang.
    raise ValueError("the key has a passphrase; store it without one, readable to this user only")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    if isinstance(error, ssl.SSLError):
        return f"no PEM file with what is needed ({error.reason or 'unreadable'})"
    return (isinstance(error, OSError) and error.strerror) or str(error)
