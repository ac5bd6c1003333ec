"""Events: what happens inside a program that uses mlx-lm, told to whoever listens.

A hook never changes what the program sees: what a listener raises is caught, counted by hook and
logged once a hook. Listeners are called on the program's own threads, in the middle of its work, so
they must be quick, and must not evaluate an array.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from veloxquant_mlx.serving.fork_lock import lock_of

if TYPE_CHECKING:
    from veloxquant_mlx.serving.request import Request
    from veloxquant_mlx.serving.sequence import Sequence

__all__ = ["EVENTS", "Event", "Listener", "Refusal", "Seams"]

_log = logging.getLogger("veloxquant_mlx.serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a client gets whose request is not let in.

    Attributes:
        message: Why; the text of the JSON error.
        code, kind: Its code and type, for programs.
        retry_after_s: Whole seconds, for Retry-After.
        status: HTTP status.
    """

    message: str
    code: str = "overloaded"
    kind: str = "server_error"
    retry_after_s: int = 1
    status: int = 503


class Listener:
    """Everything that can be listened to; override what is wanted, the rest costs nothing.

    Objects are mlx-lm's own, hence `Any`; hold them weakly. An event comes after what it tells of,
    on the thread that did it; while it is handled, that thread does nothing else.
    """

    # -- caches ---------------------------------------------------------------------------------

    def on_cache_created(self, cache: Any) -> None:
        """An object of a cache class came to be, also by copying; it has no attributes yet."""

    def on_caches_made(self, model: Any, caches: list[Any]) -> None:
        """`make_prompt_cache` made the caches of one request: one for each layer."""

    def on_caches_loaded(self, caches: list[Any]) -> None:
        """`load_prompt_cache` read the caches of one sequence from a file."""

    # -- batches: `PromptProcessingBatch` and `GenerationBatch` ---------------------------------

    def on_batch_merged(self, batch: Any, caches: list[list[Any]]) -> None:
        """A prompt batch was made of the caches of its rows; `batch.uids` names the rows."""

    def on_batch_copied(self, batch: Any, copy: Any) -> None:
        """`copy` has the rows of `batch`, and deep copies of its caches: the first half of a split."""

    def on_batch_split(self, batch: Any, taken: Any, indices: list[int]) -> None:
        """`taken` got the rows `indices`, `batch` kept the others; both were filtered."""

    def on_batch_extended(self, batch: Any, other: Any) -> None:
        """The rows of `other` were put behind those of `batch`; `other` is about to be dropped."""

    def on_batch_filtered(self, batch: Any, keep: list[int], uids: list[int]) -> None:
        """Of the rows `uids`, those at the indices `keep` are left; without any, no caches are."""

    def on_batch_generating(self, batch: Any, generation: Any) -> None:
        """The rows and caches of a prompt batch went to `generation`; `batch` is empty."""

    def on_row_extracted(self, batch: Any, index: int, caches: list[Any]) -> None:
        """`caches` are a copy of one row, which is still in the batch."""

    def on_prompt_processed(self, batch: Any) -> None:
        """The caches of a prompt batch have grown by some prompt tokens."""

    def on_step(self, batch: Any) -> None:
        """The caches of a generation batch have grown by a token."""

    # -- `BatchGenerator` -----------------------------------------------------------------------

    def on_generator_made(self, generator: Any) -> None:
        """There is a new batch generator."""

    def on_sequences_inserted(self, generator: Any, uids: list[int], segments: Any) -> None:
        """Requests wait in `generator._unprocessed_sequences`, prompts by segments of tokens."""

    def on_responses(self, generator: Any, prompts: list[Any], generated: list[Any]) -> None:
        """A round is done: its responses as `BatchGenerator.next` gives them."""

    def on_sequences_removed(self, generator: Any, uids: list[int]) -> None:
        """Requests were taken out before their end, or after."""

    def on_generator_closed(self, generator: Any) -> None:
        """A batch generator was closed; this may come more than once."""

    # -- the server's prompt cache: `LRUPromptCache` --------------------------------------------

    def on_prompt_cache_opened(self, prompt_cache: Any) -> None:
        """There is a new prompt cache."""

    def on_prompt_cache_fetched(
        self, prompt_cache: Any, tokens: list[int], caches: list[Any] | None, n: int
    ) -> None:
        """`tokens` were looked up; `caches` are a deep copy that covers the first `n`, or None."""

    def on_entry_inserted(self, prompt_cache: Any, tokens: list[int], entry: Any) -> None:
        """`entry` (prompt_cache, nbytes, cache_type) is kept, until `on_entry_removed` says so."""

    def on_prompt_cache_changed(self, prompt_cache: Any) -> None:
        """An insertion is done, with all that it removed: the prompt cache may be called again."""

    def on_entry_removed(self, prompt_cache: Any, entry: Any, reason: str) -> None:
        """`entry` is kept no more: replaced, prefix, entries, bytes, trimmed, budget.

        replaced: by one of the same tokens. prefix: a longer entry has all of it. entries, bytes:
        over a limit, the least recently used goes. trimmed: room was made for the batch. budget:
        the pool that is charged is full.
        """

    # -- one sequence: `generate_step` and `speculative_generate_step` --------------------------

    def on_sequence_started(self, sequence: Sequence) -> None:
        """It is about to run; what `make_prompt_cache` makes from here to its first token is its."""

    def on_sequence_token(self, sequence: Sequence) -> None:
        """It gave a token."""

    def on_sequence_ended(self, sequence: Sequence) -> None:
        """It ended, or was closed. Its caches are the program's, which may go on with them."""

    # -- requests -------------------------------------------------------------------------------

    def admit(self, handler: Any, request: Any) -> Refusal | None:
        """Asked before an HTTP request is queued; the first refusal is sent. None lets it in."""

    def on_request_started(self, request: Request) -> None:
        """A request arrived."""

    def on_request_read(self, request: Request) -> None:
        """Its prompt is known: `n_prompt`."""

    def on_request_token(self, request: Request) -> None:
        """Another token reached whoever asked."""

    def on_request_finished(self, request: Request) -> None:
        """It ended, for whatever reason: `outcome`."""

    def on_stream_started(self) -> None:
        """One sequence by itself is being generated, without a batch."""

    def on_stream_ended(self) -> None:
        """As many times as `on_stream_started`."""

    # -- the process ----------------------------------------------------------------------------

    def on_server_made(self, server: Any) -> None:
        """There is a `ResponseGenerator`, whose generation thread runs."""

    def on_model_loaded(self, model: Any) -> None:
        """A model was loaded, or had adapters put into it."""


