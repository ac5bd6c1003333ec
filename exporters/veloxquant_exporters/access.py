"""Access: how to get at a metrics page that does not let everybody in."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from veloxquant_exporters.fetch import FetchError

__all__ = ["Access"]


@dataclass(frozen=True, slots=True)
class Access:
    """How to get in; a name and password stand in the URL.

    Attributes:
        ca_file: PEM; whom to trust instead of the system's authorities.
        cert_file, key_file: PEM; the certificate to show, and its key if that is apart.
        token_file: Holds a bearer token; read anew at each request, as tokens are renewed.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    token_file: str | None = None

    def context(self) -> ssl.SSLContext | None:
        """The TLS side of a request; None if there is nothing special about it.

        Raises:
            FetchError: A file cannot be used.
        """
        if self.ca_file is None and self.cert_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                # An empty passphrase keeps OpenSSL from asking for one at the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise FetchError(
                f"{files} cannot be used: {_reason(error)}", "Name files that this user can read"
            ) from error
        return context

    def authorization(self) -> str:
        """The header of that name; "" without a token.

        Raises:
            FetchError: The file cannot be read, or holds no token.
        """
        if self.token_file is None:
            return ""
        try:
            token = Path(self.token_file).read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise FetchError(
                f"{self.token_file} cannot be read: {_reason(error)}", "Name the file of a token"
            ) from error
        if not token or not token.isprintable() or " " in token:
            raise FetchError(
                f"{self.token_file} holds something else than a token",
                "It must hold a token and nothing else",
            )
        return f"Bearer {token}"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no PEM file with what is needed ({error.reason or 'unreadable'})"
    return (isinstance(error, OSError) and error.strerror) or str(error)
