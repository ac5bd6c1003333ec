"""Serving: hooks around mlx-lm in this process, for `vqmon run` and for whoever wants more of it.

`watch()` puts them in place. The table of what is wrapped is `points`, what it tells are the
methods of `Listener`; add one with `watch().seams.add(listener)`. Importing this imports no MLX.
"""

from __future__ import annotations

from veloxquant_mlx.serving.events import Listener, Refusal, Seams
from veloxquant_mlx.serving.patcher import Patcher, PatchPoint
from veloxquant_mlx.serving.points import POINTS, TESTED_VERSIONS
from veloxquant_mlx.serving.request import Request
from veloxquant_mlx.serving.watch import Watch, stop_watching, watch

__all__ = [
    "POINTS",
    "TESTED_VERSIONS",
    "Listener",
    "PatchPoint",
    "Patcher",
    "Refusal",
    "Request",
    "Seams",
    "Watch",
    "stop_watching",
    "watch",
]
