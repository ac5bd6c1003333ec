"""Watch: all that looks on at a program that uses mlx-lm, put together."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from veloxquant_mlx.serving.accounting import Accounting
from veloxquant_mlx.serving.batch_watch import BatchWatch, ServerWatch
from veloxquant_mlx.serving.census import Census
from veloxquant_mlx.serving.events import Listener, Seams
from veloxquant_mlx.serving.patcher import Patcher
from veloxquant_mlx.serving.points import POINTS, TESTED_VERSIONS
from veloxquant_mlx.serving.prompt_cache_watch import PromptCacheWatch
from veloxquant_mlx.serving.request_watch import RequestWatch
from veloxquant_mlx.serving.weights import Weights
from veloxquant_mlx.telemetry.program import CacheCensus, ProgramSnapshot
from veloxquant_mlx.telemetry.program_source import set_program_source

__all__ = ["Watch", "stop_watching", "watch"]

_log = logging.getLogger("veloxquant_mlx.serving")
_T = TypeVar("_T")


class _WarnOnce(Listener):
    """Says once what is off, when the program has imported what it needs."""

    def __init__(self, patcher: Patcher) -> None:
        self._patcher = patcher
        self.done = False

    def on_model_loaded(self, model: Any) -> None:
        """Programs load a model after their imports."""
        self.warn()

    def on_server_made(self, server: Any) -> None:
        """So they do with a server."""
        self.warn()

    def warn(self) -> None:
        """Warn, if there is something to say and nothing was said yet."""
        version, missing = _version(), self._patcher.missing()
        if self.done or not version or not (missing or version not in TESTED_VERSIONS):
            return
        self.done = True
        _log.warning(
            "mlx-lm %s is %s (tested: %s); off: %s",
            version,
            "tested, but was changed" if version in TESTED_VERSIONS else "untested",
            ", ".join(TESTED_VERSIONS),
            ", ".join(missing) or "nothing",
        )


class Watch:
    """Looks on, from `start` to `stop`. There is one in a process: see `watch`.

    Args:
        census: Whether to keep count of the live caches.
        accounting: What charges them to a pool, if anything.
    """

    def __init__(self, *, census: bool = True, accounting: Accounting | None = None) -> None:
        self.seams = Seams()
        self.patcher = Patcher(POINTS, self.seams)
        self._census = Census() if census else None
        self._weights = Weights()
        self._prompt_cache = PromptCacheWatch()
        self._requests = RequestWatch()
        self._batches = BatchWatch(self.seams)
        self._server = ServerWatch()
        self._warning = _WarnOnce(self.patcher)
        parts = (self._weights, self._prompt_cache, self._requests, self._batches, self._server)
        self.seams.add(*parts, self._warning)
        if self._census is not None:
            self.seams.add(self._census)
        self.accounting = accounting
        if accounting is not None:
            self.seams.add(*accounting.listeners)
            accounting.needs(self.patcher.hooks)

    def start(self) -> None:
        """Put the hooks in place, and this program into every snapshot."""
        self.patcher.install()
        accounting = self.accounting
        set_program_source(self.snapshot, None if accounting is None else accounting.refresh)
        atexit.register(self._warning.warn)

    def stop(self) -> None:
        """Undo `start`."""
        atexit.unregister(self._warning.warn)
        set_program_source(None)
        self.patcher.remove()
        if self.accounting is not None:
            self.accounting.close()

    def snapshot(self) -> ProgramSnapshot:
        """The program now. What cannot be read is left out and counted."""
        hooks = self.patcher.hooks()
        if self._weights.total_bytes() is not None or hooks.get("weights") is False:
            self._warning.warn()  # before a model is loaded, imports may still be going on
        active: dict[str, int] = self._read("batch_generator", self._batches.active, {})
        if active:
            active["queued"] += self._read("server", self._server.queued, 0)
        census = self._census
        return ProgramSnapshot(
            mlx_lm=_version(),
            hooks=hooks,
            caches=None if census is None else self._read("cache_census", self._counted, None),
            prompt_cache=self._read("prompt_cache", self._prompt_cache.snapshot, None),
            requests=self._requests.snapshot(),
            active_requests=active,
            decode_batch=self._batches.rows(),
            generation_thread_alive=self._read("server", self._server.alive, None),
            weights_bytes=self._weights.total_bytes(),
            account=None if self.accounting is None else self.accounting.snapshot(),
            hook_errors={**dict.fromkeys(hooks, 0), **self.seams.errors},
        )

    def _counted(self) -> Mapping[str, CacheCensus]:
        assert self._census is not None
        return self._census.count(lambda: self.seams.count("cache_census"))

    def _read(self, hook: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except Exception:  # noqa: BLE001 - another mlx-lm costs what stands on its insides only
            self.seams.count(hook)
            return otherwise


_current: list[Watch] = []


def watch(*, census: bool = True, accounting: Accounting | None = None) -> Watch:
    """Look on at what this process does with mlx-lm from now on; asked again, the same one.

    Call it before mlx-lm is imported: objects that exist already are not seen. It imports nothing
    of mlx-lm itself.

    Args:
        census: Whether to keep count of the live caches.
        accounting: What charges them to a pool, if anything.
    """
    if not _current:
        new = Watch(census=census, accounting=accounting)
        new.start()
        _current.append(new)
    return _current[0]


def stop_watching() -> None:
    """Undo `watch`."""
    while _current:
        _current.pop().stop()


def _version() -> str:
    module = sys.modules.get("mlx_lm._version") or sys.modules.get("mlx_lm")
    version = getattr(module, "__version__", "")
    return version if isinstance(version, str) else ""
