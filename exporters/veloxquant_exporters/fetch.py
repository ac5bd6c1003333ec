"""fetch: one HTTP GET within a time and a size, whoever answers; for commands that look at a URL."""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

__all__ = ["MAX_BODY_BYTES", "Answer", "FetchError", "fetch", "is_url", "without_password"]

MAX_BODY_BYTES: Final = 64 * 2**20
_CHUNK: Final = 2**16
_USER: Final = re.compile(r"://.*@", re.DOTALL)


class FetchError(Exception):
    """There is no answer.

    Attributes:
        what: The fact, with the address and the cause.
        fix: What to do.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. {fix}")
        self.what = what
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, whatever its status.

    Attributes:
        url: Where it came from, after redirects, without a password.
        status: HTTP status.
        content_type: As sent, "" if it was not.
        body: At most `MAX_BODY_BYTES`.
    """

    url: str
    status: int
    content_type: str
    body: bytes


def is_url(text: str) -> bool:
    """Whether it is meant as an address for `fetch`."""
    return text.lower().startswith(("http://", "https://"))


def without_password(text: str) -> str:
    """What was typed as an address, fit to be shown: without user and password, if it has any."""
    try:
        return _without_user(_split(text))[0]
    except FetchError:  # no telling where a password ends, then: at the last @
        return _USER.sub("://", text)


def fetch(
    url: str,
    *,
    accept: str = "*/*",
    timeout_s: float = 10.0,
    authorization: str = "",
    context: ssl.SSLContext | None = None,
) -> Answer:
    """GET an address.

    A user and password in the URL are sent by Basic authentication. Proxies of the environment are
    not asked for this machine's own addresses.

    Args:
        url: `http` or `https`.
        accept: The header.
        timeout_s: For all of it, from looking up the name to the last byte.
        authorization: The header, instead of what a user and password in the URL give.
        context: Whom to trust and what to show, of `https`; None trusts whom the system does.

    Raises:
        FetchError: No answer, too slow, too long, or no URL.
    """
    parts = _split(url)
    shown, token = _without_user(parts)
    authorization = authorization or (token and f"Basic {token}")
    call = _Call(shown, accept, authorization, timeout_s, context)
    # A thread of its own, since neither a name server nor a header that drips keeps to a timeout.
    thread = threading.Thread(target=call.run, name="veloxquant-fetch", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if call.error is not None:
        raise call.error
    if call.answer is None:
        raise FetchError(
            f"{shown} does not answer within {timeout_s:g} s",
            "Is the server overloaded, or a firewall in between? Try: curl -v " + shown,
        )
    return call.answer


class _Call:
    def __init__(
        self,
        url: str,
        accept: str,
        authorization: str,
        timeout_s: float,
        context: ssl.SSLContext | None,
    ) -> None:
        self.url = url
        self._accept = accept
        self._authorization = authorization
        self._timeout_s = timeout_s
        self._context = context
        self.answer: Answer | None = None
        self.error: FetchError | None = None

    def run(self) -> None:
        try:
            self.answer = self._get()
        except FetchError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a stranger sends ends in one line
            self.error = _explained(self.url, error)

    def _get(self) -> Answer:
        handlers: list[urllib.request.BaseHandler] = []
        if _is_this_machine(urlsplit(self.url).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        if self._context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self._context))
        opener = urllib.request.build_opener(*handlers)
        request = urllib.request.Request(self.url, headers={"Accept": self._accept})  # noqa: S310
        if self._authorization:  # for this address alone, not for where it may redirect to
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            with opener.open(request, timeout=self._timeout_s) as response:
                return self._read(response, response.status)
        except urllib.error.HTTPError as error:
            with error:
                return self._read(error, error.code)

    def _read(self, response: http.client.HTTPResponse | urllib.error.HTTPError, n: int) -> Answer:
        end = time.monotonic() + self._timeout_s
        body = bytearray()
        while chunk := response.read(_CHUNK):
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise FetchError(
                    f"{self.url} sends more than {MAX_BODY_BYTES // 2**20} MiB",
                    "This is not what is read here; is it the right address?",
                )
            if time.monotonic() > end:
                return Answer(self.url, n, "", b"")  # nobody waits any more
        return Answer(
            response.url or self.url, n, response.headers.get("Content-Type", ""), bytes(body)
        )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        # What it quotes may be of a password with a mark that it took for the end of the address.
        why = "marks in a name or password must be written as %2F" if "@" in url else str(error)
        raise _no_url(url, why) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _no_url(url, "allowed is http://HOST:PORT/PATH or https://...")
    if not url.isprintable() or " " in url:
        raise _no_url(url, "it holds blanks or control characters")
    return parts


def _no_url(url: str, why: str) -> FetchError:
    return FetchError(
        f"{_USER.sub('://', url)!a} is no address: {why}",
        "Write all of it, as in http://127.0.0.1:9464/metrics",
    )


def _without_user(parts: SplitResult) -> tuple[str, str]:
    user, at, host = parts.netloc.rpartition("@")
    shown = urlunsplit(parts._replace(netloc=host))
    if not at:
        return shown, ""
    return shown, base64.b64encode(unquote(user).encode()).decode()


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _explained(url: str, error: Exception) -> FetchError:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLError):
        return FetchError(
            f"{url} cannot be trusted, or speaks no TLS: {cause}",
            "Name the authority that signed its certificate: SSL_CERT_FILE=ca.pem; or is it http://?",
        )
    if isinstance(cause, ConnectionRefusedError):
        return FetchError(
            f"nothing listens at {url}",
            "Start the server, or correct the address; `vqmon doctor` shows which ports are in use",
        )
    if isinstance(cause, TimeoutError):
        return FetchError(f"{url} does not answer in time", f"Try: curl -v {url}")
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return FetchError(f"{url} cannot be read: {text}", "Is it the right host, port and protocol?")
