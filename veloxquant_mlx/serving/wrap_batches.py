"""Wrappers around mlx-lm's batches and its batch generator, all of the form "and then tell"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from veloxquant_mlx.serving.events import Event, Seams
from veloxquant_mlx.serving.patcher import Make

__all__ = ["after", "argument", "batch_filter"]

_Function = Callable[..., Any]
# What to tell of a call: the event, its arguments, named arguments and result.
_Tell = Callable[[Event, tuple[Any, ...], dict[str, Any], Any], None]


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """An argument that may have been given by place or by name; None if it was not."""
    return args[index] if len(args) > index else kwargs.get(name)


def after(name: str, tell: _Tell) -> Make:
    """What makes a wrapper that tells of a call once it has returned."""

    def make(original: _Function, seams: Seams) -> _Function:
        event = seams.event(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if event:
                try:
                    tell(event, args, kwargs, result)
                except Exception:  # noqa: BLE001 - another mlx-lm may give other things
                    seams.count(event.hook)
            return result

        return wrapper

    return make


def batch_filter(original: _Function, seams: Seams) -> _Function:
    """`PromptProcessingBatch.filter`, `GenerationBatch.filter`: with the rows as they were."""
    event = seams.event("on_batch_filtered")

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        uids = getattr(self, "uids", None)  # filtering puts another list in its place
        result = original(self, *args, **kwargs)
        event(self, argument(args, kwargs, 0, "keep"), uids)
        return result

    return wrapper
