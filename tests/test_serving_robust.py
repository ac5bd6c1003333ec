"""The watch where a program, or an mlx-lm to come, does what was not expected."""

from __future__ import annotations

import gc
import io
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from typing import Any

import pytest

from veloxquant_exporters.demo.model import tiny_llama
from veloxquant_mlx.memory.block_pool import BlockPoolAllocator, PoolConfig
from veloxquant_mlx.serving import Listener, Refusal, Request, Seams, Watch, stop_watching, watch
from veloxquant_mlx.serving import wrap_requests as wrappers
from veloxquant_mlx.serving.accounting import PoolSettings, account_for
from veloxquant_mlx.serving.accounting.admission import Admission
from veloxquant_mlx.serving.accounting.books import Books

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
pytestmark = pytest.mark.timeout(60)
lm: Any = import_module("mlx_lm.generate")
caches: Any = import_module("mlx_lm.models.cache")


class Ended(Listener):
    """Remembers how requests ended."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def on_request_finished(self, request: Request) -> None:
        """See `Listener`."""
        self.outcomes.append(request.outcome)

    def on_sequence_started(self, sequence: Any) -> None:
        """See `Listener`."""


@pytest.fixture
def watched() -> Iterator[Watch]:
    """A watch of the test's own."""
    gc.collect()
    stop_watching()
    yield watch()
    stop_watching()


@pytest.fixture
def heard() -> tuple[Seams, Ended]:
    """Events, and who listens."""
    seams, ended = Seams(), Ended()
    seams.add(ended)
    return seams, ended


def test_a_generator_that_is_collected_in_a_cycle_cancels_its_requests(watched: Watch) -> None:
    """Weak references to it are gone before it is closed."""
    batch = lm.BatchGenerator(tiny_llama(0).model, max_tokens=50)
    batch.insert([[5, 6, 7]])
    batch.next()
    batch.itself = batch
    del batch
    gc.collect()
    requests = (watched.snapshot().requests or {})["text_completion"]
    assert requests.finished["cancelled"] == 1


def test_prompt_caches_that_are_gone_are_forgotten(watched: Watch) -> None:
    """Their number is bounded by those that live; what was counted of them stays."""
    for _ in range(20):
        caches.LRUPromptCache(3).fetch_nearest_cache("m", [1])
    found = watched.snapshot().prompt_cache
    assert found is not None and found.lookups["miss"] == 20 and found.max_entries is None
    assert len(watched._prompt_cache._caches) == 1


def test_a_connection_of_the_servers_own_is_no_client_that_left(
    heard: tuple[Seams, Ended],
) -> None:
    """A model that cannot be downloaded fails the request, by whatever error."""
    seams, ended = heard

    def generate(_self: Any, _request: Any) -> Any:
        raise ConnectionError("the hub is not there")

    with pytest.raises(ConnectionError, match="hub"):
        wrappers.server_generate(generate, seams)(None, None)
    assert ended.outcomes == ["failed"]


def test_what_cannot_be_followed_is_passed_on(heard: tuple[Seams, Ended]) -> None:
    """An asynchronous generator reaches the program as it is, and the hook has failed."""
    seams, ended = heard

    async def steps(*_: Any) -> AsyncIterator[int]:
        yield 1

    for make in (wrappers.stream_generate, wrappers.generate_step):
        made = make(steps, seams)(None)
        assert type(made).__name__ == "async_generator"
    assert sum(seams.errors.values()) == 2

    def generate(*_: Any) -> Any:
        return type("Context", (), {"prompt": [1, 2]}), steps()

    _, responses = wrappers.server_generate(generate, seams)(None, None)
    assert type(responses).__name__ == "async_generator"
    assert ended.outcomes == ["ok"] and sum(seams.errors.values()) == 3


def test_a_request_counts_once_where_the_servers_thread_is_unknown(
    heard: tuple[Seams, Ended],
) -> None:
    """Another mlx-lm may start it in another way: what it generates is of requests that came in."""
    seams, ended = heard

    class Server:
        pass

    stream = wrappers.stream_generate(lambda: iter("ab"), seams)
    server = Server()
    wrappers.server_init(lambda _self: None, seams)(server)
    assert list(stream()) == ["a", "b"] and ended.outcomes == []
    del server
    gc.collect()
    assert list(stream()) == ["a", "b"] and ended.outcomes == ["ok"]


class Stubborn(caches.LRUPromptCache):  # type: ignore[misc]
    """One of an mlx-lm to come, which evicts in another way."""

    def trim_to(self, **_: Any) -> None:
        """Keep all."""


def test_a_prompt_cache_that_keeps_its_entries_holds_nobody_up() -> None:
    """Over budget it is asked once; that it evicts nothing is no reason to ask for ever."""
    stop_watching()
    accounting = account_for(PoolSettings.parse("blocks=2,block-size=16"))
    watched = watch(accounting=accounting)
    try:
        kept = [Stubborn(9) for _ in range(3)]
        for n in range(3):
            made = [caches.KVCache() for _ in range(2)]
            for cache in made:
                cache.update_and_fetch(mx.zeros((1, 2, 8, 16)), mx.zeros((1, 2, 8, 16)))
            kept[0].insert_cache("m", [n] * 8, made)
        assert len(kept[0]) == 3
        account = accounting.snapshot()
        assert account is not None and account.excess_blocks > 0
        del kept
        gc.collect()
        caches.LRUPromptCache(9)
        assert len(accounting._books.prompt_caches) == 1
        assert not any(watched.snapshot().hook_errors.values())
    finally:
        stop_watching()


def test_a_request_may_end_while_another_is_let_in() -> None:
    """A generator is collected in the middle of anything, on any thread, with its request."""
    admission = Admission(Books(BlockPoolAllocator(PoolConfig(n_blocks=8))))
    request = Request("chat")
    with admission._lock:
        admission.on_request_started(request)
        admission.on_request_finished(request)
    assert not admission._inside


def test_a_refusal_needs_nothing_of_mlx_lms_own(heard: tuple[Seams, Ended]) -> None:
    """A handler that writes its headers in another way still says 503 and when to come again."""
    seams, ended = heard

    class No(Listener):
        def admit(self, handler: Any, request: Any) -> Refusal:
            return Refusal(message="full", retry_after_s=7)

    class Handler(BaseHTTPRequestHandler):
        def __init__(self) -> None:
            self.written = self.wfile = io.BytesIO()
            self.request_version = "HTTP/1.1"
            self.requestline = ""

        def log_message(self, format: str, *_: Any) -> None:
            pass

    seams.add(No())
    handler = Handler()
    wrappers.handle_completion(lambda *_: None, seams)(handler, None)
    head, _, body = handler.written.getvalue().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 503") and b"Retry-After: 7" in head
    assert b'"full"' in body and ended.outcomes == ["rejected"]
