"""A target that takes the counter's hook away, as a debugger or a coverage tool would."""

from __future__ import annotations

import sys
from typing import Any

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator

__all__ = ["TakesTheHook"]


class TakesTheHook(BlockPoolAllocator):
    """Releases unseen."""

    def free_all(self, owner: int | str) -> None:
        """Switch the counter off, then release."""
        sys.settrace(None)
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is not None:
            tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
            monitoring.register_callback(tool, event, None)
        super().free_all(owner)