EVENTS: Final = (*(name for name in vars(Listener) if name.startswith("on_")), "admit")


class Event:
    """One event: calls the listeners that override it, and lets none of their errors out."""

    __slots__ = ("_calls", "_seams", "hook", "name")

    def __init__(self, name: str, seams: Seams) -> None:
        self.name = name
        self.hook = name
        self._seams = seams
        self._calls: tuple[Callable[..., Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __call__(self, *args: Any) -> None:
        """Tell every listener."""
        for call in self._calls:
            try:
                call(*args)
            except Exception:  # noqa: BLE001 - the program must not see a fault of ours
                self._seams.count(self.hook)

    def ask(self, *args: Any) -> Any:
        """The first answer that is not None."""
        for call in self._calls:
            try:
                answer = call(*args)
            except Exception:  # noqa: BLE001
                self._seams.count(self.hook)
                continue
            if answer is not None:
                return answer
        return None

    def listen(self, listeners: Iterable[Listener]) -> None:
        """Call these from now on."""
        base = getattr(Listener, self.name)
        self._calls = tuple(
            getattr(listener, self.name)
            for listener in listeners
            if getattr(type(listener), self.name) is not base
        )


class Seams:
    """All events, and who listens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = lock_of(self)
        self._listeners: tuple[Listener, ...] = ()
        self._events = {name: Event(name, self) for name in EVENTS}
        self.errors: dict[str, int] = {}

    def event(self, name: str) -> Event:
        """The event of that name; always the same object."""
        return self._events[name]

    def add(self, *listeners: Listener) -> None:
        """Let these listen as well, after those that do."""
        with self._lock:
            self._tell((*self._listeners, *listeners))

    def remove(self, *listeners: Listener) -> None:
        """Let these listen no more."""
        with self._lock:
            self._tell(tuple(one for one in self._listeners if one not in listeners))

    def count(self, hook: str) -> None:
        """Count the exception that is being handled; the first of a hook is logged."""
        with self._lock:
            n = self.errors.get(hook, 0)
            self.errors[hook] = n + 1
        if n == 0:
            _log.error("the hook %r failed; the program goes on", hook, exc_info=True)

    def _tell(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners
        for event in self._events.values():
            event.listen(listeners)
