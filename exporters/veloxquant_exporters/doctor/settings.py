"""Settings: what the doctor is asked to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT_PORTS", "Settings"]

# Of the exporter in the serving process, and of the sidecar.
DEFAULT_PORTS: Final = (9464, 9465)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to look at beside the environment.

    Attributes:
        prometheus: Address of a Prometheus server; None leaves it alone.
        snapshot_dir: Folder of snapshot files; None where none is named.
        ports: Ports that exporters want.
        device_timeout_s: How long MLX may take to compute a first sum, in a process of its own.
    """

    prometheus: str | None = None
    snapshot_dir: str | None = None
    ports: tuple[int, ...] = DEFAULT_PORTS
    device_timeout_s: float = 60.0
