"""The incidents: each of them was reported by somebody who ran a server."""

from __future__ import annotations

from typing import Final

from dashboards.drill.incidents.capacity import CAPACITY
from dashboards.drill.incidents.leaks import LEAKS
from dashboards.drill.incidents.memory import MEMORY
from dashboards.drill.incidents.pool_life import POOL_LIFE
from dashboards.drill.incidents.telemetry import TELEMETRY
from dashboards.drill.incidents.timing import TIMING

__all__ = ["INCIDENTS"]

INCIDENTS: Final = (*LEAKS, *CAPACITY, *MEMORY, *TIMING, *POOL_LIFE, *TELEMETRY)
