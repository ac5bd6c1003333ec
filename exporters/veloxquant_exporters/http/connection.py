"""Connection: one client of the server. h11 reads and writes the protocol, asyncio the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final, Protocol, cast

import h11

from veloxquant_exporters.http.message import Request, Response, text_response

__all__ = ["Connection", "Limits", "Server"]

# A request's body is read and dropped up to here, so that the client gets its answer.
MAX_BODY_BYTES: Final = 64 * 1024
# Smaller answers leave in one packet or few.
ONE_PIECE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may take, in seconds and numbers.

    Attributes:
        request_s: To send a request, from its connection's beginning.
        idle_s: Between requests; more than a usual scrape interval, so that connections are kept.
        write_s: To take an answer.
        grace_s: For answers under way when the server stops.
        connections: At one time; beyond that, the oldest one is dropped for the new one.
    """

    request_s: float = 10.0
    idle_s: float = 90.0
    write_s: float = 30.0
    grace_s: float = 1.0
    connections: int = 128


class Server(Protocol):
    """What a connection needs of its server; all in the thread of the loop."""

    @property
    def limits(self) -> Limits:
        """What clients may take."""
        raise NotImplementedError

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop."""
        raise NotImplementedError

    @property
    def crowded(self) -> bool:
        """Many requests wait; asked from any thread."""
        raise NotImplementedError

    def opened(self, connection: Connection) -> None:
        """A connection was made."""

    def closed(self, connection: Connection) -> None:
        """It is gone."""

    def answer(
        self, request: Request, wanted: Callable[[], bool], done: Callable[[Response], None]
    ) -> None:
        """Call `done` in the loop's thread once; or not at all when it is no longer `wanted`."""


class Connection(asyncio.Protocol):
    """Reads requests one after another and writes their answers. Never waits without a limit."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER)
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None
        self._request: h11.Request | None = None
        self._n_body = 0
        self._n_early = 0  # bytes that came while an answer was on its way
        self._lost = False
        self._hung_up = False
        self._blocked = False
        self.busy = False  # a request is being answered

    # -- called by asyncio ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the client has `request_s` from now."""
        self._transport = cast("asyncio.Transport", transport)
        # No buffer is low enough: an answer counts as sent when the kernel has all of it.
        self._transport.set_write_buffer_limits(high=0)
        self._server.opened(self)
        self._wait(self._server.limits.request_s)

    def data_received(self, data: bytes) -> None:
        """Read on; a request that comes early waits its turn."""
        if self.busy:
            self._n_early += len(data)
            if self._n_early > MAX_BODY_BYTES:
                self.abort()
                return
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        """Close, unless an answer is under way: who only shut down sending still gets it."""
        self._hung_up = True
        # TLS has no half-closed connections, and asyncio would warn of the wish for one.
        return self.busy and self._transport.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        """The client takes the answer more slowly than it is written."""
        self._blocked = True

    def resume_writing(self) -> None:
        """It has taken all."""
        self._blocked = False
        if self.busy and self._http.our_state is not h11.SEND_RESPONSE:
            self._sent()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it, however it ended: clients hang up, and nobody needs to read of that."""
        self._lost = True
        self._wait(None)
        self._server.closed(self)

    # -- called by the server -------------------------------------------------------------------

    def abort(self) -> None:
        """Drop the client at once, with whatever was not sent."""
        self._transport.abort()

    def fileno(self) -> int:
        """Number of the socket; -1 once it is closed."""
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def close_if_idle(self) -> None:
        """Close now or, with an answer under way, after it."""
        self._hung_up = True
        if not self.busy:
            self._transport.close()

    # -- inside ---------------------------------------------------------------------------------

    def _wait(self, seconds: float | None) -> None:
        """Drop the client in so many seconds unless this is called again before."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self._server.loop.call_later(
            seconds, self.abort
        )  # fmt: skip

    def _advance(self) -> None:
        """Take the next request out of what was received, if it is whole."""
        try:
            while not self.busy and not self._lost:
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self._request, self._n_body = event, 0
                    if self._http.they_are_waiting_for_100_continue:
                        self._dispatch(event)
                elif isinstance(event, h11.Data):
                    self._n_body += len(event.data)
                    if self._n_body > MAX_BODY_BYTES:
                        self._refuse(text_response(413, "a request has no body here"))
                elif isinstance(event, h11.EndOfMessage):
                    assert self._request is not None
                    self._dispatch(self._request)
                elif isinstance(event, h11.ConnectionClosed):
                    self._transport.close()
                    return
                else:
                    return
        except h11.RemoteProtocolError as error:
            self._refuse(text_response(error.error_status_hint, "not a request this server reads"))

    def _dispatch(self, request: h11.Request) -> None:
        self.busy, self._n_early = True, 0
        self._wait(None)
        path, _, query = request.target.decode("latin-1").partition("?")
        headers: dict[str, str] = {}
        for raw_name, raw_value in request.headers:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]},{value}" if name in headers else value
        asked = Request(path, query, headers, request.method.decode("latin-1"))
        self._server.answer(asked, self._wanted, self._respond)

    def _wanted(self) -> bool:
        """Whether an answer is worth making. Called in the worker's thread.

        Who shut down sending may still be reading; but when many wait, most of those are gone.
        """
        return not (self._lost or (self._hung_up and self._server.crowded))

    def _refuse(self, response: Response) -> None:
        """Answer what was no request, and close."""
        self.busy = True
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._respond(response, last=True)
        else:
            self._transport.close()

    def _respond(self, response: Response, *, last: bool = False) -> None:
        """Write an answer."""
        if self._lost:
            return
        head = self._request is not None and self._request.method == b"HEAD"
        headers = [
            ("content-type", response.content_type),
            ("content-length", str(len(response.body))),
            ("date", formatdate(usegmt=True)),
            ("x-content-type-options", "nosniff"),
            *response.headers,
        ]
        if last or self._hung_up or self._http.their_state is not h11.DONE:
            headers.append(("connection", "close"))
        answer = self._http.send(h11.Response(status_code=response.status, headers=headers))
        body = b"" if head else response.body
        if body:
            self._http.send_with_data_passthrough(h11.Data(data=body))
        self._http.send(h11.EndOfMessage())
        self._wait(self._server.limits.write_s)
        self._write(answer or b"", body)
        if not self._blocked:
            self._sent()

    def _write(self, answer: bytes, body: bytes) -> None:
        if len(body) <= ONE_PIECE_BYTES:
            self._transport.write(answer + body)
        else:
            self._transport.write(answer)
            # As a view: what the kernel does not take at once is cut off, which would copy bytes.
            self._transport.write(memoryview(body))

    def _sent(self) -> None:
        """The answer is out: on to the next request, or the end."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._transport.close()
            return
        self._http.start_next_cycle()
        self._request, self.busy = None, False
        self._wait(self._server.limits.idle_s)
        if self._hung_up:
            self._transport.close()
        else:
            # By way of the loop: a client that sends many requests at once must not fill the stack.
            self._server.loop.call_soon(self._advance)
