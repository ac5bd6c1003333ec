"""Wrappers that see requests: of the server, and of programs that generate by themselves."""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from veloxquant_mlx.serving.events import Refusal, Seams
from veloxquant_mlx.serving.request import Request, outcome_of
from veloxquant_mlx.serving.sequence import Sequence
from veloxquant_mlx.serving.wrap_batches import argument
from veloxquant_mlx.telemetry.program_values import Operation, Outcome

__all__ = [
    "generate_step",
    "handle_completion",
    "in_server",
    "is_servers",
    "run_generate",
    "server_generate",
    "server_init",
    "stream_generate",
]

_Function = Callable[..., Any]
_local: Final = threading.local()


# Servers whose generation thread could not be marked, as this mlx-lm runs it in another way.
_unmarked: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def in_server() -> bool:
    """True on the server's generation thread."""
    return getattr(_local, "in_server", False)


def is_servers() -> bool:
    """Whether what is generated here is of a request that is counted where it arrived.

    Where the server's thread cannot be told from others, all is, while there is a server.
    """
    return in_server() or bool(_unmarked)


def run_generate(original: _Function, _seams: Seams) -> _Function:
    """`ResponseGenerator._run_generate`: marks the generation thread."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _local.in_server = True
        try:
            return original(*args, **kwargs)
        finally:
            _local.in_server = False

    wrapper.marks_thread = True  # type: ignore[attr-defined]
    return wrapper


def server_init(original: _Function, seams: Seams) -> _Function:
    """`ResponseGenerator.__init__`."""
    made = seams.event("on_server_made")

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(getattr(type(self), "_run_generate", None), "marks_thread", False):
            _unmarked.add(self)
        original(self, *args, **kwargs)
        made(self)

    return wrapper


# -- an HTTP request -----------------------------------------------------------------------------


class _Scope:
    """Handling of one HTTP request: it ends when the answer is written, or cannot be."""

    def __init__(self) -> None:
        self.requests: list[Request] = []


def handle_completion(original: _Function, seams: Seams) -> _Function:
    """`APIHandler.handle_completion`: lets a request in or not, and sees how it ended for good."""
    admit, finished = seams.event("admit"), seams.event("on_request_finished")

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = argument(args, kwargs, 0, "request")
        refusal = admit.ask(self, asked)
        if refusal is not None:
            request = Request(_operation(asked))
            try:
                return _refuse(self, refusal)
            finally:
                request.end("rejected")
                finished(request)
        scope = _local.scope = _Scope()
        ended: Outcome | None = None
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            ended = outcome_of(error)
            raise
        finally:
            _local.scope = None
            for request in scope.requests:
                # The client that left before it had the answer did not get what was generated.
                request.end(ended or request.outcome or "cancelled")
                finished(request)

    return wrapper


def _refuse(handler: Any, refusal: Refusal) -> None:
    error = {"message": refusal.message, "type": refusal.kind, "param": None, "code": refusal.code}
    body = json.dumps({"error": error}).encode()  # as OpenAI's clients read it
    # As its own answers do, where this mlx-lm has it.
    getattr(handler, "_set_completion_headers", handler.send_response)(refusal.status)
    handler.send_header("Retry-After", str(refusal.retry_after_s))
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
    handler.wfile.flush()


def server_generate(original: _Function, seams: Seams) -> _Function:
    """`ResponseGenerator.generate`: a request, from here to the last of its responses."""
    follow = _Follower(seams)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = follow.start(_operation(argument(args, kwargs, 0, "request")))
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            # Nothing was written to the client yet: a connection that failed is the server's own.
            follow.end(request, "failed" if isinstance(error, Exception) else outcome_of(error))
            raise
        try:
            context, responses = result
            iter(responses)  # else it cannot be followed
            request.n_prompt = len(context.prompt)
            follow.read(request)
        except Exception:  # noqa: BLE001 - another mlx-lm gives something else: let it pass
            seams.count(follow.hook)
            follow.end(request, "ok")  # as far as can be seen; inside of a handler that has its say
            return result
        return context, follow.responses(request, responses, context)

    return wrapper


def _operation(request: Any) -> Operation:
    return "text_completion" if getattr(request, "request_type", "") == "text" else "chat"


class _Follower:
    """Tells of a request what happens to it."""

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._started = seams.event("on_request_started")
        self.read = seams.event("on_request_read")
        self._token = seams.event("on_request_token")
        self._finished = seams.event("on_request_finished")

    @property
    def hook(self) -> str:
        return self._started.hook

    def start(self, operation: Operation) -> Request:
        request = Request(operation)
        scope = getattr(_local, "scope", None)
        if scope is not None:
            scope.requests.append(request)
        self._started(request)
        return request

    def end(self, request: Request, outcome: Outcome) -> None:
        request.end(outcome)
        scope = getattr(_local, "scope", None)
        if scope is None or request not in scope.requests:
            self._finished(request)

    def responses(self, request: Request, responses: Any, context: Any) -> Iterator[Any]:
        """The same responses, each of them a token."""
        try:
            for response in responses:
                if not request.n_generated:
                    _count_cached(request, context)
                request.token()
                self._token(request)
                yield response
        except BaseException as error:
            if request.outcome is None:  # else it was the client's end that ended this
                self.end(request, outcome_of(error))
            raise
        self.end(request, "ok")

    def stream(self, request: Request, responses: Any) -> Iterator[Any]:
        """The same, of `stream_generate`: responses tell how long the prompt was."""
        try:
            for response in responses:
                if not request.n_generated:
                    request.n_prompt = getattr(response, "prompt_tokens", 0)
                    self.read(request)
                request.token()
                self._token(request)
                yield response
        except BaseException as error:
            self.end(request, outcome_of(error))
            raise
        self.end(request, "ok")


def _count_cached(request: Request, context: Any) -> None:
    """Take over what the prompt cache had, which is known by the first token."""
    request.n_cached = max(0, getattr(context, "prompt_cache_count", 0) or 0)


# -- without a server ----------------------------------------------------------------------------


def stream_generate(original: _Function, seams: Seams) -> _Function:
    """`stream_generate`: a sequence by itself; on the server's thread the request is known."""
    follow = _Follower(seams)
    began, ended = seams.event("on_stream_started"), seams.event("on_stream_ended")

    def watched(responses: Any) -> Iterator[Any]:
        began()
        try:
            if is_servers():
                yield from responses
            else:
                yield from follow.stream(follow.start("text_completion"), responses)
        finally:
            ended()

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        responses = original(*args, **kwargs)
        return watched(responses) if _can_follow(responses, seams, began.hook) else responses

    return wrapper


def _can_follow(steps: Any, seams: Seams, hook: str) -> bool:
    """Whether it gives one thing after the other; another mlx-lm may do it in another way."""
    try:
        iter(steps)
    except TypeError:
        seams.count(hook)
        return False
    return True


def generate_step(original: _Function, seams: Seams) -> _Function:
    """`generate_step`, `speculative_generate_step`: a sequence, wherever it runs."""
    started, token, ended = (seams.event(f"on_sequence_{x}") for x in ("started", "token", "ended"))

    def watched(steps: Any, sequence: Sequence) -> Iterator[Any]:
        started(sequence)
        try:
            for step in steps:
                token(sequence)
                yield step
        finally:
            # Whoever drops a generator expects its `finally` to have run.
            if hasattr(steps, "close"):
                steps.close()
            ended(sequence)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        steps = original(*args, **kwargs)
        if not (started or token or ended) or not _can_follow(steps, seams, started.hook):
            return steps
        caches = kwargs.get("prompt_cache")
        return watched(steps, Sequence(caches if isinstance(caches, list) else None))

    return wrapper
