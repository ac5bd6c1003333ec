"""Counting: exact work of a call, the same on every run and under any load.

Two counters run side by side. Bytecode instructions are counted by the interpreter, which is blind to
what one instruction does inside a container: `x in list` is one. So the target's source is rewritten
as it is imported, and each operation on a container pays for the elements it touches (`charges`).
Locks are counted too: the most work done within one hold.

Runs in a process of its own (`python -m veloxquant_exporters.bench.counting`), since it replaces
modules and owns the tracing hook.
"""

from __future__ import annotations

__all__: list[str] = []
