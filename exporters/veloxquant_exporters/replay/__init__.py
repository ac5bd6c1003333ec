"""Replay: a recorded trace, done again by a real allocator; checked, and timed."""

from __future__ import annotations

from veloxquant_exporters.replay.driver import Driver, Moved, Share

__all__ = ["Driver", "Moved", "Share"]
