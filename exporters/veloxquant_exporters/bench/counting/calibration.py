"""Calibration: work of known cost, counted before anything else is believed.

Rewritten like a target. If a count here is not what it must be, the counter is blind.
"""

from __future__ import annotations

import threading

__all__ = ["KNOWN", "work"]


def work(n: int) -> int:
    """A bit of everything that the counters must see; returns its moves, worked out by hand."""
    numbers = list(range(n))
    lock = threading.Lock()
    seen = 0
    if n - 1 in numbers:  # n
        seen += 1
    if n not in numbers:  # n
        seen += 1
    numbers.remove(n - 1)  # n; n - 1 are left
    copied = numbers[:]  # n - 1
    with lock:
        copied += numbers  # n - 1
        del copied[0]  # 2n - 2
    joined = copied + numbers  # 3n - 4
    numbers.insert(0, -1)  # n - 1
    found = numbers.index(-1)  # 1
    for _ in joined:  # counted as instructions
        found += 1
    return n + n + n + (n - 1) + (n - 1) + (2 * n - 2) + (3 * n - 4) + (n - 1) + 1


KNOWN = "veloxquant_exporters.bench.counting.calibration"
