"""Snapshot files: taking a snapshot of watched pools, writing it whole, and reading it back.

CPU time: nothing here waits but for the disk, which is not the subject.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from veloxquant_mlx.memory.block_pool import BlockPoolAllocator
from veloxquant_mlx.telemetry import take_snapshot
from veloxquant_mlx.telemetry.snapshot_json import process_from_dict, process_to_dict
from veloxquant_mlx.telemetry.snapshot_writer import write_whole


@pytest.mark.benchmark(group="snapshots: take", timer=time.thread_time)
def test_take(measure: Any, pools: list[BlockPoolAllocator]) -> None:
    """All watched pools of this process."""
    seen: list[int] = []
    measure(
        lambda: seen.append(len(take_snapshot().pools)),
        check=lambda: seen[-1] == len(pools),
        n_blocks=0,
        rounds=30,
    )


@pytest.mark.benchmark(group="snapshots: write", timer=time.thread_time)
def test_write(measure: Any, pools: list[BlockPoolAllocator], tmp_path: Path) -> None:
    """One heartbeat: snapshot, JSON, temporary file, rename."""
    import json

    def write() -> None:
        data = json.dumps(process_to_dict(take_snapshot())).encode()
        write_whole(tmp_path, "a.snapshot.json", data)

    path = tmp_path / "a.snapshot.json"
    measure(write, check=lambda: path.stat().st_size > 1000, n_blocks=0, rounds=30)


@pytest.mark.benchmark(group="snapshots: read", timer=time.thread_time)
def test_read(measure: Any, pools: list[BlockPoolAllocator]) -> None:
    """What a sidecar does with a file: parse and check it."""
    import json

    data = json.dumps(process_to_dict(take_snapshot()))
    seen: list[Any] = []

    def read() -> None:
        seen[:] = [process_from_dict(json.loads(data))]

    measure(read, check=lambda: len(seen[0].pools) == len(pools), n_blocks=0, rounds=30)
