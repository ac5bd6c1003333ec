"""Scaling benchmarks of any block allocator: what is called, how it is timed, how it is counted.

Nothing here imports the allocator: a target is named as `package.module:factory` and loaded late, so
that one and the same method measures this project's pool, its older commits, a user's subclass, or
another package with the same methods. `vqmon bench` and the guard in `benchmarks/` are built on it.

`workloads` says what is called; `timed` measures CPU time; `counting` counts work exactly;
`verdict` judges both by budgets; `report` shows them. Importing this package loads no other library.
"""

from __future__ import annotations

__all__: list[str] = []
