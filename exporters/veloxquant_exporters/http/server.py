"""HttpServer: answers GET and HEAD on a few paths from inside another program, and stays out of its way.

Two threads, however many clients: one runs the loop that reads and writes for all of them, so that
a client that is slow or gone costs a socket and nothing else; the other runs the handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from veloxquant_exporters.http.address import BACKLOG, StartError, bind, shown_host
from veloxquant_exporters.http.connection import Connection, Limits
from veloxquant_exporters.http.message import Handler, Request, Response, text_response
from veloxquant_exporters.http.tls import Tls
from veloxquant_exporters.http.worker import Worker

__all__ = ["HttpServer", "Route"]

_log = logging.getLogger("veloxquant_exporters.http")

ALLOWED: Final = ("GET", "HEAD")
# A handler that takes longer than any scraper waits is stuck: the server is not ready.
STUCK_S: Final = 30.0
# Requests that wait, beyond which those of clients that hung up are not answered any more.
CROWD: Final = 4


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path.

    Attributes:
        handler: Gets the request; what it raises is logged and answered with status 500.
        quick: It never takes long: it runs in the loop, past whatever the worker does.
    """

    handler: Handler
    quick: bool = False


class HttpServer:
    """A running server; it serves from construction to `stop`. Thread-safe.

    `/-/healthy` and `/-/ready` are there without being asked for.

    Args:
        routes: By path.
        addr: What to listen on, see `bind`.
        port: 0 takes a free one.
        tls: None serves plain HTTP.
        limits: What clients may take.

    Raises:
        StartError: It cannot listen there; nothing is left running.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        addr: str = "127.0.0.1",
        port: int = 0,
        tls: Tls | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._routes = {
            "/-/healthy": Route(lambda _: text_response(200, "healthy"), quick=True),
            "/-/ready": Route(self._ready, quick=True),
            **routes,
        }
        self._tls = tls
        self._sockets = bind(addr, port)
        self.port: int = self._sockets[0].getsockname()[1]
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{shown_host(self._sockets[0])}:{self.port}"
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may stop what is being stopped
        self._stopped = False
        self._connections: dict[Connection, None] = {}  # oldest first
        self.loop: asyncio.AbstractEventLoop  # set by its thread before it has started
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._stopping = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._worker = Worker("veloxquant-scrape")
        self._thread = threading.Thread(target=self._run, name="veloxquant-http", daemon=True)
        _running.add(self)
        self._start()

    def stop(self) -> None:
        """Free the port and end both threads; answers under way get `grace_s`. More calls are no-ops.

        Returns when the port is free. Not to be called from a handler.
        """
        with self._lock:
            if self._stopped or os.getpid() != self._pid:
                return  # a forked child has neither the threads nor the sockets
            self._stopped = True
            # The loop may have ended by itself, or never have begun.
            with contextlib.suppress(RuntimeError, AttributeError):
                self.loop.call_soon_threadsafe(self._stopping.set)
            if self._thread.ident is not None:  # it may not have come to start
                self._thread.join()
            for sock in self._sockets:
                sock.close()
            if not self._worker.close(self.limits.grace_s):
                _log.warning("a scrape is stuck; its thread is left behind until it ends")
            _running.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{' stopped' if self._stopped else ''}>"

    def descriptors(self) -> list[int]:
        """Numbers of the open sockets, for a forked child to let go of."""
        listening = [sock.fileno() for sock in self._sockets]
        return [n for n in (*listening, *(c.fileno() for c in self._connections)) if n >= 0]

    # -- what a connection needs; in the thread of the loop ----------------------------------------

    @property
    def crowded(self) -> bool:
        """See `connection.Server`."""
        return self._worker.n_waiting() > CROWD

    def opened(self, connection: Connection) -> None:
        """See `connection.Server`."""
        if self._stopping.is_set():
            connection.abort()
        elif len(self._connections) >= self.limits.connections:
            # The newest is the likeliest to be a scraper, the oldest to be somebody who hangs on.
            next(iter(self._connections)).abort()
        self._connections[connection] = None
        self._empty.clear()

    def closed(self, connection: Connection) -> None:
        """See `connection.Server`."""
        self._connections.pop(connection, None)
        if not self._connections:
            self._empty.set()

    def answer(
        self, request: Request, wanted: Callable[[], bool], done: Callable[[Response], None]
    ) -> None:
        """See `connection.Server`."""
        route = self._routes.get(request.path)
        if route is None:
            done(text_response(404, "not found; / lists what is here"))
        elif request.method not in ALLOWED:
            done(text_response(405, "only GET and HEAD", ("allow", ", ".join(ALLOWED))))
        elif route.quick:
            done(_handled(route.handler, request))
        elif not self._worker.submit(lambda: self._work(route.handler, request, wanted, done)):
            done(text_response(503, "too many scrapes are waiting", ("retry-after", "1")))

    # -- inside ---------------------------------------------------------------------------------

    def _work(
        self,
        handler: Handler,
        request: Request,
        wanted: Callable[[], bool],
        done: Callable[[Response], None],
    ) -> None:
        """In the worker: answer, unless the client hung up while it waited."""
        gone = text_response(503, "the client hung up")
        response = _handled(handler, request) if wanted() else gone
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self.loop.call_soon_threadsafe(done, response)

    def _ready(self, _: Request) -> Response:
        busy_s = self._worker.busy_s()
        if busy_s > STUCK_S:
            return text_response(503, f"a scrape has been running for {busy_s:.0f} s")
        return text_response(200, "ready")

    def _start(self) -> None:
        try:
            self._thread.start()
            self._started.wait()
        except BaseException:  # Ctrl-C: nobody would have the handle to stop it by
            self.stop()
            raise
        if self._failure is not None:
            self._thread.join()
            self.stop()
            raise StartError(f"cannot serve on {self.url}: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            # The standard library's loop, whatever policy the program has set for its own loops.
            # The runner cancels what is left at the end: TLS handshakes that nobody goes on with.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._main())
        except Exception as error:  # noqa: BLE001 - for `_start` to raise, or for the log
            self._failure = error
            if self._started.is_set():
                _log.exception("the metrics server on %s ended", self.url)
        finally:
            for sock in self._sockets:
                sock.close()
            self._started.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(_note)
        options = {} if self._tls is None else self._tls.options
        servers = [
            await self.loop.create_server(
                lambda: Connection(self), sock=sock, backlog=BACKLOG, **options
            )
            for sock in self._sockets
        ]
        self._started.set()
        await self._stopping.wait()
        for server in servers:
            server.close()
        for connection in list(self._connections):
            connection.close_if_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), self.limits.grace_s)
        for connection in list(self._connections):
            connection.abort()
        await self._empty.wait()


def _handled(handler: Handler, request: Request) -> Response:
    try:
        return handler(request)
    except Exception as error:  # noqa: BLE001 - logged, and told by the status
        _log.exception("answering %s failed", request.path)
        return text_response(500, f"{type(error).__name__}; the program's log says more")


def _note(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """What asyncio would print with a traceback: clients do odd things, nobody need be told."""
    _log.debug("%s: %r", context.get("message"), context.get("exception"))


_running: weakref.WeakSet[HttpServer] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A fork copies the sockets: the port would stay taken, and closed connections open.

    They are replaced, not closed: Python objects still own their numbers.
    """
    numbers = [number for server in _running for number in server.descriptors()]
    if numbers:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            with contextlib.suppress(OSError):
                os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
