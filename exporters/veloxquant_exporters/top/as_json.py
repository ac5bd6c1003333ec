"""A board as JSON: what `vqmon top --json` prints. Its layout is told in docs/top.md."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

from veloxquant_exporters.top.board import Board, PoolView, ProcessView
from veloxquant_exporters.top.rules import HALF_JUDGED, NOT_JUDGED

__all__ = ["SCHEMA", "board_to_dict", "board_to_json"]

SCHEMA: Final = 1


def board_to_json(board: Board) -> str:
    """`board` as indented JSON; what is not known is null."""
    return json.dumps(board_to_dict(board), indent=1, allow_nan=False)


def board_to_dict(board: Board) -> dict[str, Any]:
    """`board` as plain values."""
    return {
        "schema": SCHEMA,
        "source": board.source,
        "wall_s": board.wall_s,
        "watched_s": board.watched_s,
        "errors": board.errors,
        "processes": [_process(process) for process in board.processes],
        "pools": [_pool(pool) for pool in board.pools],
        "alerts": [asdict(alert) for alert in board.alerts],
        "alerts_not_judged": {**NOT_JUDGED, **HALF_JUDGED},
    }


def _process(process: ProcessView) -> dict[str, Any]:
    found = asdict(process)
    if process.memory is not None:
        found["memory"]["rest"] = process.memory.rest
    return found


def _pool(pool: PoolView) -> dict[str, Any]:
    found = asdict(pool)
    del found["past"]
    found |= {"usage": pool.usage, "waste": pool.waste}
    for stream, view in zip(found["streams"], pool.streams, strict=True):
        stream["waste"] = view.waste
    return found
