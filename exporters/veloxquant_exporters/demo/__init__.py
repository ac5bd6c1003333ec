"""The demo: a model serves simulated requests through one pool, watched.

Importing this package loads no MLX and no exporter; `run` does.
"""

from __future__ import annotations

from veloxquant_exporters.demo.settings import Settings
from veloxquant_exporters.interrupts import interrupts_held

__all__ = ["Settings", "run"]


def run(settings: Settings) -> int:
    """Run the demo and return the exit code of `vqmon demo`.

    Raises:
        ClickException: It cannot start, or a request can never be served.
        ImportError: MLX, mlx-lm, rich or prometheus-client is missing.
    """
    with interrupts_held():
        from veloxquant_exporters.demo.session import run_session

    return run_session(settings)
