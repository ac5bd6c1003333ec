"""Wrappers around what loads models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from veloxquant_mlx.serving.events import Seams

__all__ = ["load_adapters", "load_model"]

_Function = Callable[..., Any]


def load_model(original: _Function, seams: Seams) -> _Function:
    """`load_model`: the model and its configuration."""
    loaded = seams.event("on_model_loaded")

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        loaded(result[0] if isinstance(result, tuple) else result)
        return result

    return wrapper


def load_adapters(original: _Function, seams: Seams) -> _Function:
    """`load_adapters`: the model with more parameters than before."""
    return load_model(original, seams)
