"""Weights: bytes of the parameters of the models that are loaded, by their shapes."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from veloxquant_mlx.serving.events import Listener

__all__ = ["Weights", "parameter_bytes"]


def parameter_bytes(model: Any) -> int:
    """Bytes of the parameters of an `mlx.nn.Module`, each array once; evaluates none.

    Raises:
        Exception: It is no module.
    """
    flatten: Any = sys.modules["mlx.utils"].tree_flatten
    arrays = {id(array): array for _, array in flatten(model.parameters())}
    return sum(array.nbytes for array in arrays.values())


class Weights(Listener):
    """Sums up each model when it is loaded, and forgets it when it is dropped."""

    def __init__(self) -> None:
        self._models: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._any = False

    def on_model_loaded(self, model: Any) -> None:
        """Sum it up, anew if it is known."""
        key = id(model)

        def gone(ref: weakref.ref[Any]) -> None:
            known = self._models.get(key)
            if known is not None and known[0] is ref:
                del self._models[key]

        self._models[key] = (weakref.ref(model, gone), parameter_bytes(model))
        self._any = True

    def total_bytes(self) -> int | None:
        """Of all models that live; None before the first was loaded."""
        return sum(n for _, n in list(self._models.values())) if self._any else None
