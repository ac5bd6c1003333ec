"""Fetching a metrics page: bounded in time and size, without following anyone elsewhere."""

from __future__ import annotations

import base64
import http.client
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from veloxquant_exporters.top.source import SourceError

__all__ = ["Access", "Address", "fetch", "parse_url"]

TIMEOUT_S: Final = 5.0
MAX_PAGE_BYTES: Final = 64 * 2**20
_CHUNK: Final = 2**16
_ACCEPT: Final = "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.5"
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Access:
    """How to get in.

    Attributes:
        ca_file: PEM; whom to trust instead of the system's authorities.
        cert_file, key_file: PEM; the certificate to show, and its key if that is apart.
        token_file: Holds a bearer token; read anew at each request, as tokens are renewed.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    token_file: str | None = None

    def context(self) -> ssl.SSLContext:
        """The TLS side of a request.

        Raises:
            SourceError: A file cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise SourceError(f"{files} cannot be used: {_reason(error)}") from error
        return context

    def token(self) -> str | None:
        """The bearer token, None without a file.

        Raises:
            SourceError: The file cannot be read, or holds no token.
        """
        if self.token_file is None:
            return None
        try:
            token = Path(self.token_file).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{self.token_file} cannot be read: {_reason(error)}") from error
        if not token or not token.isprintable():
            raise SourceError(f"{self.token_file} must hold one line, the token")
        return token


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, taken apart.

    Attributes:
        shown: The URL without name and password.
        scheme: "http" or "https".
        host, port, target: What to connect to, and what to ask for.
        login: "name:password", if the URL has them.
    """

    shown: str
    scheme: str
    host: str
    port: int
    target: str
    login: str | None


def parse_url(url: str) -> Address:
    """`url` with /metrics in place of an empty path.

    Raises:
        SourceError: It is no http or https URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SourceError(f"{url!r} is no URL: {error}") from error
    if parts.scheme not in _PORTS or not parts.hostname:
        raise SourceError(f"{url!r} is no URL as in http://localhost:9464/metrics")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    target = f"{path}?{parts.query}" if parts.query else path
    if not (target + parts.netloc).isascii() or any(c.isspace() for c in target):
        raise SourceError(f"{url!r} holds what a URL must write with % signs")
    login = None
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Address(
        shown=urlunsplit((parts.scheme, _place(parts), path, parts.query, "")),
        scheme=parts.scheme,
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        target=target,
        login=login,
    )


def fetch(address: Address, access: Access, timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
    """Content type and text of the page.

    Proxies of the environment are not used: a metrics page is near.

    Args:
        address: Of the page.
        access: How to get in.
        timeout_s: For all of it, however slowly it comes.

    Raises:
        SourceError: There is no such page, or not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    connection = _connection(address, access, timeout_s)
    try:
        connection.request("GET", address.target, headers=_headers(address, access))
        answer = connection.getresponse()
        _check_status(address, answer)
        body = _body(address, connection, answer, deadline_s)
    except TimeoutError as error:
        raise SourceError(f"{address.shown} does not answer in {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise SourceError(f"{address.shown} does not answer: {_reason(error)}") from error
    finally:
        connection.close()
    try:
        return answer.headers.get_content_type(), body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{address.shown} is no metrics page: not text in UTF-8") from error


def _place(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _connection(address: Address, access: Access, timeout_s: float) -> http.client.HTTPConnection:
    if address.scheme == "https":
        return http.client.HTTPSConnection(
            address.host, address.port, timeout=timeout_s, context=access.context()
        )
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)


def _headers(address: Address, access: Access) -> dict[str, str]:
    headers = {"Accept": _ACCEPT, "User-Agent": "vqmon-top", "Connection": "close"}
    token = access.token()
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    elif address.login is not None:
        encoded = base64.b64encode(address.login.encode()).decode()
        headers["Authorization"] = f"Basic {encoded}"
    return headers


def _check_status(address: Address, answer: http.client.HTTPResponse) -> None:
    if answer.status == http.HTTPStatus.OK:
        return
    said = f"{answer.status} {answer.reason}".strip()
    more = ""
    if 300 <= answer.status < 400 and (place := answer.headers.get("Location")):
        # A token must not go to where a server points.
        more = f": it has moved to {place!r}; ask for that"
    elif answer.status in (401, 403):
        more = ": give it a token (--token-file), a password (in the URL) or a certificate"
    elif answer.status == 404:
        more = ": the page is usually /metrics"
    raise SourceError(f"{address.shown} answers {said}{more}")


def _body(
    address: Address,
    connection: http.client.HTTPConnection,
    answer: http.client.HTTPResponse,
    deadline_s: float,
) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        part = answer.read1(_CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > MAX_PAGE_BYTES:
            raise SourceError(f"{address.shown} is longer than {MAX_PAGE_BYTES >> 20} MiB")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); see --tls-ca"
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS fails"
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:200]
